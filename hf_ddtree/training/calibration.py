"""Temperatures that make draft probabilities come true, fitted on held-out text, and how true they come.

Temperature scaling (https://arxiv.org/abs/1706.04599), one temperature per depth. Best-first search compares paths of
different depths, so it matters to it how sure of themselves depths are.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..drafting.corrections import Corrections
from ..models.dflash import DFlashDraftModel, noise_embeddings
from ..models.head import head_logits
from ..tree import build_tree
from .data import TargetFeatures
from .evaluation import TextDrafts, drafts_over

GRID = torch.logspace(math.log10(0.2), math.log10(3.0), 56)  # 5% apart
# Of each depth: fewer positions tell nothing, more only cost time.
MIN_POSITIONS, MAX_POSITIONS = 30, 2000


@torch.no_grad()
def fit_depth_temperatures(
    drafter: DFlashDraftModel, target: PreTrainedModel, features: Iterable[TargetFeatures]
) -> list[float]:
    """Temperatures of depths 1 to `block_size - 1` that give the text the least cross entropy.

    Each depth is judged after the text's own tokens above it, which is what a tree's path is where it counts.

    Args:
        features: the target's greedy answers, kept out of training.

    Returns:
        One temperature per depth, within 5%; a depth that too few positions reach has that of the depth above.
    """
    depth = drafter.config.block_size - 1
    losses = torch.zeros(depth, len(GRID), dtype=torch.float64)
    counts = torch.zeros(depth, dtype=torch.int64)
    for item in features:
        if item.sequence.answer_length < 2:
            continue
        drafts = drafts_over(drafter, target, item)
        answer = drafts.tokens[drafts.start :]
        for index in range(depth):
            usable = len(answer) - 1 - index  # anchors whose label at this depth is text
            if usable < 1:
                break
            if counts[index] >= MAX_POSITIONS:
                continue
            labels = answer[index + 1 :][:usable, None]
            logits = _logits_after(drafter, target, drafts, index, answer[index:][:usable])
            for number, temperature in enumerate(GRID.tolist()):
                losses[index, number] -= (logits / temperature).log_softmax(-1).gather(1, labels).sum().double().cpu()
            counts[index] += usable
    best = GRID[losses.argmin(1)].tolist()
    for index in range(depth):
        if counts[index] < MIN_POSITIONS:
            best[index] = best[index - 1] if index else 1.0
    return [round(value, 3) for value in best]


def _logits_after(
    drafter: DFlashDraftModel, target: PreTrainedModel, drafts: TextDrafts, index: int, parents: torch.Tensor
) -> torch.Tensor:
    """[n, vocab] float32: the first `n` anchors' drafts at a depth's index, after `parents` [n]."""
    count = len(parents)
    if drafter.transition is None or index == 0:
        return drafts.logits[:count, index].float()
    states = drafts.states[:count, index]
    embeddings = noise_embeddings(target.get_input_embeddings(), parents).to(states.device, states.dtype)
    return head_logits(target, (states + drafter.transition(states, embeddings)).to(target.dtype)).float()


@dataclass(frozen=True)
class Bin:
    """Nodes of about the same predicted probability.

    Attributes:
        predicted: their mean probability under the draft. observed: the share that the text went through.
        nodes: how many.
    """

    predicted: float
    observed: float
    nodes: int


@torch.no_grad()
def reliability(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    features: Iterable[TargetFeatures],
    config: DDTreeConfig,
    bins: int = 10,
) -> list[Bin]:
    """Path probabilities of the nodes of best-first trees against how often the text takes those paths.

    A tree is drafted from every token of every answer. Bins are of equal width in probability; empty ones are left out.
    """
    totals = torch.zeros(3, bins, dtype=torch.float64)  # predicted, observed, nodes
    corrections = Corrections(drafter, target, config)
    for item in features:
        if item.sequence.answer_length < 2:
            continue
        drafts = drafts_over(drafter, target, item)
        answer = drafts.tokens[drafts.start :].cpu()
        for root in range(len(drafts.logits)):
            draft = drafts.draft(root, corrections).cut(len(answer) - 1 - root)
            tree = build_tree(draft.roots, draft.marginals(config), config.most_nodes)
            paths = tree.path_tokens()[0, 1:].cpu()
            depths = tree.depths[0, 1:].cpu()
            truth = answer[root + 1 :][: paths.shape[1]]
            agree = (paths == truth).cumprod(1).sum(1) >= depths
            predicted = tree.scores[0, 1:].cpu().exp()
            place = (predicted * bins).long().clamp(0, bins - 1)
            for row, values in enumerate((predicted, agree.double(), torch.ones_like(predicted))):
                totals[row].scatter_add_(0, place, values)
    return [Bin(p / n, o / n, int(n)) for p, o, n in totals.T.tolist() if n]


def calibration_error(bins: list[Bin]) -> float:
    """Expected calibration error: the mean distance of observed from predicted, nodes weighing equally."""
    nodes = sum(each.nodes for each in bins)
    return sum(each.nodes * abs(each.predicted - each.observed) for each in bins) / max(nodes, 1)
