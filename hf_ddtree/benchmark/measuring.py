"""Measures contestants of a race: one instrumented call per prompt, then timed calls without instruments."""

import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..figures import STAGES
from .meters import ForwardMeter, PeakMemory, committed_lengths, wait_for
from .methods import Contestant
from .race import PLAIN, first_difference, in_float32

Prompts = list[dict[str, torch.Tensor]]


@dataclass
class Measured:
    """What was measured of one method.

    Attributes:
        ids: per prompt, the new tokens.
        tokens_per_second: per prompt and timed call, new tokens over the wall time of the whole call, prefill included.
        histogram: rounds by the tokens they committed, prefills left out; empty where it can't be told.
        rounds: forwards of the target, prefills left out; 0 where they aren't counted.
        stage_seconds: over all rounds of the instrumented calls; empty for methods that don't say.
        after_prefill, in_forwards: seconds of the instrumented calls after the prefill's forward, and those of them
            that were spent in forwards of target, drafter, and head.
        peak_bytes: the most memory any call needed beyond what was held before it; None where it can't be measured.
        failure: why the method was left out, if it was.
    """

    ids: dict[int, list[int]] = field(default_factory=dict)
    tokens_per_second: dict[int, list[float]] = field(default_factory=dict)
    histogram: Counter[int] = field(default_factory=Counter)
    rounds: int = 0
    stage_seconds: Counter[str] = field(default_factory=Counter)
    after_prefill: float = 0.0
    in_forwards: Counter[str] = field(default_factory=Counter)
    peak_bytes: int | None = None
    failure: str | None = None

    @property
    def acceptance_length(self) -> float | None:
        """Tokens per forward of the target after the prefill; None where forwards aren't counted."""
        if self.histogram:
            return sum(length * rounds for length, rounds in self.histogram.items()) / self.histogram.total()
        if not self.rounds:
            return None
        return sum(len(ids) - 1 for ids in self.ids.values()) / self.rounds

    @property
    def overhead(self) -> float | None:
        """Share of the time after the prefill that was outside the forwards; None where those aren't timed."""
        return 1 - self.in_forwards.total() / self.after_prefill if self.after_prefill else None


def differing_texts(target: PreTrainedModel, contestants: list[Contestant], prompts: Prompts) -> dict[str, list[int]]:
    """By contestant, the prompts after which its float32 text is not plain decoding's; plain itself is left out.

    Args:
        contestants: plain decoding among them; those that aren't ours may fail, which counts as different.
    """
    plain = next(each for each in contestants if each.name == PLAIN)
    others = [each for each in contestants if each is not plain]
    different: dict[str, list[int]] = {each.name: [] for each in others}
    drafters = {id(each.drafter): each.drafter for each in others if each.drafter is not None}
    with in_float32(target, *drafters.values()):
        for index, prompt in enumerate(tqdm(prompts, desc="comparing texts", leave=False, disable=None)):
            expected = new_ids(plain.generate(prompt, False), prompt)
            for each in others:
                try:
                    same = new_ids(each.generate(prompt, False), prompt) == expected
                except Exception:
                    if each.ours:
                        raise
                    same = False
                if not same:
                    different[each.name].append(index)
    return different


def measure(
    target: PreTrainedModel, contestants: list[Contestant], prompts: Prompts, repeats: int
) -> dict[str, Measured]:
    """Runs every contestant on every prompt: the first prompt to warm up, all once with instruments, all `repeats`
    times on the clock, in an order that rotates. A contestant that is not ours and raises is out, and the reason kept.
    """
    found = {each.name: Measured() for each in contestants}
    passes = [("warm-up", prompts[:1]), ("instruments", prompts), *[("clock", prompts)] * repeats]
    turns = [(kind, index) for kind, some in passes for index in range(len(some))]
    for turn, (kind, index) in enumerate(tqdm(turns, desc="racing", leave=False, disable=None)):
        first = turn % len(contestants)
        for each in contestants[first:] + contestants[:first]:
            if found[each.name].failure is not None:
                continue
            torch.manual_seed(index)
            try:
                _call(target, each, (index, prompts[index]), kind, found[each.name])
            except Exception as error:
                if each.ours or each.name == PLAIN:
                    raise
                found[each.name].failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return found


def _call(
    target: PreTrainedModel,
    contestant: Contestant,
    prompt: tuple[int, dict[str, torch.Tensor]],
    kind: str,
    into: Measured,
) -> None:
    if kind == "instruments":
        _with_instruments(target, contestant, prompt, into)
        return
    started = time.perf_counter()
    output = contestant.generate(prompt[1], False)
    wait_for(target.device)
    seconds = time.perf_counter() - started
    if kind == "clock":
        ids = new_ids(output, prompt[1])
        into.ids[prompt[0]] = ids
        into.tokens_per_second.setdefault(prompt[0], []).append(len(ids) / seconds)


def _with_instruments(
    target: PreTrainedModel, contestant: Contestant, prompt: tuple[int, dict[str, torch.Tensor]], into: Measured
) -> None:
    meter = ForwardMeter(target, contestant.drafter)
    with PeakMemory(target.device) as memory:
        if contestant.hooked:
            with meter:
                output = contestant.generate(prompt[1], target.device.type != "cpu")
        else:
            output = contestant.generate(prompt[1], False)
        wait_for(target.device)
        ended = time.perf_counter()
    into.ids[prompt[0]] = ids = new_ids(output, prompt[1])
    if memory.bytes is not None:
        into.peak_bytes = max(into.peak_bytes or 0, memory.bytes)
    if not contestant.hooked:
        into.histogram[1] += len(ids) - 1
        return
    lengths = getattr(output, "acceptance_lengths", None) or committed_lengths(
        meter.cached, prompt[1]["input_ids"].shape[1], len(ids)
    )
    into.histogram.update(lengths[1:] if lengths else [])
    into.rounds += len(lengths or meter.cached) - 1
    into.stage_seconds.update(getattr(output, "stage_seconds", None) or {})
    if meter.prefilled is not None:
        into.after_prefill += ended - meter.prefilled
        into.in_forwards.update(meter.seconds)


def new_ids(output: Any, prompt: dict[str, torch.Tensor]) -> list[int]:
    """The tokens after the prompt; raises ValueError unless the prompt comes before them."""
    sequences = output if isinstance(output, torch.Tensor) else output.sequences
    ids, given = sequences[0].tolist(), prompt["input_ids"][0].tolist()
    if ids[: len(given)] != given:
        raise ValueError("what was returned does not begin with the prompt; ids [1, length] must include it")
    return ids[len(given) :]


def rows(
    target: PreTrainedModel, contestants: list[Contestant], found: dict[str, Measured], prompts: Prompts
) -> list[dict[str, Any]]:
    """A row per contestant for tables and JSON, plain decoding's first."""
    plain = found[PLAIN]
    made: list[dict[str, Any]] = []
    for each in contestants:
        measured = found[each.name]
        row: dict[str, Any] = {"method": each.name, "budget": each.budget}
        made.append(row)
        if measured.failure is not None:
            row["failure"] = measured.failure
            continue
        row |= _speeds(measured, plain) | _rounds(measured) | _memory(measured, plain)
        row |= _texts(target, measured, plain, prompts)
    return made


def _speeds(measured: Measured, plain: Measured) -> dict[str, Any]:
    """Tokens per second over all calls. The speed-up is taken prompt by prompt, since answers differ in length, and
    short ones are mostly prefill.
    """
    by_prompt = {index: statistics.median(calls) for index, calls in measured.tokens_per_second.items()}
    ratios = [speed / statistics.median(plain.tokens_per_second[index]) for index, speed in by_prompt.items()]
    calls = [speed for calls in measured.tokens_per_second.values() for speed in calls]
    return {
        "tokens_per_second": round(statistics.median(calls), 2),
        "p20": round(_quantile(calls, 0.2), 2),
        "p80": round(_quantile(calls, 0.8), 2),
        "speed_up": round(statistics.median(ratios), 3),
        "speed_up_p20": round(_quantile(ratios, 0.2), 3),
        "speed_up_p80": round(_quantile(ratios, 0.8), 3),
    }


def _quantile(values: list[float], share: float) -> float:
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


def _rounds(measured: Measured) -> dict[str, Any]:
    length, overhead, rounds = measured.acceptance_length, measured.overhead, measured.histogram.total()
    stages = {name: measured.stage_seconds[name] for name in STAGES if name in measured.stage_seconds}
    forwards = measured.in_forwards if measured.rounds else {}
    return {
        "acceptance_length": None if length is None else round(length, 3),
        "histogram": {str(length): measured.histogram[length] for length in sorted(measured.histogram)},
        "stage_ms": {name: round(1000 * seconds / max(rounds, 1), 3) for name, seconds in stages.items()},
        "forward_ms": {name: round(1000 * each / max(measured.rounds, 1), 3) for name, each in forwards.items()},
        "overhead": None if overhead is None else round(overhead, 4),
    }


def _memory(measured: Measured, plain: Measured) -> dict[str, Any]:
    if measured.peak_bytes is None or plain.peak_bytes is None:
        return {"peak_mb": None, "over_plain_mb": None}
    over = measured.peak_bytes - plain.peak_bytes
    return {"peak_mb": round(measured.peak_bytes / 1e6, 2), "over_plain_mb": round(over / 1e6, 2)}


def _texts(target: PreTrainedModel, measured: Measured, plain: Measured, prompts: Prompts) -> dict[str, Any]:
    """Tokens, prompts with plain decoding's text, and how close the target's call was where texts part."""
    differences = []
    for index, expected in plain.ids.items():
        parted = first_difference(target, prompts[index]["input_ids"], measured.ids[index], expected)
        if parted is not None:
            differences.append({"prompt": index, **vars(parted)})
    return {
        "tokens": sum(map(len, measured.ids.values())),
        "identical": sum(measured.ids[index] == ids for index, ids in plain.ids.items()),
        "prompts": len(plain.ids),
        "differences": differences,
    }
