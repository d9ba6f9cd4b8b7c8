"""`hf-ddtree bench batch`: speed and acceptance length by batch size, against plain decoding of the same batch."""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel

from ..configuration import DDTreeConfig
from ..models import DFlashDraftModel
from .race import PLAIN, in_float32

CHECKED_ROWS = 4
Method = tuple[GenerationConfig, dict[str, Any]]
LEGEND = (
    "tokens/s: of all rows together, median of calls; per row: against the same method's batch of 1, divided by the\n"
    "batch; accepted: tokens per row and target forward after the prefill."
)


def bench_batch(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> int:
    """Checks texts in float32, races the methods at each batch size, prints a table and JSON; the exit status.

    Args:
        prompts: [length] token ids each. A batch repeats one of them, or with `--mixed` takes them in turn.
        options: `batches`, `budgets`, `max_new_tokens`, `repeats`, `mixed`, `json`.
    """
    different = check_rows(target, drafter, prompts[:CHECKED_ROWS], options)
    kind = "different prompts" if options.mixed else "equal prompts"
    print(f"\ngreedy, {target.dtype}, {torch.get_num_threads()} CPU threads, {kind}, {len(prompts)} batches each:")
    print(
        f"{'batch':>5}  {'method':<20}{'tokens/s':>10}{'to plain':>10}{'to batch 1':>12}{'per row':>9}{'accepted':>10}"
    )
    rows: list[dict[str, Any]] = []
    for size in options.batches:
        batches = [batch_of(prompts, index, size, options.mixed, target.device) for index in range(len(prompts))]
        rows += measured(target, contenders(drafter, options), batches, options.repeats)
        for row in rows[-1 - len(options.budgets) :]:
            print(_line(row, rows), flush=True)
    print(LEGEND)
    record = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "prompts": len(prompts)}
    record |= {"mixed": options.mixed, "max_new_tokens": options.max_new_tokens, "rows": rows}
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if different else 0


def contenders(drafter: DFlashDraftModel, options: argparse.Namespace) -> dict[str, Method]:
    """Plain decoding, and trees of each budget, as config and further arguments of `generate`."""
    common = {"max_new_tokens": options.max_new_tokens, "do_sample": False, "return_dict_in_generate": True}
    return {
        PLAIN: (GenerationConfig(**common), {}),
        **{
            f"DDTree, budget {budget}": (DDTreeConfig(tree_budget=budget, **common), {"assistant_model": drafter})
            for budget in options.budgets
        },
    }


def batch_of(
    prompts: list[torch.Tensor], first: int, size: int, mixed: bool, device: torch.device
) -> dict[str, torch.Tensor]:
    """A batch of `size` rows, padded on the left: prompt `first` again and again, or the prompts from it on in turn."""
    rows = [prompts[(first + row * mixed) % len(prompts)] for row in range(size)]
    longest = max(map(len, rows))
    padded = [
        torch.nn.functional.pad(torch.stack([ids, torch.ones_like(ids)]), (longest - len(ids), 0)) for ids in rows
    ]
    ids, mask = torch.stack(padded, dim=1).to(device)
    return {"input_ids": ids, "attention_mask": mask}


def measured(
    target: PreTrainedModel, methods: dict[str, Method], batches: list[dict[str, torch.Tensor]], repeats: int
) -> list[dict[str, Any]]:
    """A row per method; every method runs every batch `repeats` times, in an order that rotates, after a warm-up."""
    speeds: dict[str, list[float]] = {name: [] for name in methods}
    lengths: dict[str, list[float]] = {name: [] for name in methods}
    names = list(methods)
    turns = [(None, batches[0]), *((repeat, batch) for repeat in range(repeats) for batch in batches)]
    for turn, (repeat, batch) in enumerate(tqdm(turns, desc="racing", leave=False, disable=None)):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            config, options = methods[name]
            started = time.perf_counter()
            output = target.generate(**batch, generation_config=config, **options)
            seconds = time.perf_counter() - started
            if repeat is None:
                continue
            speeds[name].append(new_tokens(target, output.sequences[:, batch["input_ids"].shape[1] :]) / seconds)
            lengths[name].append(getattr(output, "mean_acceptance_length", 1.0))
    plain = statistics.median(speeds[PLAIN])
    return [
        {
            "batch": len(batches[0]["input_ids"]),
            "method": name,
            "tokens_per_second": round(statistics.median(speeds[name]), 1),
            "to_plain": round(statistics.median(speeds[name]) / plain, 2),
            "acceptance_length": round(statistics.mean(lengths[name]), 2),
        }
        for name in methods
    ]


def new_tokens(target: PreTrainedModel, answers: torch.Tensor) -> int:
    """Tokens in answers [batch, length] up to each row's end token; what comes after it is padding."""
    ends = target.generation_config.eos_token_id
    is_end = torch.isin(answers, torch.tensor([] if ends is None else ends, dtype=answers.dtype, device=answers.device))
    return int((is_end.long().cumsum(1) - is_end.long() == 0).sum())


def check_rows(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> int:
    """How many rows of a float32 batch of different prompts are not what plain decoding writes after them alone."""
    methods = contenders(drafter, options)
    config, arguments = methods[f"DDTree, budget {options.budgets[-1]}"]
    with in_float32(target, drafter):
        batch = batch_of(prompts, 0, len(prompts), True, target.device)
        together = target.generate(**batch, generation_config=config, **arguments).sequences
        different = 0
        for row, prompt in enumerate(prompts):
            inputs = batch_of([prompt], 0, 1, False, target.device)
            alone = target.generate(**inputs, generation_config=methods[PLAIN][0]).sequences[0, len(prompt) :]
            ours = together[row, batch["input_ids"].shape[1] :][: len(alone)]
            different += ours.tolist() != alone.tolist()
    verdict = "identical to plain decoding of each row alone" if not different else "DIFFERENT, which is a bug"
    print(f"float32 check: {len(prompts) - different} of {len(prompts)} rows of one batch, {verdict}")
    return different


def _line(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    alone = next((each for each in rows if each["method"] == row["method"] and each["batch"] == 1), None)
    times = None if alone is None else row["tokens_per_second"] / alone["tokens_per_second"]
    against = f"{'-':>12}{'-':>9}" if times is None else f"{times:>11.2f}x{times / row['batch']:>9.2f}"
    return (
        f"{row['batch']:>5}  {row['method']:<20}{row['tokens_per_second']:>10.1f}{row['to_plain']:>9.2f}x{against}"
        f"{row['acceptance_length']:>10.2f}"
    )
