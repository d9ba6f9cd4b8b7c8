"""The target's hidden states over a training set: on disk up to a limit, computed when asked for beyond it."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, tqdm

from .data import TargetFeatures, TokenSequence, batch_features

logger = get_logger(__name__)

SHARD_BYTES = 2**28
FILL_ROWS = 16  # sequences per target forward while filling


class FeatureStore:
    """Features of `sequences`, sorted by length; those of the first shards come from disk once `fill` has run.

    A fingerprint of sequences, taps and target decides whether the shards found in `folder` are ours.

    Args:
        target: every forward runs on it, in its dtype.
        target_layer_ids: layers whose outputs are the context.
        folder: of the shards; None = nothing is kept.
        limit_gb: how many 10^9 bytes of features may be kept; 0 = none.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        sequences: list[TokenSequence],
        target_layer_ids: list[int],
        folder: Path | None,
        limit_gb: float,
    ):
        self.target, self.target_layer_ids, self.folder = target, target_layer_ids, folder
        self.sequences = sorted(sequences, key=lambda sequence: len(sequence.tokens))
        states = (len(target_layer_ids) + 1) * target.config.get_text_config().hidden_size
        self.token_bytes = states * target.dtype.itemsize
        self.shards = self._plan(limit_gb * 1e9) if folder is not None else []
        self._handles: dict[int, safe_open] = {}  # by shard
        self._shard_of = {index: number for number, shard in enumerate(self.shards) for index in shard}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def cached(self) -> int:
        """Sequences whose features are on disk."""
        return sum(len(self.shards[number]) for number in self._handles)

    def get(self, indices: list[int]) -> list[TargetFeatures]:
        """Features of `sequences[index]` each, in that order, on the target's device; the tokens stay where they are.

        What is not on disk is computed in one padded forward.
        """
        found = {index: self._load(index) for index in set(indices) if self._shard_of.get(index) in self._handles}
        missing = sorted(set(indices) - set(found))
        if missing:
            computed = batch_features(self.target, [self.sequences[i] for i in missing], self.target_layer_ids)
            found.update(zip(missing, computed, strict=True))
        return [found[index] for index in indices]

    def fill(self) -> None:
        """Computes the shards that are missing; a write that fails ends it with a warning, and nothing is lost."""
        if self.folder is None:
            return
        try:
            self._clear_folder(self.folder)
            for number in range(len(self.shards)):
                self._open(number)
            total = sum(len(shard) for shard in self.shards)
            with tqdm(total=total, initial=self.cached, desc="target features", unit="seq") as bar:
                for number in range(len(self.shards)):
                    if number not in self._handles:
                        self._write(number)
                        bar.update(len(self.shards[number]))
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            logger.warning(
                f"Features of {self.cached} of {len(self)} sequences are kept in {self.folder}; the rest could not be "
                f"written ({error}) and is computed in every step, which is slower. Lower --cache-gb or give an --out "
                "with more room to avoid that."
            )

    def _plan(self, limit: float) -> list[range]:
        """Consecutive sequences of about `SHARD_BYTES` each, up to `limit` bytes altogether.

        Boundaries do not depend on the limit, so that shards survive a change of it.
        """
        shards, start, size, total = [], 0, 0, 0.0
        for index, sequence in enumerate(self.sequences):
            size += len(sequence.tokens) * self.token_bytes
            if size >= SHARD_BYTES or index == len(self) - 1:
                total += size
                if total > limit:
                    break
                shards.append(range(start, index + 1))
                start, size = index + 1, 0
        return shards

    def _path(self, number: int) -> Path:
        assert self.folder is not None, "shards are planned with a folder only"
        return self.folder / f"shard-{number:05}.safetensors"

    def _open(self, number: int) -> None:
        """Maps a shard into memory, if it is there and whole."""
        path = self._path(number)
        if not path.exists():
            return
        try:
            self._handles[number] = safe_open(path, framework="pt")
        except SafetensorError as error:
            logger.warning(f"{path} is damaged ({error}) and is computed anew.")
            path.unlink()

    def _load(self, index: int) -> TargetFeatures:
        handle = self._handles[self._shard_of[index]]
        context, final = (handle.get_tensor(f"{name}.{index}").to(self.target.device) for name in ("context", "final"))
        return TargetFeatures(self.sequences[index], context, final)

    def _write(self, number: int) -> None:
        """Computes a shard and puts it in place whole, or not at all."""
        tensors = {}
        shard = self.shards[number]
        for start in range(0, len(shard), FILL_ROWS):
            rows = shard[start : start + FILL_ROWS]
            batch = [self.sequences[index] for index in rows]
            for index, item in zip(rows, batch_features(self.target, batch, self.target_layer_ids), strict=True):
                tensors[f"context.{index}"] = item.context.to("cpu", copy=True)
                tensors[f"final.{index}"] = item.final.to("cpu", copy=True)
        partial = self._path(number).with_suffix(f".{os.getpid()}.partial")
        try:
            save_file(tensors, partial)
            partial.replace(self._path(number))
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        self._open(number)

    def _clear_folder(self, folder: Path) -> None:
        """Leaves our fingerprint, and no shards of other sequences, taps or targets, nor beyond the limit."""
        ours = {
            "sequences": digest(sequence.tokens.numpy().tobytes() for sequence in self.sequences),
            "taps": self.target_layer_ids,
            "target": target_digest(self.target),
            "shard_bytes": SHARD_BYTES,
        }
        folder.mkdir(parents=True, exist_ok=True)
        fingerprint = folder / "fingerprint.json"
        theirs = read_json(fingerprint)
        found = list(folder.glob("shard-*.safetensors"))
        wanted = {self._path(number) for number in range(len(self.shards))} if theirs == ours else set()
        if found and theirs != ours:
            changed = ", ".join(name for name in ours if theirs.get(name) != ours[name])
            logger.warning(f"The features in {folder} are of another {changed}; they are computed anew.")
        for path in [*(set(found) - wanted), *folder.glob("shard-*.partial")]:
            path.unlink(missing_ok=True)
        if theirs != ours:  # left alone otherwise: other processes may be reading it
            fingerprint.write_text(json.dumps(ours))


def read_json(path: Path) -> dict[str, Any]:
    """What `path` holds; nothing if it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}


def target_digest(target: PreTrainedModel) -> str:
    """Names a target by its configuration, its dtype and 16 values of every weight."""
    config = target.config.to_dict()
    for name in ("_name_or_path", "transformers_version"):  # the same weights elsewhere are the same target
        config.pop(name, None)

    def parts() -> Iterator[bytes]:
        yield json.dumps(config, sort_keys=True, default=str).encode()
        for name, weight in target.named_parameters():
            values = weight.detach().flatten()
            some = values[:: max(1, values.numel() // 16)][:16].float()
            yield f"{name} {weight.dtype}".encode() + some.cpu().numpy().tobytes()

    return digest(parts())


def digest(parts: Iterator[bytes]) -> str:
    """One name for all of `parts`."""
    total = hashlib.sha256()
    for part in parts:
        total.update(hashlib.sha256(part).digest())  # of each part, so that boundaries count
    return total.hexdigest()
