"""`hf-ddtree bench race`: all methods on the same prompts, texts compared before a speed is printed."""

import argparse
import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..figures import STAGES
from . import measuring
from .machine import hardware, versions
from .methods import Contestant, contestants
from .plots import plot_race
from .prompt_sets import encode_at, load_prompts

SHOWN_LENGTHS = 8
LEGEND = (
    "tokens/s: of whole calls, prefill included, median and 20th to 80th percentile; speed-up: median over prompts;\n"
    "accepted: tokens per forward of the target after the prefill; outside: share of the time after the prefill that\n"
    "is not in forwards of target, drafter or head; memory: most that a call needs (and more than plain generate)."
)


def check_options(options: argparse.Namespace) -> None:
    """Refuses before any model is loaded what would fail after the work; raises ValueError or ImportError."""
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"`--json {options.json}` is in no folder there is; make it first.")
    if getattr(options, "plot", None) is not None and find_spec("matplotlib") is None:
        raise ImportError("`--plot` needs matplotlib: `pip install matplotlib`.")


def bench_race(
    models: tuple[PreTrainedModel, PreTrainedModel | None, PreTrainedModel | None],
    tokenizer: PreTrainedTokenizerBase,
    options: argparse.Namespace,
) -> int:
    """Checks texts, races, prints tables and JSON; the exit status, 1 where a float32 text differs from plain's.

    Args:
        models: target; drafter, None = lookup; assistant for transformers' assisted decoding, None = without.
        options: `prompts`, `prompts_from`, `context`, `check`, `repeats`, `json`, `plot`, `arguments`, and those of
            `contestants`.
    """
    target, drafter, assistant = models
    texts = load_prompts(options.prompts_from, options.prompts)
    prompts = [encode_at(tokenizer, text, options.context, target.device) for text in texts]
    racers, skipped = contestants(target, drafter, assistant, options)
    if not check_texts(target, racers, prompts[: options.check]):
        return 1
    found = measuring.measure(target, racers, prompts, options.repeats)
    rows = measuring.rows(target, racers, found, prompts)
    rows += [{"method": name, "budget": None, "failure": why} for name, why in skipped.items()]
    print(f"\n{conditions(target, prompts, options)}:")
    print("\n\n".join([speed_table(rows), LEGEND, stage_table(rows), histogram_table(rows)]))
    print(near_ties(rows), flush=True)
    record = setting(models, prompts, options) | {"rows": rows}
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    if options.plot is not None:
        plot_race(rows, conditions(target, prompts, options), options.plot)
    return 0


def check_texts(target: PreTrainedModel, racers: list[Contestant], prompts: measuring.Prompts) -> bool:
    """Compares all but compiled decoding with plain decoding in float32, and prints what came of it.

    Returns:
        Whether all texts of ours are plain decoding's.
    """
    compared = [each for each in racers if each.hooked]
    different = measuring.differing_texts(target, compared, prompts)
    ours = [name for name in different if next(each.ours for each in racers if each.name == name)]
    wrong = {name: different[name] for name in ours if different[name]}
    verdict = "identical to plain generate's" if not wrong else "DIFFERENT TEXT, which is a bug: no speeds"
    same = sum(len(prompts) - len(different[name]) for name in ours)
    print(f"float32 check: {same} of {len(ours) * len(prompts)} texts of DDTree, {verdict}")
    for name, indexes in different.items():
        if indexes:
            print(f"  {name}: differs after prompt {', '.join(str(index + 1) for index in indexes)}")
    return not wrong


def setting(
    models: tuple[PreTrainedModel, PreTrainedModel | None, PreTrainedModel | None],
    prompts: measuring.Prompts,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """What a record says about its conditions."""
    target = models[0]
    lengths = sorted(each["input_ids"].shape[1] for each in prompts)
    names, given_models = ("target", "drafter", "assistant"), (options.model, options.drafter, options.assistant)
    weights = {name: model.get_memory_footprint() for name, model in zip(names, models, strict=True) if model}
    return {
        "command": shlex.join(["hf-ddtree", *options.arguments]),
        "hardware": hardware(target.device),
        "versions": versions(),
        "models": {name: _name(given) for name, given in zip(names, given_models, strict=True)},
        "weights_mb": {name: round(size / 1e6, 2) for name, size in weights.items()},
        "dtype": str(target.dtype),
        "prompts_from": options.prompts_from,
        "prompts": len(prompts),
        "prompt_tokens": {"least": lengths[0], "median": lengths[len(lengths) // 2], "most": lengths[-1]},
        "max_new_tokens": options.max_new_tokens,
        "repeats": options.repeats,
    }


def _name(given: str | None) -> str | None:
    """A folder's name without the way to it, which is this machine's; a Hub name as it is."""
    return Path(given).name if given is not None and Path(given).exists() else given


def conditions(target: PreTrainedModel, prompts: measuring.Prompts, options: argparse.Namespace) -> str:
    """The same in a line."""
    found = hardware(target.device)
    where = found.get("accelerator") or f"{found['cpu']}, {found['threads']} thread(s)"
    lengths = sorted(each["input_ids"].shape[1] for each in prompts)
    span = f"{lengths[0]}" if lengths[0] == lengths[-1] else f"{lengths[0]} to {lengths[-1]}"
    return (
        f"greedy, {str(target.dtype).removeprefix('torch.')}, {where}\n{len(prompts)} prompt(s) of "
        f"{Path(options.prompts_from).name}, {span} tokens, up to {options.max_new_tokens} new ones"
    )


def speed_table(rows: list[dict[str, Any]]) -> str:
    """Speeds, acceptance, overhead, memory and texts; why methods are missing."""
    lines = [
        f"{'method':<30}{'tokens/s':>9}{'p20':>8}{'p80':>8}{'speed-up':>10}{'accepted':>10}{'outside':>9}"
        f"{'memory':>16}{'same text':>11}"
    ]
    for row in rows:
        if "failure" in row:
            lines.append(f"{row['method']:<30} left out: {row['failure']}")
            continue
        memory = "-" if row["peak_mb"] is None else f"{row['peak_mb']:.0f} ({row['over_plain_mb']:+.0f}) MB"
        lines.append(
            f"{row['method']:<30}{row['tokens_per_second']:>9.1f}{row['p20']:>8.1f}{row['p80']:>8.1f}"
            f"{row['speed_up']:>9.2f}x{_or_dash(row['acceptance_length'], '.2f'):>10}"
            f"{_or_dash(row['overhead'], '.0%'):>9}{memory:>16}{row['identical']:>7}/{row['prompts']}"
        )
    return "\n".join(lines)


def stage_table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds per round by stage, of methods that say."""
    lines = [f"{'ms per round':<30}" + "".join(f"{stage:>9}" for stage in STAGES) + f"{'sum':>9}"]
    for row in rows:
        if stages := row.get("stage_ms"):
            values = [stages.get(stage, 0.0) for stage in STAGES]
            lines.append(f"{row['method']:<30}" + "".join(f"{value:>9.2f}" for value in [*values, sum(values)]))
    return "\n".join(lines)


def histogram_table(rows: list[dict[str, Any]]) -> str:
    """Shares of rounds by the tokens they committed."""
    lengths = range(1, SHOWN_LENGTHS + 1)
    header = "".join(f"{length:>7}" for length in lengths) + f"{f'{SHOWN_LENGTHS + 1}+':>7}"
    lines = [f"{'tokens committed by a round':<30}{header}"]
    for row in rows:
        if histogram := row.get("histogram"):
            total = sum(histogram.values())
            shares = [histogram.get(str(length), 0) / total for length in lengths]
            shares.append(max(0.0, 1 - sum(shares)))
            lines.append(f"{row['method']:<30}" + "".join(f"{share:>7.0%}" for share in shares))
    return "\n".join(lines)


def near_ties(rows: list[dict[str, Any]]) -> str:
    """Where texts part from plain decoding's: how close the target's call was; the widest gap of each method."""
    lines = []
    for row in rows:
        if not (differences := row.get("differences")):
            continue
        widest = max(differences, key=lambda each: each["gap"] - each["rounding"])
        beyond = sum(each["gap"] > each["rounding"] for each in differences)
        lines.append(
            f"  {row['method']}: {len(differences)} text(s) part from plain's, {beyond} of them where rounding does "
            f"not explain it; widest gap of the two logits {widest['gap']:.3g}, rounding {widest['rounding']:.3g}"
        )
    return "\n".join(["", *lines]) if lines else ""


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
