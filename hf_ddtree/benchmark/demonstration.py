"""The race of `hf-ddtree demo | generate`: a few methods on a few prompts, and the check in float32 after it."""

import argparse
import json

import torch
from transformers import PreTrainedModel

from ..models import DFlashDraftModel
from . import race

Prompts = list[dict[str, torch.Tensor]]


def show_race(
    target: PreTrainedModel, drafter: PreTrainedModel | None, inputs: Prompts, options: argparse.Namespace
) -> None:
    """Prints a table, where texts part from plain decoding's and how close the call was there, and the JSON.

    Args:
        drafter: None = lookup.
        inputs: as `race.encode` gives them.
        options: `budget`, `max_new_tokens`, `repeats`, `compile`.
    """
    budgets = [*sorted({8, 16, 32} | ({options.budget} - {"auto"})), "auto"]
    methods = race.contenders(drafter, budgets, options.max_new_tokens, options.compile)
    runs = race.race(target, inputs, methods, options.repeats)
    rows = race.summary(runs)
    where = f"{torch.get_num_threads()} CPU threads" if target.device.type == "cpu" else str(target.device)
    print(f"greedy, {target.dtype}, {where}, up to {options.max_new_tokens} tokens, {len(inputs)} prompt(s):")
    print(race.table(rows))
    if isinstance(drafter, DFlashDraftModel):
        print(
            "(the library's chain slices a 3D tensor for the head; some CPUs copy the head's weight for it each round)"
        )
    for name, run in runs.items():
        for index, ids in run.ids.items():
            plain = runs[race.PLAIN].ids[index]
            difference = race.first_difference(target, inputs[index]["input_ids"], ids, plain)
            if difference is not None:
                print(
                    f"  {name}, prompt {index + 1}: differs from token {difference.position}, where the logits of the "
                    f"two candidates are {difference.gap:.3g} apart; rounding explains {difference.rounding:.3g}"
                )
    print(json.dumps(rows))


def check_float32(
    target: PreTrainedModel, drafter: PreTrainedModel | None, inputs: Prompts, options: argparse.Namespace
) -> int:
    """Repeats DDTree and plain decoding in float32, where the texts must be the same; returns the exit status.

    Args:
        options: `budget`, `max_new_tokens`, `compile`.
    """
    methods = race.contenders(drafter, [options.budget], options.max_new_tokens, options.compile)
    methods = {name: methods[name] for name in (race.PLAIN, f"DDTree, budget {options.budget}")}
    with race.in_float32(target, drafter):
        row = race.summary(race.race(target, inputs, methods, repeats=1))[-1]
    same = row["identical"] == row["prompts"]
    verdict = "identical text" if same else "DIFFERENT TEXT, which is a bug"
    print(f"float32 check: {row['identical']} of {row['prompts']} prompts, {verdict}")
    return 0 if same else 1
