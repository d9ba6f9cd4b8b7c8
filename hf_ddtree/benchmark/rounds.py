"""`hf-ddtree bench rounds`: where a round's time goes, on targets with the shape of known models and random weights."""

import argparse
import json
import shlex
import statistics
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from .. import compiled
from ..configuration import DDTreeConfig
from ..figures import STAGES
from ..models import DFlashDraftModel
from ..strategy import DDTreeOutput
from .harness import check_options
from .machine import hardware, versions
from .oracle import Oracle, temperature_for
from .shapes import SHAPES, make_models
from .stopwatch import FORWARDS, Round, Stopwatch, TokenClock, median_ms

PLAIN, COMPILED = "plain generate, eager", "plain generate, static cache"
TREES = {"off": "DDTree, eager", "graphs": "DDTree, graphs"}
MOST_OUTSIDE = 0.05  # of a round, outside the two forwards, with graphs
FEWEST_ROUNDS = 10
LEGEND = (
    "tokens/s, ms/round: medians, without the prefill and the first rounds or tokens; stages and forwards: the same,\n"
    "of a call that waits for the device after each; outside: share of ms/round that is not in the two forwards."
)
Row = dict[str, Any]


@dataclass
class Subject:
    """What is measured.

    Attributes:
        prompt: [1, length]. new_tokens: of each call.
    """

    target: PreTrainedModel
    drafter: DFlashDraftModel
    prompt: torch.Tensor
    new_tokens: int

    @property
    def device(self) -> torch.device:
        return self.prompt.device

    @property
    def has_graphs(self) -> bool:
        return self.device.type in compiled.GRAPHS

    def generate(self, config: GenerationConfig, **arguments: Any) -> Any:
        """The call that all methods make."""
        mask = torch.ones_like(self.prompt)
        return self.target.generate(self.prompt, attention_mask=mask, generation_config=config, **arguments)


def bench_rounds(options: argparse.Namespace) -> int:
    """Measures plain decoding and trees, prints a table, checks and JSON; the exit status, 1 where a check fails.

    Args:
        options: `shape`, `device`, `acceptance`, `budget`, `context`, `rounds`, `json`, `arguments`.
    """
    check_options(options)
    subject = make_subject(options)
    print(heading(subject, options), flush=True)
    plain, text = plain_row(subject, PLAIN, {})
    rows: list[Row] = []

    def take(row: Row, other: torch.Tensor | None) -> None:
        row["same_text"] = other is not None and torch.equal(other, text)
        if "failure" not in row:
            row["speed_up"] = round(plain["ms_per_token"] / row["ms_per_token"], 2)
        rows.append(row)
        print(line(row), flush=True)  # whatever may stop the rest

    take(plain, text)
    oracle = Oracle(subject.drafter, text, options.acceptance)
    decoded = []
    for mode in TREES:
        row, tokens = tree_row(subject, oracle, mode, options.budget)
        take(row, tokens)
        decoded.append(tokens)
    take(*static_row(subject))  # the last, for compiling may take longer than there is time
    checks = {"graphs and eager: same tokens": torch.equal(*decoded), **checks_of(rows, subject)}
    _report(setting(subject, options) | {"rows": rows, "checks": checks, "graphs_here": subject.has_graphs}, options)
    return 0 if all(checks.values()) else 1


def make_subject(options: argparse.Namespace) -> Subject:
    """Models and a random prompt; raises ValueError where the device is not there or the shape has no such length."""
    device, shape = torch.device(options.device), SHAPES[options.shape]
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"`--device {options.device}`: this torch sees no CUDA device; give `--device cpu`.")
    block, vocabulary = shape.drafter["block_size"], shape.target["vocab_size"]
    if not 1 <= options.acceptance <= block:
        raise ValueError(f"`--acceptance {options.acceptance}` can't be had of blocks of {block}; set 1 to {block}.")
    if options.rounds < FEWEST_ROUNDS:
        raise ValueError(f"`--rounds {options.rounds}` are too few for medians; give at least {FEWEST_ROUNDS}.")
    new_tokens = round(options.rounds * options.acceptance)
    # Of the lower half, so that texts that count upwards do not run out of vocabulary; 0 is padding.
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(1, vocabulary // 2, (1, options.context), generator=generator).to(device)
    return Subject(*make_models(shape, device), prompt, new_tokens)


def plain_row(subject: Subject, name: str, fields: dict[str, Any]) -> tuple[Row, torch.Tensor]:
    """Plain decoding's times, and the text [length]."""
    clock = TokenClock()
    config = GenerationConfig(max_new_tokens=subject.new_tokens, do_sample=False, **fields)
    text = subject.generate(config, streamer=clock)[0]
    per_token = clock.median_ms()
    row = {"method": name, "ms_per_token": round(per_token, 4), "tokens_per_second": round(1000 / per_token, 1)}
    return row, text


def static_row(subject: Subject) -> tuple[Row, torch.Tensor | None]:
    """The same with a static cache, for which the library compiles the model on an accelerator; that may fail."""
    try:
        row, text = plain_row(subject, COMPILED, {"cache_implementation": "static"})
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return {"method": COMPILED, "failure": reason}, None
    return {**row, "compiled": hasattr(subject.target, "_compiled_call")}, text


def tree_row(subject: Subject, oracle: Oracle, mode: str, budget: int) -> tuple[Row, torch.Tensor]:
    """Two calls: one that waits for the device at every turn, for the stages, and one that doesn't, for the speed."""
    with Stopwatch(subject.device) as staged:
        first = _decode(subject, oracle, {"compile": mode, "tree_budget": budget, "synchronize_stages": True})
    with Stopwatch(None) as free:
        result = _decode(subject, oracle, {"compile": mode, "tree_budget": budget})
    by_stage, freely = staged.steady(), free.steady()
    row: Row = {
        "method": TREES[mode],
        "rounds": result.rounds,
        "acceptance_length": round(result.mean_acceptance_length, 3),
        "steady_rounds": len(freely),
        "replayed_rounds": sum(each.replayed for each in freely),
        "fallback_rounds": result.fallback_rounds,
        "stage_seconds": {name: round(seconds, 4) for name, seconds in (first.stage_seconds or {}).items()},
    }
    if freely and by_stage:
        row |= times_of(by_stage, freely, result.mean_acceptance_length)
    else:
        row["failure"] = "too few rounds; give more `--rounds`"
    return row, result.sequences[0]


def _decode(subject: Subject, oracle: Oracle, fields: dict[str, Any]) -> DDTreeOutput:
    config = DDTreeConfig(
        max_new_tokens=subject.new_tokens,
        do_sample=False,
        draft_temperature=temperature_for(subject.target),
        return_dict_in_generate=True,
        **fields,
    )
    return subject.generate(config, assistant_model=oracle)


def times_of(staged: list[Round], free: list[Round], acceptance: float) -> Row:
    """Milliseconds a round, by stage and forward.

    Args:
        staged: rounds that waited for the device. free: rounds that did not.
    """
    round_ms = median_ms([each.ended - each.started for each in free])
    forwards = [sum(each.forwards.values()) for each in staged]
    stages = {name: round(median_ms([each.seconds[name] for each in staged]), 4) for name in STAGES}
    by_forward = {name: round(median_ms([each.forwards.get(name, 0.0) for each in staged]), 4) for name in FORWARDS}
    waiting = [1 - inner / (each.ended - each.started) for inner, each in zip(forwards, staged, strict=True)]
    return {
        "ms_per_round": round(round_ms, 4),
        "ms_per_token": round(round_ms / acceptance, 4),
        "tokens_per_second": round(1000 * acceptance / round_ms, 1),
        "stages_ms": stages,
        "forwards_ms": by_forward,
        "outside": round(1 - median_ms(forwards) / round_ms, 4),
        "outside_waiting": round(statistics.median(waiting), 4),
    }


def checks_of(rows: list[Row], subject: Subject) -> dict[str, bool]:
    """What must hold besides; of graphs only where there are any."""
    _, eager, graphs, _ = rows
    checks = {
        "trees and plain decoding: same tokens": eager["same_text"] and graphs["same_text"],
        "no round fell back": not eager["fallback_rounds"] and not graphs["fallback_rounds"],
    }
    if subject.has_graphs:
        checks["graphs were replayed"] = bool(graphs["replayed_rounds"])
        name = f"graphs: at most {MOST_OUTSIDE:.0%} of a round outside the two forwards"
        checks[name] = graphs.get("outside", 1.0) <= MOST_OUTSIDE
    return checks


def setting(subject: Subject, options: argparse.Namespace) -> Row:
    """The record's conditions."""
    names = ("shape", "acceptance", "budget", "context", "rounds")
    models = {"target": subject.target, "drafter": subject.drafter}
    return {
        "command": shlex.join(["hf-ddtree", *options.arguments]),
        "hardware": hardware(subject.device),
        "versions": versions(),
        **{name: getattr(options, name) for name in names},
        "new_tokens": subject.new_tokens,
        "dtype": str(subject.target.dtype).removeprefix("torch."),
        "weights_bytes": {name: model.get_memory_footprint() for name, model in models.items()},
    }


def _report(record: Row, options: argparse.Namespace) -> None:
    """What follows the table."""
    print(LEGEND)
    for name, passed in record["checks"].items():
        print(f"{'ok' if passed else 'FAILED':>6}  {name}")
    if not record["graphs_here"]:
        print(f"no graphs here ({options.device}): what they save is not checked")
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


def heading(subject: Subject, options: argparse.Namespace) -> str:
    """Conditions, and the table's head."""
    weights, machine = subject.target.get_memory_footprint() / 1e9, hardware(subject.device)
    columns = "".join(f"{name:>9}" for name in (*STAGES, *FORWARDS, "outside"))
    return (
        f"{options.shape}, random weights ({weights:.3g} GB, {subject.target.dtype}), on "
        f"{machine.get('accelerator', machine['cpu'])}; context {options.context}, budget {options.budget}, "
        f"{subject.new_tokens} tokens, an oracle of {options.acceptance:g} tokens a round:\n"
        f"{'method':<29}{'tokens/s':>9}{'speed-up':>9}{'accepted':>9}{'ms/round':>9}{columns}  same text"
    )


def line(row: Row) -> str:
    """Of the table."""
    if "failure" in row:
        return f"{row['method']:<29}  {row['failure']}"
    times = row.get("stages_ms", {}) | row.get("forwards_ms", {})
    columns = "".join(f"{times[name]:>9.3f}" if name in times else f"{'-':>9}" for name in (*STAGES, *FORWARDS))
    outside = f"{row['outside']:>9.1%}" if "outside" in row else f"{'-':>9}"
    method = "plain generate, compiled" if row.get("compiled") else row["method"]
    return (
        f"{method:<29}{row['tokens_per_second']:>9.1f}{row['speed_up']:>8.2f}x"
        f"{row.get('acceptance_length', 1.0):>9.2f}{row.get('ms_per_round', row['ms_per_token']):>9.3f}"
        f"{columns}{outside}  {'yes' if row['same_text'] else 'NO'}"
    )
