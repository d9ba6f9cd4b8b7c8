"""What a target forward costs by its number of tokens: measured once per machine, model and setting, kept in a file."""

import hashlib
import json
import os
import platform
import tempfile
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from huggingface_hub import cached_assets_path
from transformers import PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)
SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
RUNS = 5  # forwards of a size; the first warms up, and the fastest counts
MOST_SECONDS = 3.0  # sizes whose measuring would begin later are left out, and extrapolated
KNOWN: dict[str, "VerifyTimes"] = {}  # of this process


@dataclass(frozen=True)
class VerifyTimes:
    """Seconds of a forward.

    Attributes:
        tokens: ascending; of all rows together. seconds: of each, never falling.
    """

    tokens: Sequence[int]
    seconds: Sequence[float]

    def __call__(self, tokens: int) -> float:
        """Between two sizes on a line, beyond the last one by the last two."""
        place = min(max(bisect_left(self.tokens, tokens), 1), len(self.tokens) - 1)
        if place == 0:
            return self.seconds[0]
        (left, right), (low, high) = (each[place - 1 : place + 1] for each in (self.tokens, self.seconds))
        return max(low + (high - low) * (tokens - left) / (right - left), self.seconds[0])


def measure(forward: Callable[[int], None], rows: int) -> VerifyTimes:
    """Times of `forward`, which takes a number of nodes a row and waits until it has run over `rows` times as many.

    Raises:
        MemoryError: by `forward`, for the smallest sizes; larger ones are left out.
    """
    tokens: list[int] = []
    seconds: list[float] = []
    started = time.perf_counter()
    for nodes in SIZES:
        if len(tokens) > 1 and time.perf_counter() - started > MOST_SECONDS:
            break
        runs = []
        try:
            for _ in range(RUNS):
                before = time.perf_counter()
                forward(nodes)
                runs.append(time.perf_counter() - before)
        except MemoryError:
            if len(tokens) < 2:
                raise
            break
        tokens.append(rows * nodes)
        seconds.append(min(runs[1:]))
    return VerifyTimes(tokens, _rising(seconds))


def _rising(seconds: list[float]) -> list[float]:
    """The nearest sequence, by squares, that never falls: neighbours out of order get their mean."""
    blocks: list[list[float]] = []
    for each in seconds:
        blocks.append([each])
        while len(blocks) > 1 and fmean(blocks[-2]) > fmean(blocks[-1]):
            blocks[-2:] = [blocks[-2] + blocks[-1]]
    return [fmean(block) for block in blocks for _ in block]


def known_or_measured(key: dict[str, Any], forward: Callable[[int], None], rows: int) -> VerifyTimes:
    """Times kept under `key` by this process or an earlier one; else measured and kept.

    A file that can't be read is measured anew, one that can't be written is done without.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    if name not in KNOWN:
        path = folder() / f"{name}.json"
        kept = _read(path)
        if kept is None:
            kept = measure(forward, rows)
            _write(path, {"key": key, "tokens": list(kept.tokens), "seconds": list(kept.seconds)})
        KNOWN[name] = kept
    return KNOWN[name]


def key_of(model: PreTrainedModel, rows: int, context: int, compile_mode: str) -> dict[str, Any]:
    """What a forward's time depends on besides its tokens; the context to the next power of two."""
    config = model.config.get_text_config(decoder=True)
    on_cpu = model.device.type == "cpu"
    return {
        "device": _cpu() if on_cpu else torch.cuda.get_device_name(model.device),
        "model": f"{type(model).__name__}, {config.num_hidden_layers} x {config.hidden_size}, {config.vocab_size}",
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "attention": config._attn_implementation,
        "compile": compile_mode,
        "torch": torch.__version__,
        "rows": rows,
        "context": 1 << max(context - 1, 1).bit_length(),
    }


def _cpu() -> str:
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} of {os.cpu_count()} threads"


def folder() -> Path:
    """Where the files are, one per key; they may be deleted at any time."""
    return cached_assets_path(library_name="hf_ddtree", namespace="verify_times", subfolder="v1")


def _read(path: Path) -> VerifyTimes | None:
    try:
        kept = json.loads(path.read_text())
        tokens, seconds = kept["tokens"], kept["seconds"]
        usable = (
            all(map(isfinite, seconds))
            and len(tokens) == len(seconds) > 1
            and tokens == sorted(set(tokens))
            and seconds == sorted(seconds)
        )
        return VerifyTimes(tokens, seconds) if usable and seconds[0] > 0 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, kept: dict[str, Any]) -> None:
    """Whole or not at all: another process may be writing the same."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".part", delete=False) as file:
            json.dump(kept, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.warning_once(
            f"Verify times can't be kept in {path.parent} ({error}); they are measured in each process."
        )
