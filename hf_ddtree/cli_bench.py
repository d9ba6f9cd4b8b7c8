"""The measurements: `hf-ddtree bench race | sampling | drafter | batch | build | rounds`."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .benchmark.batch import bench_batch
from .benchmark.building import bench_build
from .benchmark.drafter import bench_drafter
from .benchmark.harness import bench_race, check_options
from .benchmark.prompt_sets import SETS, SHIPPED
from .benchmark.rounds import bench_rounds
from .benchmark.sampling import bench
from .benchmark.shapes import SHAPES
from .compiled import MODES
from .loading import DEMO_DRAFTER, load_assistant, load_dflash, load_drafter, load_target
from .training.data import HELD_OUT, TokenSequence, split_held
from .training.sources import Limits, load_sequences


def add_bench_commands(commands: Any) -> None:
    """Adds `bench` and what it measures to the command line's subparsers."""
    bench = commands.add_parser("bench", help="measure: tables, and JSON on the last line; without more, `bench race`")
    measures = bench.add_subparsers(dest="what", required=True)
    _add_race(measures)
    _add_sampling(measures)
    _add_drafter(measures)
    _add_batch(measures)
    _add_build(measures)
    _add_rounds(measures)


def with_default_measure(arguments: list[str]) -> list[str]:
    """`bench` and options alone mean `bench race`."""
    if arguments[:1] != ["bench"] or set(arguments[1:2]) & {"-h", "--help"}:
        return arguments
    return arguments if len(arguments) > 1 and not arguments[1].startswith("-") else ["bench", "race", *arguments[1:]]


def positive(text: str) -> int:
    """An argument that must be an integer of at least 1."""
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def add_call_options(command: argparse.ArgumentParser, max_new_tokens: int, repeats: int) -> None:
    """Length and number of the timed calls."""
    command.add_argument("--max-new-tokens", type=int, default=max_new_tokens, help=f"({max_new_tokens})")
    command.add_argument(
        "--repeats", type=positive, default=repeats, help=f"timed runs per prompt and method ({repeats})"
    )


def add_dtype(command: argparse.ArgumentParser) -> None:
    """Of the models."""
    command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])


def _add_race(measures: Any) -> None:
    race = measures.add_parser("race", help="all methods against each other, on the same prompts")
    _add_models(race, "a DFlash drafter, a small model with the same tokenizer, or `lookup`")
    race.add_argument("--assistant", help="folder or Hub name of a causal LM for transformers' assisted decoding")
    race.add_argument("--device", default="auto", help="as accelerate's device_map takes it")
    race.add_argument("--prompts", type=positive, default=8, help="how many (8)")
    race.add_argument(
        "--prompts-from",
        default=SHIPPED,
        metavar="SET",
        help=f'{SHIPPED}, {", ".join(SETS)}, or a .jsonl file of {{"prompt": ...}}, or a folder of those ({SHIPPED})',
    )
    race.add_argument("--context", type=positive, help="lengthen prompts with text in front to about so many tokens")
    race.add_argument("--check", type=positive, default=4, help="prompts whose float32 texts are compared first (4)")
    add_call_options(race, 128, 1)
    race.add_argument(
        "--budgets", type=positive, nargs="+", default=[8, 16, 32, 64, 128, 256], help="(8 16 32 64 128 256)"
    )
    race.add_argument("--methods", nargs="+", metavar="PART", help="only those with one of these in their names")
    race.add_argument("--lookup", action="store_true", help="also DDTree with the drafter that needs no model")
    race.add_argument("--compiled", action="store_true", help="also plain decoding, compiled, with a static cache")
    race.add_argument("--compile", choices=MODES, help="`compile` of the trees' configs (auto)")
    race.add_argument("--reference", metavar="FOLDER", help="a checkout of another implementation to race")
    race.add_argument(
        "--reference-module",
        default="reference",
        help="its module with generate(target, drafter, input_ids, max_new_tokens=...) (reference)",
    )
    race.add_argument("--plot", type=Path, metavar="FOLDER", help="write figures here, as PNG and SVG")
    _add_json(race)
    add_dtype(race)
    race.set_defaults(run=_run_race)


def _add_sampling(measures: Any) -> None:
    sampling = measures.add_parser("sampling", help="acceptance and speed by temperature")
    _add_models(sampling)
    _add_held_out(sampling)
    sampling.add_argument(
        "--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5], help="(0.3 0.7 1.0 1.5)"
    )
    sampling.add_argument("--scan", action="store_true", help="also scan draft_noise_scale and draft_temperature")
    sampling.add_argument("--budget", type=int, default=32, help="tree nodes per round (32)")
    add_call_options(sampling, 96, 1)
    _add_json(sampling)
    add_dtype(sampling)
    sampling.set_defaults(run=_run_held_out)


def _add_drafter(measures: Any) -> None:
    drafter = measures.add_parser("drafter", help="what a drafter's path-conditional parts are worth")
    _add_models(drafter)
    _add_held_out(drafter)
    drafter.add_argument("--table", type=Path, help="a bigram table to measure too")
    drafter.add_argument("--plot", type=Path, help="write a reliability plot here (.png)")
    _add_json(drafter)
    add_dtype(drafter)
    drafter.set_defaults(run=_run_held_out)


def _add_batch(measures: Any) -> None:
    batch = measures.add_parser("batch", help="speed by batch size")
    _add_models(batch)
    _add_held_out(batch)
    batch.add_argument("--batches", type=positive, nargs="+", default=[1, 2, 4, 8, 16], help="(1 2 4 8 16)")
    batch.add_argument("--budgets", type=positive, nargs="+", default=[4, 8, 16], help="tree nodes (4 8 16)")
    batch.add_argument("--mixed", action="store_true", help="different prompts in a batch, not one repeated")
    add_call_options(batch, 96, 1)
    _add_json(batch)
    add_dtype(batch)
    batch.set_defaults(run=_run_held_out)


def _add_build(measures: Any) -> None:
    build = measures.add_parser("build", help="the time to build trees, by builder; needs no model")
    build.add_argument("--budgets", type=positive, nargs="+", default=[16, 64, 256], help="tree nodes (16 64 256)")
    build.add_argument("--depths", type=positive, nargs="+", default=[7, 15], help="of the draft (7 15)")
    build.add_argument("--batches", type=positive, nargs="+", default=[1, 8], help="rows (1 8)")
    build.add_argument("--vocabulary", type=positive, default=49152, help="tokens (49152)")
    build.add_argument("--repeats", type=positive, default=20, help="timed runs of each (20)")
    build.add_argument("--device", default="cpu", help="as torch names it (cpu)")
    _add_json(build)
    add_dtype(build)
    build.set_defaults(run=_run_build)


def _add_rounds(measures: Any) -> None:
    rounds = measures.add_parser("rounds", help="where a round's time goes, on random weights; with graphs and without")
    rounds.add_argument("--shape", default="qwen3-8b", choices=SHAPES, help="of target and drafter (qwen3-8b)")
    rounds.add_argument("--device", default="cuda", help="as torch names it (cuda)")
    rounds.add_argument("--acceptance", type=float, default=4.0, help="tokens a round that the oracle gives (4)")
    rounds.add_argument("--budget", type=positive, default=32, help="tree nodes per round (32)")
    rounds.add_argument("--context", type=positive, default=512, help="tokens of the prompt (512)")
    rounds.add_argument("--rounds", type=positive, default=60, help="per call, about (60)")
    _add_json(rounds)
    rounds.set_defaults(run=bench_rounds)


def _add_models(measure: argparse.ArgumentParser, drafters: str = "") -> None:
    measure.add_argument("--model", default="smollm2", help="folder or Hub name of the target (smollm2, of the demo)")
    drafters = f": {drafters}" if drafters else ""
    measure.add_argument(
        "--drafter", default=str(DEMO_DRAFTER), help=f"folder or Hub name of its drafter (the demo's){drafters}"
    )


def _add_held_out(measure: argparse.ArgumentParser) -> None:
    measure.add_argument(
        "--data",
        default=str(DEMO_DRAFTER / "selfgen.jsonl.gz"),
        help="training data, as `train` takes it, whose held-out prompts to use; of a drafter trained without --data "
        "or with --answer-with-target its training/text.jsonl",
    )
    measure.add_argument("--prompts", type=positive, default=12, help="how many (12)")


def _add_json(measure: argparse.ArgumentParser) -> None:
    measure.add_argument("--json", type=Path, help="write the JSON here too")


def _run_race(options: argparse.Namespace) -> int:
    check_options(options)
    target, tokenizer = load_target(options.model, dtype=getattr(torch, options.dtype), device_map=options.device)
    drafter = load_drafter(options.drafter, target)
    assistant = None if options.assistant is None else load_assistant(options.assistant, target)
    return bench_race((target, drafter, assistant), tokenizer, options)


def _run_held_out(options: argparse.Namespace) -> int:
    check_options(options)
    target, tokenizer = load_target(options.model, dtype=getattr(torch, options.dtype), device_map="auto")
    drafter = load_dflash(options.drafter, target)
    held = _held_out(options, target, tokenizer)
    if options.what == "drafter":
        return bench_drafter(target, drafter, held, options)
    prompts = [sequence.tokens[: sequence.prompt_length] for sequence in held]
    return (bench_batch if options.what == "batch" else bench)(target, drafter, prompts, options)


def _run_build(options: argparse.Namespace) -> int:
    check_options(options)
    return bench_build(options)


def _held_out(
    options: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> list[TokenSequence]:
    """Sequences of `--data` that training keeps out; for `bench drafter` greedy answers of the target."""
    limits = Limits(target.config.get_text_config(decoder=True).vocab_size)
    _, held = split_held(load_sequences(options.data, tokenizer, limits))
    greedy = options.what == "drafter"
    texts = [sequence for sequence in held if sequence.greedy or not greedy]
    if not texts:
        kind = "greedy answer of the target" if greedy else "usable row"
        raise ValueError(
            f"`--data {options.data}` has no {kind} among the rows held out ({HELD_OUT}); give more of it, or what the "
            "target wrote, which `train` leaves in training/text.jsonl."
        )
    return texts[: options.prompts]
