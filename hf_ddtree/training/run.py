"""`hf-ddtree train`: from a target and its text to a drafter folder."""

import argparse

import torch
from transformers import AutoModelForCausalLM

from ..models.smollm2 import smollm2_path
from .data import compute_features, read_sequences
from .initialise import drafter_from_target
from .trainer import Trainer, TrainingSettings


def train_drafter(options: argparse.Namespace) -> None:
    """Trains as the command line says; resumes from a checkpoint in `--out` unless told not to.

    Raises:
        ValueError: the data holds too little, or the layers asked for do not fit the target.
    """
    folder = smollm2_path() if options.model == "smollm2" else options.model
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    train, held = read_sequences(options.data)
    torch.manual_seed(0)
    drafter = drafter_from_target(
        target, options.layers, options.block_size, options.mask_token_id, options.target_layer_ids
    )
    taps = drafter.config.target_layer_ids
    usable = [s for s in train if s.answer_length >= 2 and int(s.tokens.max()) < target.config.vocab_size]
    if not usable:
        raise ValueError(f"`--data {options.data}` holds no answer of two tokens or more of this target's vocabulary.")
    train_features = compute_features(target, usable, taps)
    held_features = compute_features(target, [s for s in held if s.temperature is None][:48], taps)
    rate = {} if options.learning_rate is None else {"learning_rate": options.learning_rate}
    settings = TrainingSettings(minutes=options.minutes, **rate)
    trainer = Trainer(drafter, target, train_features, held_features, options.out, settings)
    if not options.no_resume and trainer.resume():
        print(f"resumed at step {trainer.step}, {trainer.elapsed / 60:.1f} minutes")
    trainer.run()
