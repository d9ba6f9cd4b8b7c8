"""`hf-ddtree demo | generate | train`."""

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .benchmark import race
from .benchmark.prompts import PROMPTS
from .configuration import DDTreeConfig
from .models import DFlashDraftModel
from .models.smollm2 import load_smollm2
from .streaming import LEGEND, ColourStreamer

DEMO_DRAFTER = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-dflash"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    options = _parser().parse_args(arguments)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return options.run(options)
    except (ImportError, OSError, ValueError, RuntimeError, FloatingPointError) as error:
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
    generate.add_argument("--drafter", required=True, help="folder or Hub name of its DFlash drafter")
    generate.add_argument("--no-race", action="store_true", help="stream only")
    generate.add_argument("--device", default="auto", help="as accelerate's device_map takes it")
    generate.set_defaults(run=_run_generate)

    for command in (demo, generate):
        command.add_argument("--budget", type=int, default=16, help="tree nodes per round (16)")
        command.add_argument("--max-new-tokens", type=int, default=128)
        command.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
        command.add_argument("--repeats", type=_positive, default=2, help="timed runs per prompt and method (2)")

    train = commands.add_parser("train", help="train a drafter on a target's own text")
    train.add_argument("--model", required=True, help="target: a folder, a Hub name, or `smollm2`")
    train.add_argument(
        "--data", required=True, type=Path, help='JSON lines, .gz or not: {"p": prompt ids, "g": answer ids, "t": T}'
    )
    train.add_argument("--out", required=True, type=Path, help="folder for the drafter, checkpoint.pt and log.jsonl")
    train.add_argument(
        "--minutes", type=float, default=60.0, help="of training steps; features and evaluation come on top"
    )
    train.add_argument("--layers", type=int, default=4)
    train.add_argument("--block-size", type=int, default=8)
    train.add_argument("--mask-token-id", type=int, required=True, help="a token that text does not use")
    train.add_argument(
        "--target-layer-ids",
        type=int,
        nargs="+",
        help="layers whose outputs the drafter reads (default: 4, evenly spaced)",
    )
    train.add_argument("--learning-rate", type=float)
    train.add_argument("--no-resume", action="store_true", help="start over although --out holds a checkpoint")
    train.set_defaults(run=_run_train)
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
    dtype = getattr(torch, options.dtype)
    target = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype, device_map=options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    drafter = DFlashDraftModel.from_pretrained(options.drafter, dtype=dtype).to(target.device)
    return _show(target, tokenizer, drafter, [options.prompt], options)


def _run_train(options: argparse.Namespace) -> int:
    from .training.run import train_drafter

    transformers.logging.enable_progress_bar()
    train_drafter(options)
    return 0


def _show(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafter: DFlashDraftModel,
    prompts: list[str],
    options: argparse.Namespace,
) -> int:
    """Streams the first prompt's answer, races the methods on all prompts, checks in float32; the exit status."""
    inputs = [race.encode(tokenizer, prompt, target.device) for prompt in prompts]
    streamer = ColourStreamer(tokenizer, colour=sys.stdout.isatty())
    print(f"> {prompts[0]}" + (f"   ({LEGEND})" if streamer.colour else ""))
    _stream(target, drafter, inputs[0], streamer, options)
    if options.no_race:
        return 0
    _race(target, drafter, inputs, options)
    return _check_float32(target, drafter, inputs, options)


def _stream(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    prompt: dict[str, torch.Tensor],
    streamer: ColourStreamer,
    options: argparse.Namespace,
) -> None:
    config = DDTreeConfig(
        tree_budget=options.budget, max_new_tokens=options.max_new_tokens, do_sample=False, return_dict_in_generate=True
    )
    result = target.generate(
        **prompt,
        assistant_model=drafter,
        generation_config=config,
        streamer=streamer,
    )
    stages = ", ".join(f"{name} {seconds:.2f}" for name, seconds in result.stage_seconds.items())
    print(
        f"\n{result.rounds} target forwards for {sum(result.acceptance_lengths)} tokens; "
        f"{result.mean_acceptance_length:.2f} tokens a round; seconds: {stages}\n"
    )


def _race(
    target: PreTrainedModel,
    drafter: DFlashDraftModel,
    inputs: list[dict[str, torch.Tensor]],
    options: argparse.Namespace,
) -> None:
    methods = race.contenders(drafter, sorted({8, 16, 32, options.budget}), options.max_new_tokens)
    runs = race.race(target, inputs, methods, options.repeats)
    rows = race.summary(runs)
    where = f"{torch.get_num_threads()} CPU threads" if target.device.type == "cpu" else str(target.device)
    print(f"greedy, {target.dtype}, {where}, up to {options.max_new_tokens} tokens, {len(inputs)} prompt(s):")
    print(race.table(rows))
    print("(the library's chain slices a 3D tensor for the head; some CPUs copy the head's weight for that each round)")
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
    drafter: DFlashDraftModel,
    inputs: list[dict[str, torch.Tensor]],
    options: argparse.Namespace,
) -> int:
    """Repeats DDTree and plain decoding in float32, where the texts must be the same; returns the exit status."""
    target, drafter = target.float(), drafter.float()
    methods = race.contenders(drafter, [options.budget], options.max_new_tokens)
    methods = {name: methods[name] for name in (race.PLAIN, f"DDTree, budget {options.budget}")}
    row = race.summary(race.race(target, inputs, methods, repeats=1))[-1]
    same = row["identical"] == row["prompts"]
    verdict = "identical text" if same else "DIFFERENT TEXT, which is a bug"
    print(f"float32 check: {row['identical']} of {row['prompts']} prompts, {verdict}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
