"""Trains a DFlash drafter on a target's own text, by wall time, with checkpoints to resume from."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import get_logger, tqdm

from ..models.dflash import DFlashDraftModel
from .data import TargetFeatures
from .evaluation import held_acceptance, held_configs
from .objective import RestrictedHead, block_loss, build_batch, draft_hidden_states

logger = get_logger(__name__)


@dataclass(frozen=True)
class TrainingSettings:
    """How to train.

    Attributes:
        minutes: wall time, evaluation left out; the learning rate falls along a cosine to a hundredth by its end.
        rows, blocks: sequences per step, and anchors per sequence.
        learning_rate: peak, for matrices (Muon, update size matched to AdamW's) and vectors (AdamW) alike.
        distillation: share of the target's distribution in the training target; the rest is the text itself.
        decay: depths over which the loss weight falls by e.
        min_count: answer tokens rarer than this are left out of the loss's vocabulary.
        evaluate_minutes: time between evaluations, each followed by a checkpoint.
        seed: of the order of sequences and anchors.
    """

    minutes: float = 60.0
    rows: int = 12
    blocks: int = 32
    learning_rate: float = 1e-2
    distillation: float = 0.8
    decay: float = 4.0
    min_count: int = 2
    evaluate_minutes: float = 8.0
    seed: int = 0


class Trainer:
    """Training state: the drafter, its optimisers, the clock.

    Args:
        drafter: float32; trained in place under bfloat16 autocast.
        target: gives the embedding and the head, both frozen.
        train, held: features of the sequences to train on and to evaluate on (greedy answers).
        out: folder for the checkpoint and the log.
    """

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: PreTrainedModel,
        train: list[TargetFeatures],
        held: list[TargetFeatures],
        out: Path,
        settings: TrainingSettings,
    ):
        self.drafter, self.target, self.train, self.held = drafter, target, train, held
        self.out, self.settings = out, settings
        self.step, self.elapsed = 0, 0.0
        self.generator = torch.Generator().manual_seed(settings.seed)
        answers = [f.sequence.tokens[f.sequence.prompt_length :] for f in train]
        counts = torch.cat(answers).bincount(minlength=target.config.get_text_config().vocab_size)
        weight = target.get_output_embeddings().weight
        kept = (counts >= settings.min_count).nonzero()[:, 0]
        if len(kept) == 0:
            raise ValueError(f"No answer token occurs `min_count` {settings.min_count} times; give more data.")
        self.head = RestrictedHead(weight, kept)
        matrices = [p for p in drafter.parameters() if p.ndim == 2]
        vectors = [p for p in drafter.parameters() if p.ndim < 2]
        rate = settings.learning_rate
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(vectors, lr=rate, weight_decay=0.0),
        ]
        out.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """Trains until the time is up, evaluating and checkpointing on the way; the last checkpoint is the result."""
        seconds = self.settings.minutes * 60
        interval = self.settings.evaluate_minutes * 60
        due = interval * (self.elapsed // interval + 1)
        losses = []
        with tqdm(total=round(seconds), initial=round(self.elapsed), unit="s", desc="training") as bar:
            while self.elapsed < seconds:
                started = time.monotonic()
                losses.append(self.train_step())
                self.elapsed += time.monotonic() - started
                bar.n = min(round(self.elapsed), round(seconds))
                bar.set_postfix(step=self.step, loss=f"{sum(losses[-50:]) / len(losses[-50:]):.3f}")
                if self.elapsed >= min(due, seconds):
                    due += interval
                    self.evaluate(sum(losses) / len(losses))
                    self.save_checkpoint()
                    losses = losses[-50:]

    def train_step(self) -> float:
        """One optimiser step; returns the loss.

        Raises:
            FloatingPointError: the loss is not finite; the last checkpoint is untouched.
        """
        settings = self.settings
        warm = min(1.0, (self.step + 1) / 50)
        done = min(1.0, self.elapsed / (settings.minutes * 60))
        rate = settings.learning_rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate

        config = self.drafter.config
        features, anchors = self._draw()
        batch = build_batch(features, anchors, config.block_size, config.mask_token_id)
        with torch.autocast("cpu", torch.bfloat16):
            hidden = draft_hidden_states(self.drafter, self.target.get_input_embeddings(), batch)
        loss = block_loss(hidden, batch, self.head, settings.distillation, settings.decay)
        if not torch.isfinite(loss):
            raise FloatingPointError(
                f"The loss is {loss.item()} at step {self.step}; lower `learning_rate` ({settings.learning_rate}) and "
                f"run again, which goes on from the last checkpoint in {self.out}."
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def _draw(self) -> tuple[list[TargetFeatures], torch.Tensor]:
        """Random sequences, and random anchors [rows, blocks] among each one's answer tokens but the last."""
        rows = torch.randint(len(self.train), (self.settings.rows,), generator=self.generator)
        features = [self.train[row] for row in rows.tolist()]
        anchors = []
        for item in features:
            start, end = item.sequence.prompt_length, len(item.sequence.tokens) - 1
            anchors.append(torch.randint(min(start, end - 1), end, (self.settings.blocks,), generator=self.generator))
        return features, torch.stack(anchors)

    def evaluate(self, loss: float) -> dict[str, Any]:
        """Acceptance on held text, logged and appended to log.jsonl."""
        self.drafter.eval()
        with torch.autocast("cpu", torch.bfloat16):
            acceptance = held_acceptance(self.drafter, self.target, self.held, held_configs(self.drafter))
        self.drafter.train()
        rounded = {name: round(value, 3) for name, value in acceptance.items()}
        record = {"step": self.step, "minutes": round(self.elapsed / 60, 1), "loss": round(loss, 3), **rounded}
        with open(self.out / "log.jsonl", "a") as log:
            log.write(json.dumps(record) + "\n")
        logger.warning(f"held-out acceptance: {record}")
        return record

    def save_checkpoint(self) -> None:
        """Writes checkpoint.pt (everything needed to resume) and the drafter in bfloat16 as a Hub folder."""
        state = {
            "drafter": self.drafter.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
            "step": self.step,
            "elapsed": self.elapsed,
            "config": self._shape(),
        }
        partial = self.out / "checkpoint.pt.partial"
        torch.save(state, partial)
        partial.replace(self.out / "checkpoint.pt")
        half = DFlashDraftModel(self.drafter.config).bfloat16()
        half.load_state_dict(self.drafter.state_dict())
        half.save_pretrained(self.out)

    def _shape(self) -> dict[str, Any]:
        """What a checkpoint's drafter must have in common with ours."""
        names = ("num_hidden_layers", "hidden_size", "block_size", "mask_token_id", "target_layer_ids")
        return {name: getattr(self.drafter.config, name) for name in names}

    def resume(self) -> bool:
        """Continues from checkpoint.pt if there is one; true if so.

        Raises:
            ValueError: the checkpoint is of a drafter of another shape.
        """
        path = self.out / "checkpoint.pt"
        if not path.exists():
            return False
        state = torch.load(path, weights_only=True)
        for name, value in self._shape().items():
            if state["config"][name] != value:
                raise ValueError(
                    f"{path} is of a drafter with `{name}` {state['config'][name]}, not {value}; give the same "
                    "settings, another --out, or --no-resume to start over."
                )
        self.drafter.load_state_dict(state["drafter"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"])
        self.step, self.elapsed = state["step"], state["elapsed"]
        return True
