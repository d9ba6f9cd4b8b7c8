"""`hf-ddtree bench build`: what building a tree costs, by builder, with and without cutting the vocabulary down."""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..configuration import DDTreeConfig
from ..drafting.draft import Draft
from ..tree import Marginals, Tree, build_tree_by_heap, build_tree_by_level
from .machine import hardware, versions
from .meters import wait_for

BUILDERS: dict[str, Callable[..., Tree]] = {
    "heap": build_tree_by_heap,
    "level by level": build_tree_by_level,
}
# Normal logits of this spread put about a third of a depth's probability on its best token, as drafts do.
SPREAD = 4.0
NODE_FIELDS = ("tokens", "parents", "depths", "scores")
LEGEND = (
    "ms, medians; candidates: top-k and log-sum-exp over the vocabulary; tree: from candidates to nodes; both\n"
    "builders give the same tree."
)


def bench_build(options: argparse.Namespace) -> int:
    """Checks that the builders agree, prints a table and JSON; the exit status.

    Args:
        options: `budgets`, `depths`, `batches`, `vocabulary`, `repeats`, `device`, `dtype`, `json`, `arguments`.
    """
    device = torch.device(options.device)
    shapes = [(batch, depth) for batch in options.batches for depth in options.depths]
    print(f"{'batch':>5}{'depth':>7}{'budget':>8}  {'builder':<16}{'candidates':>11}{'tree':>9}{'together':>10}")
    rows: list[dict[str, Any]] = []
    for batch, depth in shapes:
        draft = random_draft((batch, depth, options.vocabulary), getattr(torch, options.dtype), device)
        for budget in options.budgets:
            new = build_rows(draft, budget, options.repeats)
            for row in new:
                print(_line(row), flush=True)
            if not all(row["same_tree"] for row in new):
                print("DIFFERENT TREES, which is a bug")
                return 1
            rows += new
    print(LEGEND)
    record = {"hardware": hardware(device), "versions": versions(), "vocabulary": options.vocabulary}
    record |= {"dtype": options.dtype, "repeats": options.repeats, "rows": rows}
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def random_draft(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Draft:
    """Random logits of `shape` [batch, depth, vocabulary], the same each time."""
    logits = SPREAD * torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return Draft(torch.zeros(shape[0], 1, dtype=torch.int64, device=device), logits.to(device, dtype))


@torch.no_grad()
def build_rows(draft: Draft, budget: int, repeats: int) -> list[dict[str, Any]]:
    """A row per builder: milliseconds to cut the vocabulary, to build from what is left, and both together."""
    batch, depth, _ = draft.logits.shape
    config, device = DDTreeConfig(tree_budget=budget), draft.logits.device
    marginals = draft.marginals(config)
    expected = build_tree_by_heap(draft.roots, marginals, budget)
    candidates = median_ms(lambda: draft.marginals(config), device, repeats)
    rows = []
    for name, builder in BUILDERS.items():
        build = partial(builder, draft.roots, budget=budget)
        tree = build(marginals)
        alone = median_ms(partial(build, marginals), device, repeats)
        together = median_ms(partial(_from_logits, draft, config, build), device, repeats)
        rows.append(
            {
                "batch": batch,
                "depth": depth,
                "budget": budget,
                "builder": name,
                "candidates_ms": round(candidates, 4),
                "tree_ms": round(alone, 4),
                "together_ms": round(together, 4),
                "same_tree": same_nodes(tree, expected),
            }
        )
    return rows


def same_nodes(tree: Tree, other: Tree) -> bool:
    """Whether two trees are the same, bit for bit."""
    return all(torch.equal(getattr(tree, name), getattr(other, name)) for name in NODE_FIELDS)


def _from_logits(draft: Draft, config: DDTreeConfig, build: Callable[[Marginals], Tree]) -> Tree:
    return build(draft.marginals(config))


def median_ms(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Median milliseconds of `work` after two calls to warm up, its device waited for."""
    seconds = []
    for repeat in range(repeats + 2):
        started = time.perf_counter()
        work()
        wait_for(device)
        if repeat >= 2:
            seconds.append(time.perf_counter() - started)
    return 1000 * statistics.median(seconds)


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['batch']:>5}{row['depth']:>7}{row['budget']:>8}  {row['builder']:<16}{row['candidates_ms']:>11.3f}"
        f"{row['tree_ms']:>9.3f}{row['together_ms']:>10.3f}"
    )
