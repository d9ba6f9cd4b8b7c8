"""checkpoint.pt: everything that a run needs to go on exactly where it was."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .features import digest, target_digest

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from .trainer import Trainer, TrainingSettings

# What a checkpoint's drafter must have in common with the run's.
SHAPE = (
    *("num_hidden_layers", "hidden_size", "block_size", "mask_token_id", "target_layer_ids", "transition_rank"),
    *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
)
# Settings that may change between the parts of a run: how long it is, how fast it learns, what it prints.
FREE_SETTINGS = ("steps", "minutes", "learning_rate", "evaluations", "save_seconds", "micro_batches")
# Parts of a run by the options that they come from.
OPTIONS = {
    "num_hidden_layers": "--layers",
    **{name: f"--{name.replace('_', '-')}" for name in ("sequences", "rows", "blocks", "min_count", "seed")},
    **{name: f"--{name.replace('_', '-')}" for name in SHAPE[2:6]},
}


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
        "run": trainer.identity,
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
        ValueError: the file is broken, or of another target, text, drafter or run.
    """
    state = check_checkpoint(path, trainer.identity)
    trainer.drafter.load_state_dict(state["drafter"])
    for optimizer, each in zip(trainer.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(each)
    trainer.generator.set_state(state["generator"])
    trainer.schedule.step, trainer.schedule.elapsed = state["step"], state["elapsed"]
    trainer.losses.extend(state["losses"])


def check_checkpoint(path: Path, known: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's content.

    Args:
        known: what is known of the run that is to go on from it, as `run_identity` names it.

    Raises:
        ValueError: the file is broken, or differs in what is known.
    """
    try:
        state = torch.load(path, weights_only=True, map_location="cpu")
        saved = dict(state["run"])
    except Exception as error:
        raise ValueError(
            f"{path} is no checkpoint of this trainer ({error!r}); remove it or give --no-resume."
        ) from error
    for name, value in known.items():
        if saved.get(name) != value:
            raise ValueError(
                f"{path} is of a run with {_difference(name, saved.get(name), value)}; give the same, another --out, "
                "or --no-resume to start over."
            )
    return state


def known_identity(target: PreTrainedModel, settings: TrainingSettings) -> dict[str, Any]:
    """What of a run is known before there is text: its target, and the settings that decide what a step does."""
    kept = {name: value for name, value in asdict(settings).items() if name not in FREE_SETTINGS}
    return {"target": target_digest(target), **kept}


def run_identity(trainer: Trainer) -> dict[str, Any]:
    """All that must be the same for a run to be gone on with: causes before what follows from them."""
    text = digest(f"{s.prompt_length} {s.tokens.tolist()}".encode() for s in trainer.train.sequences)
    shape = {name: getattr(trainer.drafter.config, name) for name in SHAPE}
    known = known_identity(trainer.target, trainer.settings)
    return {**known, "sequences": len(trainer.train), "text": text, **shape}


def _difference(name: str, saved: Any, value: Any) -> str:
    if name == "target":
        return "another target (`--model`, `--dtype`)"
    if name == "text":
        return "another text (`--data`, or what it is cut and written by)"
    if name == "sequences":
        return f"{saved} sequences to train on, not {value} (`--sequences`, `--data`)"
    return f"`{OPTIONS.get(name, name)}` {saved}, not {value}"
