"""Drafts with a DFlash model: one forward gives a distribution for each depth, best-first search makes them a tree."""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from ..compiled import Forwards
from ..configuration import DDTreeConfig
from ..context import Context
from ..masks import MaskBuffer
from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.dflash_config import CAUSAL_LAYER_TYPES
from ..models.head import head_logits
from ..tree import Tree, build_tree, root_tree
from ..tree_cache import TreeCache, TreeLayer
from .corrections import Corrections
from .draft import Draft, calibrated_temperatures
from .drafter import Drafter, Request, device_of


class DDTreeCandidateGenerator(Drafter, CandidateGenerator):
    """Drafts for a batch; holds the drafter's cache, which encodes each row's committed tokens but the last once.

    Args:
        drafter: the assistant model.
        target: whose embedding and head the drafter borrows; both are called as modules, so that hooks, quantised
            layers and padded vocabularies work.
        config: tree budget, top-k and block size.
        rows: of the batch.

    Raises:
        ValueError: the drafter does not fit the target, or the config does not fit the drafter.
    """

    requires_model_outputs = True
    gives_logits = True

    def __init__(self, drafter: DFlashDraftModel, target: PreTrainedModel, config: DDTreeConfig, rows: int = 1):
        check_drafter(drafter, target, config)
        self.drafter, self.target, self.config = drafter, target, config
        self.target_layer_ids = drafter.config.target_layer_ids
        self.block_size = config.draft_block_size or drafter.config.block_size
        self.cache = Cache(layers=[TreeLayer(self._window(kind)) for kind in drafter.config.layer_types])
        self.trees = TreeCache(self.cache.layers, rows)
        self.masks = {
            kind: MaskBuffer(drafter.dtype, self._window(kind)) for kind in dict.fromkeys(drafter.config.layer_types)
        }
        self.forwards = Forwards(config.compile, drafter.device)
        self.corrections = Corrections(drafter, target, config)
        self.temperatures = calibrated_temperatures(drafter, device_of(target, torch.device("cpu")))

    def get_candidates(self, input_ids: torch.LongTensor, context: Context, max_depth: int, **kwargs: Any) -> Tree:
        """The paper's tree in one call, for loops other than ours: `draft`, then the best-first search."""
        request = Request(list(input_ids), context, max_depth, lambda depth, like: None)
        draft = self.draft(request)
        if draft is None:
            return root_tree(request.roots)
        return build_tree(request.roots, draft.marginals(self.config), self.config.most_nodes)

    def draft(self, request: Request) -> Draft | None:
        """One forward; None where the block size leaves nothing to draft."""
        depth = min(self.block_size - 1, request.max_depth)
        if depth < 1 or self.config.most_nodes == 0:
            return None
        logits, states = self.draft_block(request.roots, request.context)
        corrections = self.corrections(request.texts, states)
        return Draft(request.roots, logits, corrections, self.temperatures).cut(depth)

    def keep(self, rows: list[int]) -> None:
        """Goes on with those rows."""
        self.trees.drop_others(rows)
        for mask in self.masks.values():
            mask.forget()

    def leave(self, pending: Context | None) -> "Kept":
        """The drafter's cache, for a next turn."""
        return Kept(self.drafter, self.cache, self.trees, pending)

    def resume(self, left: Any, lengths: list[int]) -> Context | None:
        """Goes on with the drafter's cache of the turn before, if it is this drafter's and reaches no further."""
        if not isinstance(left, Kept) or left.drafter is not self.drafter or len(left.trees.ends) != len(lengths):
            return None
        known = torch.tensor(lengths)
        if bool((left.trees.ends > known).any()) or not self._can_write(left.trees):
            return None
        self.cache, self.trees = left.cache, left.trees
        room = (known - self.trees.ends).tolist()
        return None if left.pending is None else left.pending.cut(room)

    def _can_write(self, trees: TreeCache) -> bool:
        """Whether a kept cache is of the drafter's dtype and device, and not of an inference mode that has ended."""
        buffers = [buffer for layer in trees.layers for buffer in layer.buffers]
        return all(
            buffer.dtype == self.drafter.dtype
            and buffer.device == device_of(self.drafter, buffer.device)
            and (torch.is_inference_mode_enabled() or not buffer.is_inference())
            for buffer in buffers
        )

    @torch.no_grad()
    def draft_block(self, root_tokens: torch.Tensor, context: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """One drafter forward through the target's embedding and head.

        Returns:
            Logits [rows, block_size - 1, vocab] and the drafter's states [rows, block_size - 1, hidden] they come from.
        """
        device, block = device_of(self.drafter, root_tokens.device), self.block_size
        known = self.trees.width > 0  # else this is the prompt, of any length
        if known and self.forwards.fixed:  # most rounds commit no more than a block
            context = context.padded(max(block, self.forwards.bucket(context.positions.shape[1])))
        noise_ids = root_tokens.new_full((len(root_tokens), block), self.drafter.config.mask_token_id)
        noise_ids[:, :1] = root_tokens
        lengths = torch.tensor(context.lengths, device=context.positions.device)[:, None]
        last = context.positions.gather(1, (lengths - 1).clamp(min=0))
        block_positions = last + torch.arange(1, block + 1, device=last.device)
        positions = torch.cat([context.positions, block_positions], dim=1)
        try:
            self.trees.plan(positions.shape[1], whole=known and self.forwards.fixed)
            masks = self._masks(context.lengths, context.positions.shape[1], device)
            inputs: dict[str, Any] = {
                "noise_ids": noise_ids,
                "context": context.hidden_states.to(device),
                "positions": positions.to(device),
                "masks": masks,
                "columns": self.trees.columns,
            }
            if known:
                logits, states = self.forwards.run(self._forward, inputs, self.trees.anchors)
            else:
                logits, states = self._forward(**inputs)
        except BaseException:
            self.trees.rollback()
            raise
        self.trees.commit([list(range(length)) for length in context.lengths])
        return logits, states

    def _forward(
        self,
        noise_ids: torch.Tensor,
        context: torch.Tensor,
        positions: torch.Tensor,
        masks: dict[str, torch.Tensor | None],
        columns: dict[str, torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and states of a block; `columns` of the cache get keys and values of the context, then the block."""
        self.trees.write_to(columns)
        embeddings = noise_embeddings(self.target.get_input_embeddings(), noise_ids).to(context.device)
        drafter = self.forwards.compiled(self.drafter) if columns else self.drafter
        hidden = drafter(
            noise_embeds=embeddings,
            context_hidden_states=context,
            position_ids=positions,
            attention_mask=masks,
            cache=self.cache,
        ).last_hidden_state
        states = hidden[:, 1:]
        flat = states.flatten(0, 1).to(noise_ids.device, self.target.dtype)
        logits = head_logits(self.target, flat).view(*states.shape[:2], -1)
        return logits.to(noise_ids.device), states

    def _window(self, kind: str) -> int | None:
        """How many places back a layer of `kind` sees; a layer that sees both ways counts its window inclusively."""
        if kind != "sliding_attention":
            return None
        causal = kind in CAUSAL_LAYER_TYPES[self.drafter.config.causal_layers]
        return self.drafter.config.sliding_window + (not causal)

    def _masks(self, lengths: list[int], new: int, device: torch.device) -> dict[str, torch.Tensor | None]:
        """By layer type, what the block sees of [cached context, `new` columns of new context, block].

        Args:
            lengths: per row, how much of the new context is its own.
        """
        ends, owned = self.trees.ends[:, None], torch.tensor(lengths)[:, None]
        column = torch.arange(new + self.block_size)
        own = (column < owned) | (column >= new)  # [rows, new + block]
        # A row's block follows its own context, however long the others' is.
        places = ends + torch.where(column < new, column, column - new + owned)
        ragged = not bool((ends == self.trees.width).all() and (owned == new).all())
        masks: dict[str, torch.Tensor | None] = {}
        for kind, layer in zip(self.drafter.config.layer_types, self.trees.layers, strict=True):
            window, causal = self._window(kind), kind in CAUSAL_LAYER_TYPES[self.drafter.config.causal_layers]
            if kind in masks:
                continue
            if not (ragged or causal or window or self.forwards.fixed):
                masks[kind] = None
                continue
            ahead = places[:, None] - places[:, new:, None]  # [rows, block, new + block]
            appended = own[:, None] & (ahead < (1 if causal else window or self.block_size))
            masks[kind] = self.masks[kind].write(
                self.trees.ends, None, appended.to(device), places.to(device), layer.view_of(self.trees.width, appended)
            )
        return masks


@dataclass
class Kept:
    """What a drafter knows of a target's cache; travels with it, copied with it, but not into files.

    Attributes:
        drafter: whose cache it is. cache, trees: the drafter's. pending: context that is not in it yet.
    """

    drafter: DFlashDraftModel
    cache: Cache
    trees: TreeCache
    pending: Context | None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Kept":
        cache, trees, pending = deepcopy((self.cache, self.trees, self.pending), memo)
        return Kept(self.drafter, cache, trees, pending)

    def __reduce__(self) -> tuple[type, tuple]:
        return type(None), ()


def check_drafter(drafter: Any, target: PreTrainedModel, config: DDTreeConfig) -> None:
    """Raises ValueError, naming field, value and remedy, where drafter, target and config do not fit."""
    if not isinstance(drafter, DFlashDraftModel):
        published = getattr(getattr(drafter, "config", None), "dflash_config", None)
        hint = " Its config is a drafter's, though, read by another class." if published else ""
        raise ValueError(
            f"`assistant_model` is {type(drafter).__name__}; give a DFlash drafter, a causal LM or a "
            f"`hf_ddtree.Drafter`.{hint} Load a DFlash drafter with "
            "`hf_ddtree.DFlashDraftModel.from_pretrained(...)` and pass the object."
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
