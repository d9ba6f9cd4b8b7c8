"""Prompt sets by name: the one that ships, public ones through `datasets`, and files of one's own."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from .race import encode

SHIPPED = "shipped"
SHIPPED_FILE = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True)
class PromptSet:
    """Where a public set is on the Hub, and how a row of it becomes a prompt."""

    dataset: str
    config: str | None
    split: str
    prompt: Callable[[dict[str, Any]], str]


def _step_by_step(problem: str) -> str:
    return f"{problem}\nReason step by step, and put the final answer in \\boxed{{}}."


def _with_input(row: dict[str, Any]) -> str:
    return f"{row['instruction']}\n\n{row['input']}" if row["input"] else row["instruction"]


def _with_tests(row: dict[str, Any]) -> str:
    tests = "\n".join(row["test_list"])
    return f"{row['prompt']} The function must pass these tests:\n\n{tests}"


SETS = {
    "gsm8k": PromptSet("openai/gsm8k", "main", "test", lambda row: _step_by_step(row["question"])),
    "math500": PromptSet("HuggingFaceH4/MATH-500", None, "test", lambda row: _step_by_step(row["problem"])),
    "humaneval": PromptSet(
        "openai/openai_humaneval",
        None,
        "test",
        lambda row: f"Complete this Python function:\n```python\n{row['prompt']}\n```",
    ),
    "mbpp": PromptSet("google-research-datasets/mbpp", "sanitized", "test", _with_tests),
    "mt-bench": PromptSet("HuggingFaceH4/mt_bench_prompts", None, "train", lambda row: row["prompt"][0]),
    "alpaca": PromptSet("tatsu-lab/alpaca", None, "train", _with_input),
    "cnn-dailymail": PromptSet(
        "abisee/cnn_dailymail", "3.0.0", "test", lambda row: f"Summarise this article:\n\n{row['article']}"
    ),
}


def load_prompts(name: str, count: int) -> list[str]:
    """The first `count` prompts of a set, fewer if it has fewer.

    Args:
        name: `shipped`, a name of `SETS`, a .jsonl file of {"prompt": ...} rows, or a folder of such files.

    Raises:
        ImportError: a public set is asked for and `datasets` is not installed.
        ValueError: there is no such set, it has no prompts, or the Hub can't be reached.
    """
    if name == SHIPPED:
        return read_prompts(SHIPPED_FILE)[:count]
    if name in SETS:
        return _from_hub(name, count)
    path = Path(name)
    if path.is_dir():
        prompts = [prompt for file in sorted(path.glob("*.jsonl")) for prompt in read_prompts(file)]
    elif path.is_file():
        prompts = read_prompts(path)
    else:
        raise ValueError(
            f"`--prompts-from {name}` is no file, no folder and no set; the sets are {SHIPPED}, {', '.join(SETS)}."
        )
    if not prompts:
        raise ValueError(f'`--prompts-from {name}` has no prompts: .jsonl rows of {{"prompt": ...}}.')
    return prompts[:count]


def read_prompts(file: Path) -> list[str]:
    """The prompts of a .jsonl file; raises ValueError for a row without one."""
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)["prompt"]
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f'{file}, line {number}: no {{"prompt": ...}} row ({error!r}).') from error
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"{file}, line {number}: the prompt is {prompt!r}; it must be text.")
        prompts.append(prompt)
    return prompts


def _from_hub(name: str, count: int) -> list[str]:
    if find_spec("datasets") is None:
        raise ImportError(f"`--prompts-from {name}` needs datasets: `pip install datasets`.")
    import datasets

    chosen = SETS[name]
    try:
        rows = datasets.load_dataset(chosen.dataset, chosen.config, split=chosen.split)
    except (OSError, ValueError) as error:  # no connection is an OSError, no cached copy a ValueError
        reason = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"`--prompts-from {name}`: {chosen.dataset} can't be had from the Hub ({reason}); use the set that ships, "
            f"`--prompts-from {SHIPPED}`."
        ) from error
    return [chosen.prompt(row) for row in islice(rows, count)]


def encode_at(
    tokenizer: PreTrainedTokenizerBase, prompt: str, context: int | None, device: torch.device
) -> dict[str, torch.Tensor]:
    """The prompt through the chat template, lengthened by text in front of it to about `context` tokens.

    Args:
        context: tokens of the whole input, template included; None = as long as it is. What is longer stays so.
    """
    inputs = encode(tokenizer, prompt, device)
    if context is None:
        return inputs
    filler = tokenizer("\n\n".join(read_prompts(SHIPPED_FILE)), add_special_tokens=False)["input_ids"]
    tokens = 0
    for _ in range(3):  # tokens at the seam merge or split, so the length is met in steps
        missing = context - inputs["input_ids"].shape[1]
        if tokens + missing <= 0 or missing == 0:
            break
        tokens += missing
        text = tokenizer.decode(list(islice(cycle(filler), tokens)))
        inputs = encode(tokenizer, f"{text}\n\n{prompt}", device)
    return inputs
