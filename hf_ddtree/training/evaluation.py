"""Acceptance length on held-out greedy text, without generating: the text itself says what the target accepts."""

import torch
from transformers import PreTrainedModel

from ..acceptance import Choose, walk
from ..models.dflash import DFlashDraftModel, head_logits
from ..tree import build_tree, top_marginals
from .data import TargetFeatures
from .objective import build_batch, draft_hidden_states


@torch.no_grad()
def held_acceptance(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    features: list[TargetFeatures],
    budgets: tuple[int, ...] = (16, 32, 64),
) -> dict[str, float]:
    """Mean tokens committed per round for a chain and for each budget, and how often the first draft is right.

    Args:
        features: greedy answers of the target; rounds start at the first answer token, as in decoding.
    """
    committed: dict[str, int] = {}
    rounds: dict[str, int] = {}
    hits = guesses = 0
    for item in features:
        answer = item.sequence.tokens[item.sequence.prompt_length :].tolist()
        if len(answer) < 2:
            continue
        logits = draft_logits_over(drafter, target, item)
        hits += int((logits[:, 0].argmax(-1) == item.sequence.tokens[item.sequence.prompt_length + 1 :]).sum())
        guesses += len(logits)
        for name, budget in [("chain", logits.shape[1]), *((f"tree-{budget}", budget) for budget in budgets)]:
            lengths = rounds_over_text(answer, logits, 1 if name == "chain" else budget, budget)
            committed[name] = committed.get(name, 0) + sum(lengths)
            rounds[name] = rounds.get(name, 0) + len(lengths)
    means = {name: committed[name] / rounds[name] for name in committed}
    return {"first": hits / max(guesses, 1), **means}


def rounds_over_text(text: list[int], logits: torch.Tensor, top_k: int, budget: int) -> list[int]:
    """Tokens committed by each round of decoding in which the target's choices are `text`, its first token given.

    Args:
        logits: [len(text) - 1, depth, vocab] the drafts that a round would start from at each token.
    """
    lengths = []
    root = 0
    while (remaining := len(text) - 1 - root) > 0:
        marginals = top_marginals(logits[root, None, : remaining - 1], top_k)  # the last one is the bonus token
        accepted = walk(build_tree(torch.tensor([[text[root]]]), marginals, budget), _reads(text[root + 1 :]))
        lengths.append(len(accepted.tokens))
        root += len(accepted.tokens)
    return lengths


def _reads(text: list[int]) -> Choose:
    """A target whose choices are `text`, one after the other."""
    tokens = iter(text)
    return lambda node: (next(tokens), False)


def draft_logits_over(drafter: DFlashDraftModel, target: PreTrainedModel, item: TargetFeatures) -> torch.Tensor:
    """[anchors, depth, vocab]: drafts from every answer token but the last."""
    tokens, start = item.sequence.tokens, item.sequence.prompt_length
    anchors = torch.arange(start, len(tokens) - 1)[None]
    batch = build_batch([item], anchors, drafter.config.block_size, drafter.config.mask_token_id)
    hidden = draft_hidden_states(drafter, target.get_input_embeddings(), batch)[0]
    return head_logits(target, hidden.flatten(0, 1).to(target.dtype)).unflatten(0, hidden.shape[:2])
