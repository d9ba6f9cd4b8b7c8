"""`hf-ddtree bench drafter`: what each source of path-conditional drafts and the calibration are worth on held text."""

import argparse
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..drafting.corrections import Corrections
from ..models import DFlashDraftModel
from ..training.calibration import Bin, calibration_error, reliability
from ..training.data import TokenSequence, compute_features
from ..training.evaluation import drafts_over
from .statistics import quotient, ratio_of_sums, rounded, with_error

BUDGETS = (16, 32, 64)
MARGINAL = "marginals alone"
NO_TRANSITION: dict[str, Any] = {"draft_transition": False}
NO_TEXT: dict[str, Any] = {"draft_text_weight": 0.0}
LEGEND = (
    "Tokens per round on held-out greedy text, replayed, with the standard error over texts; against marginals: as a\n"
    "multiple of the same drafter's marginals at the same budget."
)


def sources(drafter: DFlashDraftModel, table: Path | None) -> dict[str, dict[str, Any]]:
    """Config fields by name: nothing, each source by itself, and all at once."""
    table_alone = {"draft_table": str(table), **NO_TRANSITION, **NO_TEXT}
    fields = {MARGINAL: {**NO_TRANSITION, **NO_TEXT}, "running text": NO_TRANSITION}
    if table is not None:
        fields["bigram table"] = table_alone
        fields["bigram table, text"] = {**table_alone, "draft_text_weight": DDTreeConfig().draft_text_weight}
    if drafter.transition is not None:
        fields["transition"] = NO_TEXT
        fields["transition, text"] = {}
    if table is not None and drafter.transition is not None:
        fields["all three"] = {"draft_table": str(table), "draft_table_weight": 0.2}
    return fields


@torch.no_grad()
def bench_drafter(
    target: PreTrainedModel, drafter: DFlashDraftModel, held: list[TokenSequence], options: argparse.Namespace
) -> int:
    """Prints tables and, last, one line of JSON; the exit status.

    Args:
        held: greedy answers of the target, kept out of training.
        options: `table`, `json`, `plot`.

    Raises:
        ImportError: a plot is asked for and matplotlib is not installed.
    """
    if options.plot is not None and find_spec("matplotlib") is None:
        raise ImportError("`--plot` needs matplotlib: `pip install matplotlib`.")
    features = compute_features(target, held, drafter.config.target_layer_ids)
    configs = {
        (name, budget): DDTreeConfig(tree_budget=budget, **fields)
        for name, fields in sources(drafter, options.table).items()
        for budget in BUDGETS
    }
    rounds: dict[tuple[str, int], list[list[int]]] = {setting: [] for setting in configs}
    corrections = {setting: Corrections(drafter, target, config) for setting, config in configs.items()}
    for item in tqdm(features, desc="replaying", leave=False, disable=None):
        drafts = drafts_over(drafter, target, item)
        for setting, config in configs.items():
            rounds[setting].append(drafts.rounds(config, corrections[setting]))
    rows = _rows(rounds)
    print(_table(rows), LEGEND, sep="\n", flush=True)

    raw = DDTreeConfig(tree_budget=32, draft_temperature=1.0)
    curves = {"uncalibrated": reliability(drafter, target, features, raw)}
    if drafter.config.depth_temperatures:
        curves["calibrated"] = reliability(drafter, target, features, DDTreeConfig(tree_budget=32))
    for name, bins in curves.items():
        print(f"\npath probabilities of nodes, {name}; calibration error {calibration_error(bins):.4f}")
        print(_reliability_table(bins), flush=True)
    record = {
        "texts": len(features),
        "dtype": str(target.dtype),
        "acceptance": rows,
        "reliability": {name: [vars(each) for each in bins] for name, bins in curves.items()},
    }
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot is not None:
        plot_reliability(curves, options.plot)
    return 0


def _rows(rounds: dict[tuple[str, int], list[list[int]]]) -> list[dict[str, Any]]:
    counts = {
        setting: ([sum(each) for each in texts], [len(each) for each in texts]) for setting, texts in rounds.items()
    }
    rows = []
    for (name, budget), count in counts.items():
        length, error = ratio_of_sums(*count)
        against, against_error = quotient(count, counts[MARGINAL, budget])
        figures = {"acceptance_length": length, "standard_error": error, "against": against, "error": against_error}
        rows.append({"source": name, "budget": budget, **{key: rounded(value) for key, value in figures.items()}})
    return rows


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"{'source':<28}{'budget':>8}{'accepted':>16}{'against marginals':>20}"]
    for row in rows:
        lines.append(
            f"{row['source']:<28}{row['budget']:>8}{with_error(row['acceptance_length'], row['standard_error']):>16}"
            f"{with_error(row['against'], row['error']):>20}"
        )
    return "\n".join(lines)


def _reliability_table(bins: list[Bin]) -> str:
    lines = [f"{'predicted':>10}{'observed':>10}{'nodes':>10}"]
    lines += [f"{each.predicted:>10.3f}{each.observed:>10.3f}{each.nodes:>10}" for each in bins]
    return "\n".join(lines)


def plot_reliability(curves: dict[str, list[Bin]], path: Path) -> None:
    """Observed against predicted path probability."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, 1], color="0.7", linewidth=1, label="as promised")
    for (name, bins), marker in zip(curves.items(), "os", strict=False):
        axes.plot([each.predicted for each in bins], [each.observed for each in bins], marker=marker, label=name)
    axes.set_xlabel("path probability under the draft")
    axes.set_ylabel("share of nodes on the target's path")
    axes.set_title("Draft trees of 32 nodes, held-out greedy text", fontsize=10)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
