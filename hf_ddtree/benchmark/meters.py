"""Instruments around one call of a decoding method: times of forwards, lengths of the cache, peak memory."""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..compiled import Forwards
from ..target import Target

SAMPLING_SECONDS = 0.005
STATM = Path("/proc/self/statm")


def wait_for(device: torch.device) -> None:
    """Until `device` has done what it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class ForwardMeter:
    """Inside a `with` block, times the forwards of the target, of a drafter, and of the target's head where drafts call
    it by itself. A forward inside another one is part of that one.

    Modules are watched by hooks, except within our compiled forwards: a graph calls no hooks, and a compiler would
    compile them. Those are timed as a whole, a drafter's with the head.

    Attributes:
        seconds: by "target", "drafter" and "head", of what came after the target's first forward, the prefill.
        prefilled: `time.perf_counter()` at the end of the prefill; None before.
        cached: per forward of the target the tokens in its cache at the start; None where it can't be told. Compiled
            forwards are left out.
    """

    def __init__(self, target: PreTrainedModel, drafter: nn.Module | None):
        self.modules = {"target": target, "drafter": drafter, "head": target.get_output_embeddings()}
        self.device = target.device
        self.seconds: dict[str, float] = dict.fromkeys(self.modules, 0.0)
        self.prefilled: float | None = None
        self.cached: list[int | None] = []
        self.depth = 0
        self.started = 0.0
        self.handles: list[Any] = []
        self.run = Forwards.run

    def __enter__(self) -> "ForwardMeter":
        self._hook()
        Forwards.run = lambda forwards, *inputs: self._run(forwards, *inputs)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: Any) -> None:
        Forwards.run = self.run  # type: ignore[method-assign]
        self._unhook()

    def _hook(self) -> None:
        for name, module in self.modules.items():
            if module is not None:
                self.handles.append(module.register_forward_pre_hook(self._before(name), with_kwargs=True))
                self.handles.append(module.register_forward_hook(self._after(name)))

    def _unhook(self) -> None:
        while self.handles:
            self.handles.pop().remove()

    def _run(self, forwards: Forwards, function: Callable[..., Any], *inputs: Any) -> Any:
        if not forwards.fixed:
            return self.run(forwards, function, *inputs)
        self._unhook()
        try:
            self._start()
            outputs = self.run(forwards, function, *inputs)
            self._stop("target" if isinstance(getattr(function, "__self__", None), Target) else "drafter")
        finally:
            self._hook()
        return outputs

    def _before(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if name == "target":
                self.cached.append(cached_tokens(kwargs))
            if self.depth == 0:
                self._start()
            self.depth += 1

        return hook

    def _after(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.depth -= 1
            if self.depth == 0:
                self._stop(name)

        return hook

    def _start(self) -> None:
        wait_for(self.device)
        self.started = time.perf_counter()

    def _stop(self, name: str) -> None:
        wait_for(self.device)
        ended = time.perf_counter()
        if self.prefilled is not None:
            self.seconds[name] += ended - self.started
        elif name == "target":
            self.prefilled = ended


def cached_tokens(kwargs: dict[str, Any]) -> int | None:
    """Tokens in the cache that a forward is given; 0 without one, None where the cache can't tell."""
    cache = kwargs.get("cache", kwargs.get("past_key_values"))
    if cache is None:
        return 0
    return int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else None


def committed_lengths(cached: list[int | None], prompt_length: int, new_tokens: int) -> list[int] | None:
    """Tokens that each forward of the target committed, the prefill's first, told from what its cache held.

    Args:
        cached: as `ForwardMeter.cached`.

    Returns:
        None where the cache does not tell: lengths that are not positive or do not add up.
    """
    if not cached or any(each is None for each in cached):
        return None
    # Of the texts, the last token is not cached yet.
    ends = [each for each in (*cached[1:], prompt_length + new_tokens - 1) if each is not None]
    starts = [max(each, prompt_length - 1) for each in cached if each is not None]
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    return lengths if min(lengths) > 0 and sum(lengths) == new_tokens else None


class PeakMemory:
    """Inside a `with` block, the most memory held beyond what was held at its start.

    On CUDA what torch's allocator gave out at most. On a CPU the resident memory of the process, read every 5 ms by a
    thread: what lives shorter may be missed, and what the allocator had kept from before is first given back.

    Attributes:
        bytes: None where it can't be measured: neither CUDA nor Linux.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes: int | None = None
        self.before = 0
        self.done = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before = torch.cuda.memory_allocated(self.device)
        elif self.device.type == "cpu" and STATM.exists():
            give_back_memory()
            self.before = resident_bytes()
            self.bytes = 0
            self.thread = threading.Thread(target=self._watch, daemon=True)
            self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self.before
        if self.thread is not None:
            self.done.set()
            self.thread.join()

    def _watch(self) -> None:
        while not self.done.wait(SAMPLING_SECONDS):
            self.bytes = max(self.bytes or 0, resident_bytes() - self.before)


def resident_bytes() -> int:
    """Resident memory of this process, on Linux."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """Returns to the system what glibc keeps of freed memory, so that the next growth shows; elsewhere nothing."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL("libc.so.6").malloc_trim(0)
