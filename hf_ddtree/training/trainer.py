"""Trains a DFlash drafter on a target's own text: steps, checkpoints, evaluation on held-out text."""

import math
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, tqdm

from ..models.dflash import DFlashDraftModel
from .checkpoint import load_checkpoint, run_identity, save_checkpoint
from .data import TargetFeatures
from .evaluation import held_acceptance, held_configs
from .features import FeatureStore
from .log import append_log, cut_log
from .objective import BlockLoss, RestrictedHead, build_batch, labels_after, row_weights
from .schedule import Schedule

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainingSettings:
    """How to train.

    Attributes:
        steps, minutes: how long; one of the two.
        rows, blocks: sequences per step, over all processes, and anchors per sequence.
        micro_batches: forwards per step and process; the update is that of one forward over all rows.
        learning_rate: peak, for matrices (Muon, update size matched to AdamW's) and vectors (AdamW) alike.
        distillation: share of the target's distribution in the labels; the rest is its most probable token.
        decay: depths over which the loss weight falls by e.
        with_parent: share of the positions below the first depth that are trained with the transition.
        min_count: answer tokens rarer than this are left out of the loss's vocabulary.
        evaluations: on held-out text, evenly spread over the run.
        save_seconds: of training between checkpoints.
        seed: of the order of sequences and anchors.
    """

    steps: int | None = None
    minutes: float | None = 60.0
    rows: int = 12
    blocks: int = 32
    micro_batches: int = 1
    learning_rate: float = 1e-2
    distillation: float = 0.5
    decay: float = 4.0
    with_parent: float = 0.6
    min_count: int = 2
    evaluations: int = 10
    save_seconds: float = 300.0
    seed: int = 0


@dataclass(frozen=True)
class TrainingData:
    """What to train on, and what to evaluate on: greedy answers of the target, if there are any."""

    train: FeatureStore
    held: list[TargetFeatures]


@dataclass(frozen=True)
class Step:
    """What a step trains on, the same in every process.

    Attributes:
        rows: [rows] indices of sequences. anchors: [rows, blocks]. with_parent: [rows, blocks, block_size - 1] bool.
        total_weight: of all its labels.
    """

    rows: list[int]
    anchors: torch.Tensor
    with_parent: torch.Tensor
    total_weight: float


class Trainer:
    """Training state: the drafter, its optimisers, the place in the schedule.

    Args:
        drafter: float32; trained in place, in the accelerator's precision.
        target: gives the embedding and the head, both frozen.
        data: sequences with their features.
        out: folder for checkpoint.pt and log.jsonl.
        settings: how.

    Raises:
        ValueError: the rows can't be shared out evenly, or the data is too small for the head.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: PreTrainedModel,
        data: TrainingData,
        out: Path,
        settings: TrainingSettings,
        accelerator: Accelerator | None = None,
    ):
        self.accelerator = accelerator or Accelerator()
        self.drafter, self.target, self.train, self.held = drafter, target, data.train, data.held
        self.out, self.settings = out, settings
        self.schedule = Schedule(settings.learning_rate, settings.steps, settings.minutes)
        self.generator = torch.Generator().manual_seed(settings.seed)
        self.losses: deque[float] = deque(maxlen=50)
        check_rows(settings.rows, self.accelerator.num_processes * settings.micro_batches)
        self.head = self._restricted_head()
        loss = BlockLoss(drafter, target.get_input_embeddings(), self.head, settings.distillation, settings.decay)
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim < 2]
        rate = settings.learning_rate
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0),
        ]
        self.loss = self.accelerator.prepare_model(loss)
        out.mkdir(parents=True, exist_ok=True)

    def _restricted_head(self) -> RestrictedHead:
        answers = torch.cat([sequence.tokens[sequence.prompt_length :] for sequence in self.train.sequences])
        vocab_size = self.target.get_output_embeddings().weight.shape[0]
        kept = (answers.bincount(minlength=vocab_size) >= self.settings.min_count).nonzero()[:, 0]
        if len(kept) == 0:
            raise ValueError(
                f"`--min-count` is {self.settings.min_count} and no answer token occurs as often; lower it, or give "
                "more data."
            )
        return RestrictedHead(self.target, kept)

    def run(self) -> None:
        """Trains to the end of the schedule, evaluating and saving on the way."""
        evaluations = self.settings.evaluations
        if self.accelerator.is_main_process:
            cut_log(self.out / "log.jsonl", self.schedule.step)
        saved = self.schedule.elapsed  # all processes have the same, so all save at the same step
        with tqdm(
            total=100.0, initial=round(100 * self.schedule.progress, 2), desc="training", bar_format=BAR_FORMAT
        ) as bar:
            while (before := self.schedule.progress) < 1:
                self.train_step()
                progress = self.schedule.progress
                bar.n = round(100 * progress, 2)
                bar.set_postfix(step=self.schedule.step, loss=f"{self.mean_loss:.3f}")
                due = int(progress * evaluations) > int(before * evaluations)
                if due or self.schedule.elapsed - saved > self.settings.save_seconds:
                    self._check_next_step()
                    if due:
                        self.evaluate()
                    self.save(final=progress >= 1)
                    saved = self.schedule.elapsed

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with this run."""
        return run_identity(self)

    @property
    def mean_loss(self) -> float:
        """Over the last 50 steps."""
        return sum(self.losses) / max(len(self.losses), 1)

    def train_step(self) -> float:
        """One optimiser step; returns the loss.

        Raises:
            FloatingPointError: the loss or its gradient is not finite; the last checkpoint is untouched.
        """
        started = time.monotonic()
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = self.schedule.learning_rate
        total = self._clipped_gradients()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.schedule.step += 1
        self.schedule.elapsed = self._agree(self.schedule.elapsed + time.monotonic() - started)
        self.losses.append(total)
        return total

    def _check_next_step(self) -> None:
        """Raises FloatingPointError where training can't go on: such weights must not replace a checkpoint's."""
        state = self.generator.get_state()
        self._clipped_gradients()
        self.generator.set_state(state)
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def _clipped_gradients(self) -> float:
        """Draws a step and puts its gradients in place; returns its loss."""
        step = self._draw()
        loss = torch.zeros((), device=self.accelerator.device)
        shares = torch.arange(len(step.rows)).chunk(self.accelerator.num_processes * self.settings.micro_batches)
        first = self.accelerator.process_index * self.settings.micro_batches
        mine = shares[first : first + self.settings.micro_batches]
        for number, share in enumerate(mine):
            last = number == len(mine) - 1
            with nullcontext() if last else self.accelerator.no_sync(self.loss):
                loss += self._backward(step, share)
        total = float(self.accelerator.reduce(loss, "sum"))
        norm = float(self.accelerator.clip_grad_norm_(self.drafter.parameters(), 1.0))
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise FloatingPointError(
                f"The loss is {total} at step {self.schedule.step}, the norm of its gradient {norm}; lower "
                f"`--learning-rate` ({self.settings.learning_rate}) and run again, which goes on from the last "
                f"checkpoint in {self.out}; if that went wrong too, --no-resume starts over."
            )
        return total

    def _backward(self, step: Step, share: torch.Tensor) -> torch.Tensor:
        """Gradients of some rows of a step; returns their part of the loss."""
        config = self.drafter.config
        features = self.train.get([step.rows[row] for row in share])
        batch = build_batch(features, step.anchors[share], config.block_size, config.mask_token_id)
        with_parent = step.with_parent[share].to(self.accelerator.device)
        loss = self.loss(batch.to(self.accelerator.device), with_parent, step.total_weight)
        self.accelerator.backward(loss * self.accelerator.num_processes)  # data parallelism takes the mean
        return loss.detach()

    def _draw(self) -> Step:
        """Random sequences, random anchors among each one's answer tokens but the last, and who sees its parent."""
        settings, block_size = self.settings, self.drafter.config.block_size
        rows = torch.randint(len(self.train), (settings.rows,), generator=self.generator).tolist()
        sequences = [self.train.sequences[row] for row in rows]
        anchors = []
        for sequence in sequences:
            start, end = sequence.prompt_length, len(sequence.tokens) - 1
            anchors.append(torch.randint(min(start, end - 1), end, (settings.blocks,), generator=self.generator))
        chance = torch.rand(settings.rows, settings.blocks, block_size - 1, generator=self.generator)
        tokens = torch.nn.utils.rnn.pad_sequence([s.tokens for s in sequences], batch_first=True, padding_value=-100)
        columns = self.head.columns(labels_after(tokens, torch.stack(anchors), block_size))
        weight = float(row_weights(columns, settings.decay).sum())
        return Step(rows, torch.stack(anchors), chance < settings.with_parent, max(weight, 1e-9))

    def _agree(self, seconds: float) -> float:
        """The first process's clock, so that all keep to one schedule."""
        return broadcast_object_list([seconds])[0] if self.accelerator.num_processes > 1 else seconds

    def evaluate(self) -> dict[str, Any]:
        """Acceptance on held text, logged and appended to log.jsonl, by the first process."""
        record: dict[str, Any] = {}
        if self.accelerator.is_main_process:
            self.drafter.eval()
            with self.accelerator.autocast():
                acceptance = held_acceptance(self.drafter, self.target, self.held, held_configs(self.drafter))
            self.drafter.train()
            record = {
                "step": self.schedule.step,
                "minutes": round(self.schedule.elapsed / 60, 1),
                "loss": round(self.mean_loss, 3),
                **{name: round(value, 3) for name, value in acceptance.items()},
            }
            append_log(self.out / "log.jsonl", record)
            logger.warning(f"held-out tokens per round: {record}")
        self.accelerator.wait_for_everyone()
        return record

    def save(self, final: bool = False) -> None:
        """Writes checkpoint.pt, from which `resume` goes on exactly.

        Raises:
            OSError: there was no room, and `final`: before the end the run goes on with a warning.
        """
        if self.accelerator.is_main_process:
            try:
                save_checkpoint(self.out / "checkpoint.pt", self)
            except OSError as error:
                if final:
                    raise
                logger.warning(f"{error} Training goes on; the last checkpoint is kept.")
        self.accelerator.wait_for_everyone()

    def resume(self) -> bool:
        """Continues from checkpoint.pt if there is one; true if so.

        Raises:
            ValueError: the checkpoint is of another target, text, drafter or run, or can't be read.
        """
        path = self.out / "checkpoint.pt"
        if path.exists():
            load_checkpoint(path, self)
        return path.exists()


def check_rows(rows: int, shares: int) -> None:
    """Raises ValueError where `rows` can't be shared out evenly."""
    if rows % shares:
        raise ValueError(f"`--rows` is {rows}, no multiple of {shares}, processes times `--accumulate`; make it one.")


BAR_FORMAT = "{desc}: {percentage:.0f}%|{bar}| [{elapsed}<{remaining}{postfix}]"
