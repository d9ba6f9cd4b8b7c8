"""`hf-ddtree demo | generate | bench`, and the commands about drafters."""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .benchmark import race
from .benchmark.batch import bench_batch
from .benchmark.drafter import bench_drafter
from .benchmark.prompts import PROMPTS
from .benchmark.sampling import bench
from .cli_drafters import add_drafter_commands
from .configuration import DDTreeConfig
from .loading import load_dflash, load_drafter, load_target
from .models import DFlashDraftModel
from .models.smollm2 import load_smollm2
from .streaming import LEGEND, ColourStreamer
from .training.data import HELD_OUT, TokenSequence, split_held
from .training.sources import Limits, load_sequences

DEMO_DRAFTER = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-dflash"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    options.arguments = sys.argv[1:] if arguments is None else arguments
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return options.run(options)
    except KeyboardInterrupt:
        again = "; the same command goes on from what was saved" if options.command == "train" else ""
        print(f"\nhf-ddtree {options.command}: stopped{again}", file=sys.stderr)
        return 130
    except (ImportError, OSError, ValueError, RuntimeError, FloatingPointError, SafetensorError) as error:
        print(f"hf-ddtree {options.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="hf-ddtree", description="Lossless tree decoding for transformers.")
    commands = parser.add_subparsers(dest="command", required=True)

    demo = commands.add_parser("demo", help="SmolLM2-135M with the shipped drafter: stream, race, check")
    demo.add_argument("prompt", nargs="?", help="streamed in place of the first demo prompt")
    demo.set_defaults(run=_run_demo, no_race=False)

    generate = commands.add_parser("generate", help="the same for any model and drafter")
    generate.add_argument("prompt")
    generate.add_argument("--model", required=True, help="folder or Hub name of the target")
    generate.add_argument(
        "--drafter",
        required=True,
        help='folder or Hub name of its DFlash drafter or of a small model with the same tokenizer; or "lookup"',
    )
    generate.add_argument("--no-race", action="store_true", help="stream only")
    generate.add_argument("--device", default="auto", help="as accelerate's device_map takes it")
    generate.set_defaults(run=_run_generate)

    bench = commands.add_parser("bench", help="measure: tables, and JSON on the last line")
    bench.add_argument(
        "what",
        choices=["sampling", "drafter", "batch"],
        help="sampling: acceptance and speed by temperature; drafter: what its path-conditional parts are worth; "
        "batch: speed by batch size",
    )
    bench.add_argument("--model", default="smollm2", help="folder or Hub name of the target (smollm2, of the demo)")
    bench.add_argument("--drafter", default=str(DEMO_DRAFTER), help="folder or Hub name of its drafter (the demo's)")
    bench.add_argument(
        "--data",
        default=str(DEMO_DRAFTER / "selfgen.jsonl.gz"),
        help="training data, as `train` takes it, whose held-out prompts to use; of a drafter trained without --data "
        "or with --answer-with-target its training/text.jsonl",
    )
    bench.add_argument("--prompts", type=_positive, default=12, help="how many (12)")
    bench.add_argument("--temperatures", type=float, nargs="+", default=[0.3, 0.7, 1.0, 1.5], help="(0.3 0.7 1.0 1.5)")
    bench.add_argument("--scan", action="store_true", help="also scan draft_noise_scale and draft_temperature")
    bench.add_argument("--table", type=Path, help="drafter: a bigram table to measure too")
    bench.add_argument("--plot", type=Path, help="drafter: write a reliability plot here (.png)")
    bench.add_argument("--batches", type=_positive, nargs="+", default=[1, 2, 4, 8, 16], help="batch: (1 2 4 8 16)")
    bench.add_argument("--budgets", type=_positive, nargs="+", default=[4, 8, 16], help="batch: tree nodes (4 8 16)")
    bench.add_argument("--mixed", action="store_true", help="batch: different prompts in a batch, not one repeated")
    bench.add_argument("--json", type=Path, help="write the JSON here too")
    bench.set_defaults(run=_run_bench)

    for command in (demo, generate):
        command.add_argument("--temperature", type=float, default=0.0, help="sample at this temperature (0: greedy)")
        command.add_argument("--seed", type=int, help="seed of the streamed answer (drawn, and printed)")
    for command, budget, length, repeats in ((demo, 16, 128, 2), (generate, 16, 128, 2), (bench, 32, 96, 1)):
        command.add_argument("--budget", type=int, default=budget, help=f"tree nodes per round ({budget})")
        command.add_argument("--max-new-tokens", type=int, default=length, help=f"({length})")
        command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
        command.add_argument(
            "--repeats", type=_positive, default=repeats, help=f"timed runs per prompt and method ({repeats})"
        )

    add_drafter_commands(commands)
    return parser


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _run_demo(options: argparse.Namespace) -> int:
    if not DEMO_DRAFTER.exists():
        raise ValueError(f"the demo's drafter is not at {DEMO_DRAFTER}; run from a checkout, or use `generate`.")
    target, tokenizer = load_smollm2(getattr(torch, options.dtype))
    drafter = DFlashDraftModel.from_pretrained(DEMO_DRAFTER, dtype=target.dtype)
    return _show(target, tokenizer, drafter, [options.prompt or PROMPTS[0], *PROMPTS[1:]], options)


def _run_generate(options: argparse.Namespace) -> int:
    target, tokenizer = load_target(options.model, dtype=getattr(torch, options.dtype), device_map=options.device)
    drafter = load_drafter(options.drafter, target)
    return _show(target, tokenizer, drafter, [options.prompt], options)


def _run_bench(options: argparse.Namespace) -> int:
    target, tokenizer = load_target(options.model, dtype=getattr(torch, options.dtype), device_map="auto")
    drafter = load_dflash(options.drafter, target)
    if options.json is not None and not options.json.parent.is_dir():
        raise ValueError(f"`--json {options.json}` is in no folder there is; make it first.")
    held = _held_out(options, target, tokenizer)
    if options.what == "drafter":
        return bench_drafter(target, drafter, held, options)
    prompts = [sequence.tokens[: sequence.prompt_length] for sequence in held]
    return (bench_batch if options.what == "batch" else bench)(target, drafter, prompts, options)


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


def _show(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: PreTrainedModel | None,
    prompts: list[str],
    options: argparse.Namespace,
) -> int:
    """Streams the first prompt's answer, races the methods on all prompts, checks in float32; the exit status."""
    if options.seed is not None and not options.temperature:
        raise ValueError(f"`--seed {options.seed}` goes with sampling only; set `--temperature`, or leave it out.")
    dflash = drafter if isinstance(drafter, DFlashDraftModel) else None
    if options.temperature and not options.no_race and dflash is None:
        raise ValueError(
            f"`--temperature {options.temperature}` races methods of DFlash drafters; add `--no-race` to stream only."
        )
    inputs = [race.encode(tokenizer, prompt, target.device) for prompt in prompts]
    streamer = ColourStreamer(tokenizer, colour=sys.stdout.isatty())
    print(f"> {prompts[0]}" + (f"   ({LEGEND})" if streamer.colour else ""))
    _stream(target, drafter, inputs[0], streamer, options)
    if options.no_race:
        return 0
    if options.temperature and dflash is not None:
        options.temperatures, options.scan, options.json = [options.temperature], False, None
        return bench(target, dflash, [each["input_ids"][0] for each in inputs], options)
    _race(target, drafter, inputs, options)
    return _check_float32(target, drafter, inputs, options)


def _stream(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    prompt: dict[str, torch.Tensor],
    streamer: ColourStreamer,
    options: argparse.Namespace,
) -> None:
    sampling = {"temperature": options.temperature, "top_k": 0, "seed": options.seed} if options.temperature else {}
    config = DDTreeConfig(
        tree_budget=options.budget,
        max_new_tokens=options.max_new_tokens,
        do_sample=bool(sampling),
        return_dict_in_generate=True,
        drafter="lookup" if drafter is None else None,
        **sampling,
    )
    result = target.generate(
        **prompt,
        assistant_model=drafter,
        generation_config=config,
        streamer=streamer,
    )
    seed = f"; seed {result.seed}" if sampling else ""
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.stage_seconds.items())
    print(
        f"\n{result.rounds} target forwards for {sum(result.acceptance_lengths)} tokens; "
        f"{result.mean_acceptance_length:.2f} tokens a round{seed}; seconds: {stages}\n"
    )


def _race(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    inputs: list[dict[str, torch.Tensor]],
    options: argparse.Namespace,
) -> None:
    methods = race.contenders(drafter, sorted({8, 16, 32, options.budget}), options.max_new_tokens)
    runs = race.race(target, inputs, methods, options.repeats)
    rows = race.summary(runs)
    where = f"{torch.get_num_threads()} CPU threads" if target.device.type == "cpu" else str(target.device)
    print(f"greedy, {target.dtype}, {where}, up to {options.max_new_tokens} tokens, {len(inputs)} prompt(s):")
    print(race.table(rows))
    if isinstance(drafter, DFlashDraftModel):
        print(
            "(the library's chain slices a 3D tensor for the head; some CPUs copy the head's weight for it each round)"
        )
    for name, run in runs.items():
        for index, ids in run.ids.items():
            plain = runs[race.PLAIN].ids[index]
            difference = race.first_difference(target, inputs[index]["input_ids"], ids, plain)
            if difference is not None:
                print(
                    f"  {name}, prompt {index + 1}: differs from token {difference.position}, where the logits of the "
                    f"two candidates are {difference.gap:.3g} apart; rounding explains {difference.rounding:.3g}"
                )
    print(json.dumps(rows))


def _check_float32(
    target: PreTrainedModel,
    drafter: PreTrainedModel | None,
    inputs: list[dict[str, torch.Tensor]],
    options: argparse.Namespace,
) -> int:
    """Repeats DDTree and plain decoding in float32, where the texts must be the same; returns the exit status."""
    methods = race.contenders(drafter, [options.budget], options.max_new_tokens)
    methods = {name: methods[name] for name in (race.PLAIN, f"DDTree, budget {options.budget}")}
    with race.in_float32(target, drafter):
        row = race.summary(race.race(target, inputs, methods, repeats=1))[-1]
    same = row["identical"] == row["prompts"]
    verdict = "identical text" if same else "DIFFERENT TEXT, which is a bug"
    print(f"float32 check: {row['identical']} of {row['prompts']} prompts, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
