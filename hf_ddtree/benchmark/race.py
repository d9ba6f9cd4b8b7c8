"""Runs decoding methods against each other: same prompts, same process, in turns, text compared before speed."""

import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..configuration import DDTreeConfig
from ..models import DFlashDraftModel

PLAIN = "plain generate"
Method = tuple[GenerationConfig, PreTrainedModel | None]  # and its `assistant_model`


@dataclass
class Run:
    """One method's record.

    Attributes:
        ids: per prompt, the new tokens (those of the last repeat).
        tokens_per_second: per call, new tokens over the wall time of the whole `generate` call, prefill included.
        committed, rounds: per prompt, over all repeats, new tokens and target forwards, the prefill's left out.
    """

    ids: dict[int, list[int]] = field(default_factory=dict)
    tokens_per_second: list[float] = field(default_factory=list)
    committed: Counter[int] = field(default_factory=Counter)
    rounds: Counter[int] = field(default_factory=Counter)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round over all calls."""
        return self.committed.total() / max(self.rounds.total(), 1)


def contenders(
    drafter: PreTrainedModel | None, budgets: Sequence[int | str], max_new_tokens: int, compile_mode: str = "auto"
) -> dict[str, Method]:
    """Methods by name: plain decoding, the library's own with this drafter, our chain of DFlash, our trees; all greedy.

    Args:
        drafter: None = lookup.
        budgets, compile_mode: `tree_budget` and `compile` of our trees.
    """
    common = {"max_new_tokens": max_new_tokens, "do_sample": False}
    trees: dict[str, Any] = {"drafter": "lookup"} if drafter is None else {}
    rivals: dict[str, Method]
    if drafter is None:
        rivals = {"transformers' prompt lookup": (GenerationConfig(prompt_lookup_num_tokens=10, **common), None)}
    elif isinstance(drafter, DFlashDraftModel):
        depth = drafter.config.block_size - 1
        rivals = {
            "transformers' DFlash chain": (GenerationConfig(speculation_type="dflash", **common), drafter),
            "DDTree code, chain": (DDTreeConfig(tree_budget=depth, tree_top_k=1, **common), drafter),
        }
    else:
        rivals = {"transformers' assistant": (GenerationConfig(**common), drafter)}
    return {
        PLAIN: (GenerationConfig(**common), None),
        **rivals,
        **{
            f"DDTree, budget {budget}": (
                DDTreeConfig(tree_budget=budget, compile=compile_mode, **trees, **common),
                drafter,
            )
            for budget in budgets
        },
    }


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """The prompt through the chat template where there is one."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": prompt}]
        inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    else:
        inputs = tokenizer(prompt, return_tensors="pt")
    return inputs.to(device)


def race(
    target: PreTrainedModel,
    prompts: list[dict[str, torch.Tensor]],
    methods: dict[str, Method],
    repeats: int,
) -> dict[str, Run]:
    """Runs every method on every prompt, `repeats` times, in an order that rotates from turn to turn.

    Before each call torch is seeded by prompt and repeat: methods that sample by the same noise write the same text.

    Args:
        prompts: as `encode` gives them.
    """
    runs = {name: Run() for name in methods}
    forwards = ForwardCounter(target)
    names = list(methods)
    timed = [(repeat, index) for repeat in range(repeats) for index in range(len(prompts))]
    turns = [(None, 0), *timed]  # the first prompt once to warm up
    try:
        for number, (repeat, index) in enumerate(tqdm(turns, desc="racing", leave=False, disable=None)):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                config, drafter = methods[name]
                forwards.count = 0
                torch.manual_seed(1000 * (repeat or 0) + index)
                started = time.perf_counter()
                options: dict[str, Any] = {"assistant_model": drafter} if drafter is not None else {}
                output = target.generate(**prompts[index], generation_config=config, **options)
                seconds = time.perf_counter() - started
                if repeat is None:
                    continue
                new = output[0, prompts[index]["input_ids"].shape[1] :].tolist()
                run = runs[name]
                run.ids[index] = new
                run.tokens_per_second.append(len(new) / seconds)
                run.committed[index] += len(new) - 1
                run.rounds[index] += forwards.count - 1
    finally:
        forwards.remove()
    return runs


@contextmanager
def in_float32(*models: PreTrainedModel | None) -> Iterator[None]:
    """Runs the block with the models in float32; then every weight and buffer is what it was, to the bit.

    A model's own `.to(bfloat16)` would round what it keeps in float32, such as RoPE's frequencies.
    """
    used = [model for model in models if model is not None]
    tensors = [tensor for model in used for tensor in (*model.parameters(), *model.buffers())]
    dtypes = [tensor.dtype for tensor in tensors]
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data = tensor.data.float()
    try:
        yield
    finally:
        for tensor, dtype in zip(tensors, dtypes, strict=True):
            tensor.data = tensor.data.to(dtype)


class ForwardCounter:
    """Counts forwards of `model`."""

    def __init__(self, model: torch.nn.Module):
        self.count = 0
        self.handle = model.register_forward_pre_hook(self._bump)

    def _bump(self, *_: Any) -> None:
        self.count += 1

    def remove(self) -> None:
        """Takes the hook off the model."""
        self.handle.remove()


def summary(runs: dict[str, Run]) -> list[dict[str, Any]]:
    """A row per method: median speed, speed-up over plain, mean acceptance length, prompts with the same text."""
    plain = runs[PLAIN]
    rows = []
    for name, run in runs.items():
        speed = statistics.median(run.tokens_per_second)
        rows.append(
            {
                "method": name,
                "tokens_per_second": round(speed, 1),
                "speed_up": round(speed / statistics.median(plain.tokens_per_second), 2),
                "acceptance_length": round(run.acceptance_length, 2),
                "identical": sum(run.ids[index] == ids for index, ids in plain.ids.items()),
                "prompts": len(plain.ids),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as a text table."""
    lines = [f"{'method':<28}{'tokens/s':>10}{'speed-up':>10}{'accepted':>10}{'same text':>11}"]
    for row in rows:
        lines.append(
            f"{row['method']:<28}{row['tokens_per_second']:>10.1f}{row['speed_up']:>9.2f}x"
            f"{row['acceptance_length']:>10.2f}{row['identical']:>8}/{row['prompts']}"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Difference:
    """Where two texts part, and how close the target's call was there.

    Attributes:
        position: index among the new tokens.
        gap: difference of the two tokens' logits in the target's own plain forward.
        rounding: two units in the last place of the larger logit: what another order of summation can explain.
    """

    position: int
    gap: float
    rounding: float


@torch.no_grad()
def first_difference(
    target: PreTrainedModel, prompt_ids: torch.Tensor, ours: list[int], plain: list[int]
) -> Difference | None:
    """The first position at which `ours` differs from `plain`; None where they are the same."""
    pairs = enumerate(zip(ours, plain, strict=False))
    position = next((i for i, (a, b) in pairs if a != b), None)
    if position is None:
        return None
    ids = torch.cat([prompt_ids, torch.tensor([plain[:position]], device=prompt_ids.device).long()], dim=1)
    logits = target(ids).logits[0, -1]
    pair = logits[[ours[position], plain[position]]].float()
    ulp = torch.finfo(logits.dtype).eps * 2 ** torch.floor(torch.log2(pair.abs().max()))
    return Difference(position, float((pair[1] - pair[0]).abs()), 2 * float(ulp))
