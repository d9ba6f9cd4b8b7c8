"""checkpoint.pt: everything that a run needs to go on exactly where it was."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .trainer import Trainer

# What a checkpoint's drafter must have in common with the run's.
SHAPE = (
    *("num_hidden_layers", "hidden_size", "block_size", "mask_token_id", "target_layer_ids", "transition_rank"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
)
# Settings that may change between the parts of a run: how long it is, how fast it learns, what it prints.
FREE_SETTINGS = ("steps", "minutes", "learning_rate", "evaluations", "save_seconds", "micro_batches")


def save_checkpoint(path: Path, trainer: Trainer) -> None:
    """Writes beside the old checkpoint, then replaces it.

    Raises:
        OSError: no room; the old checkpoint is as it was.
    """
    partial = path.with_suffix(".partial")
    state = {
        "drafter": trainer.drafter.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "generator": trainer.generator.get_state(),
        "step": trainer.schedule.step,
        "elapsed": trainer.schedule.elapsed,
        "losses": list(trainer.losses),
        "shape": _shape(trainer),
        "settings": _settings(trainer),
    }
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except (OSError, RuntimeError) as error:  # torch's writer reports a full disk as RuntimeError
        partial.unlink(missing_ok=True)
        raise OSError(f"The checkpoint could not be written to {path} ({error}); make room there.") from error


def load_checkpoint(path: Path, trainer: Trainer) -> None:
    """Puts a trainer where the checkpoint was made.

    Raises:
        ValueError: the file is broken, or of another drafter or another run.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        saved = {**state["shape"], **state["settings"]}
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint of this trainer ({error!r}); remove it or give --no-resume."
        ) from error
    for name, value in {**_shape(trainer), **_settings(trainer)}.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} is of a run with `{name}` {saved.get(name)}, not {value}; give the same settings, another "
                "--out, or --no-resume to start over."
            )
    trainer.drafter.load_state_dict(state["drafter"])
    for optimizer, each in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(each)
    trainer.generator.set_state(state["generator"])
    trainer.schedule.step, trainer.schedule.elapsed = state["step"], state["elapsed"]
    trainer.losses.extend(state["losses"])


def _shape(trainer: Trainer) -> dict[str, Any]:
    return {name: getattr(trainer.drafter.config, name) for name in SHAPE}


def _settings(trainer: Trainer) -> dict[str, Any]:
    """The settings that decide what a step does, and the data."""
    settings = {name: value for name, value in asdict(trainer.settings).items() if name not in FREE_SETTINGS}
    return {**settings, "sequences": len(trainer.train)}
