"""`hf-ddtree demo | generate | bench`, and the commands about drafters."""

import argparse
import sys

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .benchmark.demonstration import check_float32, show_race
from .benchmark.prompts import PROMPTS
from .benchmark.race import encode
from .benchmark.sampling import bench
from .cli_bench import add_bench_commands, add_call_options, add_dtype, with_default_measure
from .cli_drafters import add_drafter_commands
from .compiled import MODES
from .configuration import DDTreeConfig
from .loading import DEMO_DRAFTER, load_drafter, load_target
from .models import DFlashDraftModel
from .models.smollm2 import load_smollm2
from .streaming import LEGEND, ColourStreamer


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    arguments = with_default_measure(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    options.arguments = arguments
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

    for command in (demo, generate):
        command.add_argument("--temperature", type=float, default=0.0, help="sample at this temperature (0: greedy)")
        command.add_argument("--seed", type=int, help="seed of the streamed answer (drawn, and printed)")
        command.add_argument("--budget", type=_budget, default="auto", help="tree nodes per round, or auto (auto)")
        command.add_argument("--compile", choices=MODES, default="auto", help="`DDTreeConfig(compile=...)` (auto)")
        add_call_options(command, 128, 2)
        add_dtype(command)

    add_bench_commands(commands)
    add_drafter_commands(commands)
    return parser


def _budget(text: str) -> int | str:
    return text if text == "auto" else int(text)


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
    inputs = [encode(tokenizer, prompt, target.device) for prompt in prompts]
    streamer = ColourStreamer(tokenizer, colour=sys.stdout.isatty())
    print(f"> {prompts[0]}" + (f"   ({LEGEND})" if streamer.colour else ""))
    _stream(target, drafter, inputs[0], streamer, options)
    if options.no_race:
        return 0
    if options.temperature and dflash is not None:
        options.temperatures, options.scan, options.json = [options.temperature], False, None
        return bench(target, dflash, [each["input_ids"][0] for each in inputs], options)
    show_race(target, drafter, inputs, options)
    return check_float32(target, drafter, inputs, options)


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
        compile=options.compile,
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


if __name__ == "__main__":
    sys.exit(main())
