"""Acceptance length on held-out greedy text, without generating: the text itself says what the target accepts."""

import torch
from transformers import PreTrainedModel

from ..acceptance import Choose, walk
from ..models.dflash import DFlashDraftModel
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
        logits = _draft_logits(drafter, target, item)
        hits += int((logits[:, 0].argmax(-1) == item.sequence.tokens[item.sequence.prompt_length + 1 :]).sum())
        guesses += len(logits)
        for name, budget in [("chain", logits.shape[1]), *((f"tree-{budget}", budget) for budget in budgets)]:
            position = 0
            while (remaining := len(answer) - 1 - position) > 0:
                top_k = 1 if name == "chain" else budget
                marginals = top_marginals(logits[position, None, : remaining - 1], top_k)  # the last is the bonus
                tree = build_tree(torch.tensor([[answer[position]]]), marginals, budget)
                accepted = walk(tree, _reads(answer[position + 1 :]))
                committed[name] = committed.get(name, 0) + len(accepted.tokens)
                rounds[name] = rounds.get(name, 0) + 1
                position += len(accepted.tokens)
    means = {name: committed[name] / rounds[name] for name in committed}
    return {"first": hits / max(guesses, 1), **means}


def _reads(text: list[int]) -> Choose:
    """A target whose choices are `text`, one after the other."""
    tokens = iter(text)
    return lambda node: (next(tokens), False)


def _draft_logits(drafter: DFlashDraftModel, target: PreTrainedModel, item: TargetFeatures) -> torch.Tensor:
    """[anchors, depth, vocab]: drafts from every answer token but the last."""
    tokens, start = item.sequence.tokens, item.sequence.prompt_length
    anchors = torch.arange(start, len(tokens) - 1)[None]
    batch = build_batch([item], anchors, drafter.config.block_size, drafter.config.mask_token_id)
    hidden = draft_hidden_states(drafter, target.get_input_embeddings(), batch)[0]
    head = target.get_output_embeddings()
    return head(hidden.to(head.weight.dtype))
