"""Figures of a race, each as PNG and SVG."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .race import PLAIN

Rows = list[dict[str, Any]]
STAGE_COLOURS = {"draft": "#4477aa", "build": "#66ccee", "verify": "#228833", "accept": "#ccbb44", "commit": "#ee6677"}
LONGEST = 12  # in the histogram; longer rounds share the last bar


def plot_race(rows: Rows, caption: str, folder: Path) -> list[Path]:
    """Writes the figures into `folder`, which is made if need be; returns the files.

    Args:
        rows: as `measuring.rows` makes them.
        caption: what was measured on what, below the title.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    folder.mkdir(parents=True, exist_ok=True)
    finished = [row for row in rows if "failure" not in row]
    figures: dict[str, tuple[str, Callable[[Any, Rows], None]]] = {
        "speed_up": ("Speed-up over plain generate", _speed_up),
        "acceptance": ("Tokens per forward of the target", _acceptance),
        "histogram": ("Tokens committed by a round", _histogram),
        "stages": ("Where the time of a round goes", _stages),
    }
    files = []
    for name, (title, draw) in figures.items():
        figure = Figure(figsize=(6.4, 4.4), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes, finished)
        figure.suptitle(title, fontsize=12)
        axes.set_title(caption, fontsize=8, color="0.35")
        for ending in ("png", "svg"):
            files.append(folder / f"{name}.{ending}")
            figure.savefig(files[-1], dpi=150)
    return files


def _speed_up(axes: Any, rows: Rows) -> None:
    """Medians against budget, p20 to p80 shaded; methods without a budget as lines across."""
    trees = _by_budget(rows)
    budgets = [row["budget"] for row in trees]
    if trees:
        low, high = ([row[edge] for row in trees] for edge in ("speed_up_p20", "speed_up_p80"))
        axes.fill_between(budgets, low, high, alpha=0.15, color="C0", linewidth=0)
        axes.plot(budgets, [row["speed_up"] for row in trees], "o-", color="C0", label="DDTree")
    _across(axes, rows, "speed_up")
    _budget_axis(axes, budgets)
    axes.set_ylabel("speed-up (p20 to p80 shaded)")
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax)


def _acceptance(axes: Any, rows: Rows) -> None:
    trees = _by_budget(rows)
    budgets = [row["budget"] for row in trees]
    if trees:
        axes.plot(budgets, [row["acceptance_length"] for row in trees], "o-", color="C0", label="DDTree")
    _across(axes, rows, "acceptance_length")
    _budget_axis(axes, budgets)
    axes.set_ylabel("tokens per forward")
    axes.set_ylim(0, 1.08 * axes.dataLim.ymax)


def _across(axes: Any, rows: Rows, key: str) -> None:
    others = [row for row in rows if row["budget"] is None and row.get(key) is not None]
    styles = ("-", "--", ":", "-.")
    for number, row in enumerate(others):
        if row["method"] == PLAIN:
            axes.axhline(row[key], color="0.5", linewidth=1, label=PLAIN)
        else:
            style = styles[number % len(styles)]
            axes.axhline(row[key], color=f"C{1 + number % 9}", linestyle=style, linewidth=1.2, label=row["method"])


def _budget_axis(axes: Any, budgets: list[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [str(budget) for budget in budgets])
    axes.minorticks_off()
    axes.set_xlabel("tree budget (nodes)")
    axes.figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=3)


def _histogram(axes: Any, rows: Rows) -> None:
    """Shares of rounds by tokens committed: a chain's, and up to three budgets'."""
    trees = _by_budget(rows)
    chains = [row for row in rows if "chain" in row["method"]]
    shown = [*chains[-1:], *trees[:: max(1, (len(trees) + 1) // 3)][:3]]
    shown = [row for row in shown if row["histogram"]]
    width = 0.8 / max(len(shown), 1)
    most = 1
    for number, row in enumerate(shown):
        shares = _shares(row["histogram"])
        most = max(most, *shares)
        places = [length + (number - (len(shown) - 1) / 2) * width for length in shares]
        axes.bar(places, list(shares.values()), width, label=row["method"])
    axes.set_xticks(range(1, most + 1), [f"{n}+" if n == LONGEST else str(n) for n in range(1, most + 1)])
    axes.set_xlabel("tokens")
    axes.set_ylabel("share of rounds")
    if shown:
        axes.legend(frameon=False, fontsize=8)


def _shares(histogram: dict[str, int]) -> dict[int, float]:
    total, shares = sum(histogram.values()), dict.fromkeys(range(1, LONGEST + 1), 0.0)
    for length, rounds in histogram.items():
        shares[min(int(length), LONGEST)] += rounds / total
    return {length: share for length, share in shares.items() if share}


def _stages(axes: Any, rows: Rows) -> None:
    """Milliseconds per round, stages stacked; the share outside forwards at the bars' ends."""
    shown = [row for row in rows if row["stage_ms"]]
    names = [row["method"].removeprefix("DDTree, ").removeprefix("DDTree code, ") for row in shown]
    lefts = [0.0] * len(shown)
    for stage, colour in STAGE_COLOURS.items():
        values = [row["stage_ms"].get(stage, 0.0) for row in shown]
        axes.barh(names, values, left=lefts, color=colour, label=stage, height=0.7)
        lefts = [left + value for left, value in zip(lefts, values, strict=True)]
    for place, (row, end) in enumerate(zip(shown, lefts, strict=True)):
        if row["overhead"] is not None:
            axes.annotate(
                f"{row['overhead']:.0%} outside forwards",
                (end, place),
                xytext=(4, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
            )
    axes.invert_yaxis()
    axes.set_xlim(0, 1.35 * max(lefts, default=1.0))
    axes.set_xlabel("ms per round")
    axes.figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=5)


def _by_budget(rows: Rows) -> list[dict[str, Any]]:
    return sorted((row for row in rows if row["budget"] is not None), key=lambda row: row["budget"])
