"""The commands about drafters: `hf-ddtree train | table | inspect | export`."""

import argparse
from pathlib import Path
from typing import Any

import transformers
from transformers import AutoConfig, AutoTokenizer

from .interchange import LAYOUTS, describe, export_drafter
from .loading import model_name


def add_drafter_commands(commands: Any) -> None:
    """Adds the four to the command line's subparsers."""
    train = commands.add_parser("train", help="train a drafter on a target's own text; goes on where it was stopped")
    train.add_argument("--model", required=True, help="target: a folder, a Hub name, or `smollm2`")
    train.add_argument("--out", required=True, type=Path, help="folder for the drafter, and `training/` for the rest")
    _add_text_options(train)
    _add_shape_options(train)
    _add_run_options(train)
    train.set_defaults(run=_run_train)

    table = commands.add_parser("table", help="make a bigram table: path-conditional trees with any drafter")
    table.add_argument(
        "--model", required=True, help="target: a folder, a Hub name, or `smollm2`; its tokens are counted"
    )
    table.add_argument("--data", required=True, help="text, as `train` takes it; every 20th sequence is left out")
    table.add_argument("--out", required=True, type=Path, help="the .safetensors file to write")
    table.add_argument("--max-length", type=int, default=2048, help="tokens of a sequence; the rest is cut off (2048)")
    table.set_defaults(run=_run_table)

    inspect = commands.add_parser("inspect", help="say what a drafter is, and which target it fits")
    inspect.add_argument("drafter", help="folder or Hub name")
    inspect.add_argument("--model", help="check it against this target")
    inspect.set_defaults(run=_run_inspect)

    export = commands.add_parser("export", help="write a drafter for another engine, without its transition")
    export.add_argument("drafter", help="folder or Hub name")
    export.add_argument("out", type=Path, help="folder to write")
    export.add_argument("--layout", required=True, choices=LAYOUTS)
    export.add_argument("--model", help="the target's name, which a speculators checkpoint carries")
    export.set_defaults(run=_run_export)


def _add_text_options(train: argparse.ArgumentParser) -> None:
    train.add_argument(
        "--data",
        help="file, folder or Hub dataset with chats, prompts and answers, or text; left out: the target writes",
    )
    train.add_argument("--answer-with-target", action="store_true", help="take the prompts of --data only")
    train.add_argument("--sequences", type=int, help="at most so many of --data, or to write (4000)")
    train.add_argument("--answer-tokens", type=int, default=256, help="longest answer that the target writes (256)")
    train.add_argument("--batch-size", type=int, default=32, help="answers written at once (32)")
    train.add_argument("--max-length", type=int, default=2048, help="tokens of a sequence; the rest is cut off (2048)")
    train.add_argument("--cache-gb", type=float, default=10.0, help="of target features to keep in --out (10; 0: none)")


def _add_shape_options(train: argparse.ArgumentParser) -> None:
    train.add_argument("--start-from", help="go on with this drafter, folder or Hub name, in place of a new one")
    train.add_argument("--layers", type=int, help="of the drafter (4)")
    train.add_argument("--block-size", type=int, help="tokens drafted at once, and one more (8)")
    train.add_argument(
        "--mask-token-id", type=int, help="a token that text does not use (a special one, else the rarest)"
    )
    train.add_argument(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="layers whose outputs the drafter reads (up to 4, evenly spaced below the target's last --layers)",
    )
    train.add_argument(
        "--transition-rank",
        type=int,
        help="of the path-conditional transition (that of --start-from, else 256; 0: none)",
    )


def _add_run_options(train: argparse.ArgumentParser) -> None:
    length = train.add_mutually_exclusive_group()
    length.add_argument("--minutes", type=float, help="of training steps; all else comes on top (60)")
    length.add_argument("--steps", type=int, help="in place of minutes")
    train.add_argument("--rows", type=int, default=12, help="sequences per step, over all processes (12)")
    train.add_argument("--blocks", type=int, default=32, help="blocks per sequence (32)")
    train.add_argument("--accumulate", type=int, default=1, help="forwards per step and process (1)")
    train.add_argument("--learning-rate", type=float, help="peak (0.01)")
    train.add_argument("--min-count", type=int, default=2, help="rarer answer tokens are not learned (2)")
    train.add_argument(
        "--dtype", default="bfloat16", choices=["bfloat16", "float32"], help="of the target and the forwards"
    )
    train.add_argument("--cpu", action="store_true", help="leave an accelerator alone")
    train.add_argument("--seed", type=int, default=0)
    train.add_argument("--no-resume", action="store_true", help="start over although --out holds a checkpoint")


def _run_train(options: argparse.Namespace) -> int:
    from .training.run import train_drafter

    transformers.logging.enable_progress_bar()
    train_drafter(options)
    return 0


def _run_table(options: argparse.Namespace) -> int:
    from .training.bigrams import count_bigrams, save_table
    from .training.data import HELD_OUT, split_held
    from .training.sources import Limits, load_sequences

    if options.out.is_dir():
        raise ValueError(f"`--out {options.out}` is a folder; give the .safetensors file to write.")
    folder = model_name(options.model)
    vocab_size = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).vocab_size
    limits = Limits(vocab_size, options.max_length)
    train, held = split_held(load_sequences(options.data, AutoTokenizer.from_pretrained(folder), limits))
    if not train:
        raise ValueError(
            f"`--data {options.data}` has {len(held)} usable rows, all of those held out ({HELD_OUT}); give more of it."
        )
    table = count_bigrams((sequence.tokens for sequence in train), vocab_size)
    save_table(table, options.out)
    size = options.out.stat().st_size / 1e6
    print(f"{options.out}: {len(table.keys):,} pairs of {len(train):,} sequences, {size:.1f} MB")
    return 0


def _run_inspect(options: argparse.Namespace) -> int:
    target = None if options.model is None else AutoConfig.from_pretrained(model_name(options.model))
    print(describe(options.drafter, target))
    return 0


def _run_export(options: argparse.Namespace) -> int:
    export_drafter(options.drafter, options.out, options.layout, options.model)
    print(f"{options.out}: written in the {options.layout} layout")
    return 0
