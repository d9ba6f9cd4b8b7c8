"""`hf-ddtree bench sampling`: acceptance length and speed of sampling methods at several temperatures."""

import argparse
import json
import statistics
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..configuration import DDTreeConfig
from ..models import DFlashDraftModel
from ..processors import plain_sampling_processors
from . import race
from .coupling import scan, scan_table
from .statistics import quotient, ratio_of_sums, rounded, with_error

LEGEND = (
    "accepted: tokens per target forward after the prefill, with its standard error over prompts; against paper: as a\n"
    "multiple of the paper's rule. All sample the whole vocabulary (top_k=0); chains draft one block at any budget."
)
UPSTREAM, PAPER, COUPLED = "transformers' DFlash chain", "DDTree, paper's rule", "DDTree, coupled"


def contenders(
    drafter: DFlashDraftModel, temperature: float, budget: int, max_new_tokens: int
) -> dict[str, race.Method]:
    """Sampling methods by name; all sample the whole vocabulary at `temperature`."""
    common = {"do_sample": True, "temperature": temperature, "top_k": 0, "max_new_tokens": max_new_tokens}
    chain = {"tree_shape": "chain", **common}
    paper = {"draft_noise_scale": 0.0, "draft_temperature": 1.0, "draft_transition": False, "draft_text_weight": 0.0}
    return {
        race.PLAIN: (GenerationConfig(**common), None),
        UPSTREAM: (GenerationConfig(speculation_type="dflash", **common), drafter),
        PAPER: (DDTreeConfig(tree_budget=budget, **paper, **common), drafter),
        COUPLED: (DDTreeConfig(tree_budget=budget, **common), drafter),
        "chain, coupled": (DDTreeConfig(**chain), drafter),
        "chain, token rejection": (DDTreeConfig(acceptance="token", **chain), drafter),
        "chain, block verification": (DDTreeConfig(acceptance="block", **chain), drafter),
        "tree, recursive rejection": (DDTreeConfig(acceptance="recursive", tree_budget=budget, **common), drafter),
    }


def bench(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> int:
    """Checks texts in float32, races the methods, prints tables and, last, one line of JSON; the exit status.

    Args:
        prompts: [length] token ids each.
        options: `temperatures`, `budget`, `max_new_tokens`, `repeats`, `scan`, `json`.
    """
    failures = check_texts(target, drafter, prompts[:2], options)
    record: dict[str, Any] = {"dtype": str(target.dtype), "budget": options.budget, "prompts": len(prompts)}
    record |= {"max_new_tokens": options.max_new_tokens, "repeats": options.repeats, "threads": torch.get_num_threads()}
    inputs = [{"input_ids": ids[None].to(target.device)} for ids in prompts]
    inputs = [{**each, "attention_mask": torch.ones_like(each["input_ids"])} for each in inputs]
    for temperature in options.temperatures:
        print(f"\ntemperature {temperature}, {len(prompts)} prompts x {options.repeats}, budget {options.budget}:")
        methods = contenders(drafter, temperature, options.budget, options.max_new_tokens)
        runs = race.race(target, inputs, methods, options.repeats)
        record[f"temperature {temperature}"] = rows = summary(runs)
        print(table(rows), flush=True)
    print(f"\n{LEGEND}")
    if options.scan:
        for temperature in options.temperatures:
            settings = {"tree_budget": options.budget, "max_new_tokens": options.max_new_tokens, "seed": 0}
            config = DDTreeConfig(do_sample=True, temperature=temperature, top_k=0, **settings)
            record[f"scan at {temperature}"] = found = scan(target, drafter, prompts, config)
            print(f"\nacceptance length at temperature {temperature}:\n{scan_table(found)}", flush=True)
    print(json.dumps(record), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if failures else 0


def check_texts(
    target: PreTrainedModel, drafter: DFlashDraftModel, prompts: list[torch.Tensor], options: argparse.Namespace
) -> int:
    """How many float32 texts of coupled DDTree differ from plain decoding's under the same noise."""
    different = compared = 0
    with race.in_float32(target, drafter):
        for temperature in options.temperatures:
            config = contenders(drafter, temperature, options.budget, options.max_new_tokens)[COUPLED][0]
            for seed, prompt in enumerate(prompts):
                config.seed = seed
                ids = prompt[None].to(target.device)
                call = {"attention_mask": torch.ones_like(ids)}
                ours = target.generate(ids, assistant_model=drafter, generation_config=config, **call)
                processors = plain_sampling_processors(target, config)
                length = options.max_new_tokens
                plain = target.generate(
                    ids, do_sample=False, max_new_tokens=length, logits_processor=processors, **call
                )
                different += ours.tolist() != plain.tolist()
                compared += 1
    verdict = "identical to plain decoding's with the same noise" if not different else "DIFFERENT, which is a bug"
    print(f"float32 check: {compared - different} of {compared} texts, {verdict}")
    return different


def summary(runs: dict[str, race.Run]) -> list[dict[str, Any]]:
    """A row per method: acceptance length with its standard error, its quotient to the paper's rule, and speed."""
    plain = statistics.median(runs[race.PLAIN].tokens_per_second)
    rows = []
    counts = {name: (list(run.committed.values()), list(run.rounds.values())) for name, run in runs.items()}
    for name, run in runs.items():
        length, error = ratio_of_sums(*counts[name])
        against, against_error = quotient(counts[name], counts[PAPER])
        speed = statistics.median(run.tokens_per_second)
        rows.append(
            {
                "method": name,
                "acceptance_length": rounded(length),
                "standard_error": rounded(error),
                "against_paper": rounded(against),
                "against_paper_error": rounded(against_error),
                "tokens_per_second": round(speed, 1),
                "speed_up": round(speed / plain, 2),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a text table."""
    lines = [f"{'method':<28}{'accepted':>14}{'against paper':>16}{'tokens/s':>10}{'speed-up':>10}"]
    for row in rows:
        lines.append(
            f"{row['method']:<28}{with_error(row['acceptance_length'], row['standard_error']):>14}"
            f"{with_error(row['against_paper'], row['against_paper_error']):>16}"
            f"{row['tokens_per_second']:>10.1f}{row['speed_up']:>9.2f}x"
        )
    return "\n".join(lines)
