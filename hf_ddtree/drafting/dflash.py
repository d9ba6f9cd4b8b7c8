"""Drafts with a DFlash model: one forward gives a distribution for each depth, best-first search makes them a tree."""

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DFlashCache
from transformers.generation.candidate_generator import CandidateGenerator

from ..configuration import DDTreeConfig
from ..models.dflash import MASK_CACHE_NAME, DFlashDraftModel, noise_embeddings
from ..models.head import head_logits
from ..target import Context
from ..tree import Tree, build_tree, root_tree
from .corrections import Corrections
from .draft import Draft, calibrated_temperatures


class DDTreeCandidateGenerator(CandidateGenerator):
    """Drafts for one sequence; holds the drafter's cache, which encodes each committed token but the last once.

    Args:
        drafter: the assistant model.
        target: whose embedding and head the drafter borrows; both are called as modules, so that hooks, quantised
            layers and padded vocabularies work.
        config: tree budget, top-k and block size.

    Raises:
        ValueError: the drafter does not fit the target, or the config does not fit the drafter.
    """

    requires_model_outputs = True

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, config: DDTreeConfig):
        check_drafter(drafter, target, config)
        self.drafter, self.target, self.config = drafter, target, config
        self.block_size = config.draft_block_size or drafter.config.block_size
        self.cache = DFlashCache(config=drafter.config)
        self.cache.activate_past_recording()
        self.drafted = 0  # length of the noise block that the cache still holds
        self.corrections = Corrections(drafter, target, config)
        self.temperatures = calibrated_temperatures(drafter, target.device)

    @property
    def target_layer_ids(self) -> list[int]:
        """Target layers whose outputs `draft` wants in its context."""
        return self.drafter.config.target_layer_ids

    def get_candidates(self, input_ids: torch.LongTensor, context: Context, max_depth: int, **kwargs: Any) -> Tree:
        """The paper's tree in one call, for loops other than ours: `draft`, then the best-first search."""
        root = input_ids[:, -1:]
        draft = self.draft(input_ids, context, max_depth)
        if draft is None:
            return root_tree(root)
        marginals = draft.marginals(self.config)
        return build_tree(root, marginals, self.config.tree_budget)

    def draft(self, input_ids: torch.Tensor, context: Context, max_depth: int) -> Draft | None:
        """Drafts for the tokens after the root.

        Args:
            input_ids: [1, length] the text so far, the root last.
            context: the tokens committed since the last call, all but the last.
            max_depth: no deeper than this is of use: what is left to generate, less the bonus token.

        Returns:
            None where there is nothing to draft.
        """
        depth = min(self.block_size - 1, max_depth)
        if depth < 1 or self.config.tree_budget == 0:
            return None
        root = input_ids[:, -1:]
        logits, states = self.draft_block(root, context)
        return Draft(root, logits, self.corrections(input_ids[0], states), self.temperatures).cut(depth)

    def draft_block(self, root_tokens: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafter forward through the target's embedding and head.

        Returns:
            Logits [1, block_size - 1, vocab] and the drafter's states [block_size - 1, hidden] that they come from.
        """
        device = self.drafter.device
        noise_ids = root_tokens.new_full((1, self.block_size), self.drafter.config.mask_token_id)
        noise_ids[:, :1] = root_tokens
        block_positions = context.positions[:, -1:] + torch.arange(
            1, self.block_size + 1, device=context.positions.device
        )
        positions = torch.cat([context.positions, block_positions], dim=1)

        if self.drafted:
            self.cache.crop(-self.drafted)
        self.cache.set_previous_accepted_tokens(context.positions.shape[1])
        hidden = self.drafter(
            noise_embeds=noise_embeddings(self.target.get_input_embeddings(), noise_ids).to(device),
            context_hidden_states=context.hidden_states.to(device),
            position_ids=positions.to(device),
            **{MASK_CACHE_NAME: self.cache},
        ).last_hidden_state
        self.drafted = self.block_size

        states = hidden[0, 1:]
        logits = head_logits(self.target, states.to(root_tokens.device, self.target.dtype))
        return logits[None].to(root_tokens.device), states


def check_drafter(drafter: Any, target: PreTrainedModel, config: DDTreeConfig) -> None:
    """Raises ValueError, naming field, value and remedy, where drafter, target and config do not fit."""
    if not isinstance(drafter, DFlashDraftModel):
        published = getattr(getattr(drafter, "config", None), "dflash_config", None)
        hint = " Its config is a drafter's, though, read by another class." if published else ""
        raise ValueError(
            f"`assistant_model` is {type(drafter).__name__}; DDTree decoding drafts with a DFlash drafter.{hint} Load "
            "it with `hf_ddtree.DFlashDraftModel.from_pretrained(...)` and pass the object."
        )
    ours, theirs = drafter.config, target.config.get_text_config(decoder=True)
    layers = theirs.num_hidden_layers
    for name, value, wanted in (
        ("hidden_size", ours.hidden_size, theirs.hidden_size),
        ("vocab_size", ours.vocab_size or theirs.vocab_size, theirs.vocab_size),
        ("num_target_layers", ours.num_target_layers or layers, layers),
    ):
        if value != wanted:
            raise ValueError(
                f"The drafter's `{name}` is {value} and the target's is {wanted}: it was trained for another target. "
                "Use a drafter made for this one."
            )
    ours.check_mask_token(theirs.vocab_size)
    if config.draft_transition and not ours.transition_rank:
        raise ValueError(
            "`draft_transition` is True and the drafter has no transition; leave it unset, or train a drafter with one "
            "(`hf-ddtree train`)."
        )
    if max(ours.target_layer_ids) >= layers:
        raise ValueError(
            f"The drafter's `target_layer_ids` is {ours.target_layer_ids}, but the target has layers 0..{layers - 1}. "
            "Use a drafter made for this target."
        )
    if config.draft_block_size is not None and config.draft_block_size > ours.block_size:
        raise ValueError(
            f"`draft_block_size` is {config.draft_block_size}; the drafter was trained on blocks of `block_size` "
            f"{ours.block_size}, so give at most that."
        )
