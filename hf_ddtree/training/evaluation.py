"""Acceptance length over given text, without generating: the text itself says what the target accepts."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..acceptance import Choose, walk
from ..configuration import DDTreeConfig
from ..drafting.corrections import Corrections
from ..drafting.draft import Draft, calibrated_temperatures
from ..models.dflash import DFlashDraftModel
from ..models.head import head_logits
from ..tree import build_tree
from .data import TargetFeatures
from .objective import build_batch, draft_hidden_states


@dataclass(frozen=True)
class TextDrafts:
    """What a drafter says from every token of an answer but the last.

    Attributes:
        tokens: [length] prompt and answer.
        start: where the answer begins.
        logits: [answer - 1, depth, vocab].
        states: [answer - 1, depth, hidden], which the logits come from.
        temperatures: [depth, 1] the drafter's calibration, or None.
    """

    tokens: torch.Tensor
    start: int
    logits: torch.Tensor
    states: torch.Tensor
    temperatures: torch.Tensor | None

    def rounds(
        self, config: DDTreeConfig, corrections: Corrections | None = None, noise: torch.Tensor | None = None
    ) -> list[int]:
        """Tokens committed by each round of decoding whose target chooses this text, its first token given.

        Args:
            corrections: as decoding makes them for `config`; None = depths are independent.
            noise: [answer - 1, depth, vocab] what is added to the draft logits.
        """
        lengths: list[int] = []
        root = 0
        while (remaining := len(self.logits) - root) > 0:
            draft = self.draft(root, corrections).cut(remaining - 1)  # the text's last token is the bonus token
            deeper = draft.logits.shape[1]
            marginals = draft.marginals(config, None if noise is None else noise[root, None, :deeper])
            tree = build_tree(draft.roots, marginals, config.most_nodes)
            accepted = walk(tree, _reads(self.tokens[self.start + root + 1 :].tolist()))
            lengths.append(len(accepted.tokens))
            root += len(accepted.tokens)
        return lengths

    def draft(self, index: int, corrections: Corrections | None = None) -> Draft:
        """The draft from the answer's token at `index`."""
        ids = self.tokens[: self.start + index + 1]
        sources = () if corrections is None else corrections([ids], self.states[index, None])
        return Draft(ids[None, -1:], self.logits[index, None], sources, self.temperatures)


def _reads(text: list[int]) -> Choose:
    """A target whose choices are `text`, one after the other."""
    tokens = iter(text)
    return lambda node: (next(tokens), False)


@torch.no_grad()
def drafts_over(drafter: DFlashDraftModel, target: PreTrainedModel, item: TargetFeatures) -> TextDrafts:
    """One drafter forward over all roots of an answer of at least two tokens."""
    tokens, start = item.sequence.tokens, item.sequence.prompt_length
    config = drafter.config
    batch = build_batch([item], torch.arange(start, len(tokens) - 1)[None], config.block_size, config.mask_token_id)
    batch = batch.to(drafter.device)
    states = draft_hidden_states(drafter, target.get_input_embeddings(), batch)[0]
    logits = head_logits(target, states.flatten(0, 1).to(target.dtype)).unflatten(0, states.shape[:2])
    temperatures = calibrated_temperatures(drafter, logits.device)
    return TextDrafts(tokens.to(logits.device), start, logits, states, temperatures)


def held_configs(drafter: DFlashDraftModel, budgets: tuple[int, ...] = (16, 32, 64)) -> dict[str, DDTreeConfig]:
    """The chain and a tree of each budget; for comparison trees of the marginals alone."""
    configs = {"chain": DDTreeConfig(tree_shape="chain", tree_budget=drafter.config.block_size - 1)}
    for budget in budgets:
        configs[f"tree-{budget}"] = DDTreeConfig(tree_budget=budget)
        marginal = {"draft_transition": False, "draft_text_weight": 0.0}
        configs[f"tree-{budget}-marginal"] = DDTreeConfig(tree_budget=budget, **marginal)
    return configs


@torch.no_grad()
def held_acceptance(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    features: Iterable[TargetFeatures],
    configs: Mapping[str, DDTreeConfig],
) -> dict[str, float]:
    """Mean tokens committed per round under each config, and how often the first draft is right.

    Args:
        features: answers of the target; rounds start at the first answer token, as in decoding.
    """
    lengths: dict[str, list[int]] = {name: [] for name in configs}
    hits = guesses = 0
    for item in features:
        if item.sequence.answer_length < 2:
            continue
        drafts = drafts_over(drafter, target, item)
        hits += int((drafts.logits[:, 0].argmax(-1) == drafts.tokens[drafts.start + 1 :]).sum())
        guesses += len(drafts.logits)
        for name, config in configs.items():
            lengths[name] += drafts.rounds(config, Corrections(drafter, target, config))
    means = {name: sum(each) / max(len(each), 1) for name, each in lengths.items()}
    return {"first": hits / max(guesses, 1), **means}
