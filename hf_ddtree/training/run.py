"""`hf-ddtree train`: from a target to a drafter folder."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar, get_logger

from ..configuration import DDTreeConfig
from ..interchange import read_config
from ..loading import load_target
from ..models.dflash import DFlashDraftModel
from .calibration import fit_depth_temperatures
from .card import write_card
from .checkpoint import check_checkpoint, known_identity
from .data import HELD_EVERY, HELD_OUT, TargetFeatures, TokenSequence, compute_features, read_lines, split_held
from .evaluation import held_acceptance, held_configs
from .features import FeatureStore
from .initialise import choose_mask_token, drafter_from_checkpoint, drafter_from_target
from .selfgen import TextSettings, generate_text
from .sources import Limits, load_prompts, load_sequences
from .trainer import Trainer, TrainingData, TrainingSettings, check_rows

try:
    import fcntl
except ImportError:  # not on Windows, where nothing keeps two runs apart
    fcntl = None  # type: ignore[assignment]

logger = get_logger(__name__)

LAYERS, BLOCK_SIZE, TRANSITION_RANK = 4, 8, 256
POSITIVE = (
    *("rows", "blocks", "accumulate", "learning_rate", "min_count"),
    *("sequences", "answer_tokens", "batch_size", "max_length"),
)
HELD_SEQUENCES = 48  # evaluated on, at most
PATIENCE = timedelta(days=1)  # of processes that wait for the first to write text, or to calibrate


@dataclass(frozen=True)
class Workplace:
    """Where a run keeps its things: the Hub folder, and in it what only training needs."""

    out: Path

    @property
    def training(self) -> Path:
        """Checkpoint, log, text and features."""
        return self.out / "training"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keeps other runs out; the kernel lets go when the process ends, however it ends."""
        self.training.mkdir(parents=True, exist_ok=True)
        with open(self.training / "lock", "w") as file:
            try:
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ValueError(
                    f"`--out {self.out}` belongs to another run that is going on; wait for its end, or give another "
                    "folder."
                ) from error
            except OSError as error:
                logger.warning(f"{self.training} can't be locked ({error}); let no second run write there.")
            yield


def train_drafter(options: argparse.Namespace) -> None:
    """Gets text, trains, calibrates, and writes the Hub folder; every part goes on where a killed run was.

    Raises:
        ValueError: the data, the shapes or the schedule do not fit.
        FloatingPointError: the loss went wrong.
    """
    accelerator = Accelerator(
        mixed_precision="bf16" if options.dtype == "bfloat16" else "no",
        cpu=options.cpu,
        kwargs_handlers=[InitProcessGroupKwargs(timeout=PATIENCE)],
    )
    if not accelerator.is_main_process:
        disable_progress_bar()
    accelerator.print(f"{accelerator.num_processes} process(es) on {accelerator.device.type}")
    check_values(options)
    options.transition_rank = _transition_rank(options)
    target, tokenizer = load_target(options.model, dtype=getattr(torch, options.dtype))
    target = target.to(accelerator.device).eval().requires_grad_(False)
    check_shapes(options, target)
    check_rows(options.rows, accelerator.num_processes * options.accumulate)
    place = Workplace(options.out)
    with place.lock() if accelerator.is_main_process else nullcontext():
        _train(options, accelerator, target, tokenizer, place)


def _train(
    options: argparse.Namespace,
    accelerator: Accelerator,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    place: Workplace,
) -> None:
    checkpoint = place.training / "checkpoint.pt"
    if checkpoint.exists() and not options.no_resume:
        check_checkpoint(checkpoint, _known(options, target))
    with accelerator.main_process_first():
        sequences = _text(options, target, tokenizer, place)
    train, held = _split(sequences)
    torch.manual_seed(options.seed)
    drafter = _drafter(options, target, tokenizer, sequences).to(accelerator.device)
    taps = drafter.config.target_layer_ids
    accelerator.print(f"reads the target's layers {taps}; mask token {drafter.config.mask_token_id}")
    store = FeatureStore(target, train, taps, place.training / "features", options.cache_gb)
    data = TrainingData(store, compute_features(target, held, taps) if accelerator.is_main_process else [])
    trainer = Trainer(drafter, target, data, place.training, _settings(options), accelerator)
    if not options.no_resume and trainer.resume():
        accelerator.print(f"resumed at step {trainer.schedule.step}, {trainer.schedule.elapsed / 60:.1f} minutes")
    with accelerator.main_process_first():
        store.fill()  # now that nothing is refused any more: it replaces the features of another run
    trainer.run()
    if accelerator.is_main_process:
        publish(drafter, target, data.held, place, options)
    accelerator.wait_for_everyone()


def publish(
    drafter: DFlashDraftModel,
    target: PreTrainedModel,
    held: list[TargetFeatures],
    place: Workplace,
    options: argparse.Namespace,
) -> None:
    """Calibrates and writes what goes to the Hub: weights in 16 bit, configs, model card."""
    half = DFlashDraftModel(drafter.config).to(drafter.device, target.dtype).eval()
    half.load_state_dict(drafter.state_dict())
    half.config.depth_temperatures = None
    if all(item.sequence.greedy for item in held):  # others' text says nothing of what the target would take
        half.config.depth_temperatures = fit_depth_temperatures(half, target, held)
    figures = held_acceptance(half, target, held, held_configs(half))
    half.save_pretrained(place.out)
    DDTreeConfig().save_pretrained(place.out)
    write_card(place.out, half, figures, options)
    print(f"{place.out}: tokens per round on held-out text: " + ", ".join(f"{k} {v:.2f}" for k, v in figures.items()))


def check_values(options: argparse.Namespace) -> None:
    """Raises ValueError where the command line is wrong whatever the target."""
    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"`--out {options.out}` is a file; give a folder.")
    if (options.steps is not None and options.steps < 1) or (options.minutes is not None and options.minutes <= 0):
        raise ValueError(f"`--steps` is {options.steps}, `--minutes` {options.minutes}; give one of them, above 0.")
    for name in POSITIVE:
        if (value := getattr(options, name)) is not None and value <= 0:
            raise ValueError(f"`--{name.replace('_', '-')}` is {value}; it must be above 0.")
    if options.transition_rank is not None and options.transition_rank < 0:
        raise ValueError(f"`--transition-rank` is {options.transition_rank}; it must be 0 (none) or more.")
    if options.answer_with_target and options.data is None:
        raise ValueError("`--answer-with-target` wants prompts: give them by `--data`, or leave both out.")
    for name in ("layers", "block_size", "mask_token_id", "target_layer_ids"):
        if options.start_from is not None and (value := getattr(options, name)) is not None:
            raise ValueError(f"`--{name.replace('_', '-')} {value}` does not go with `--start-from`; leave it out.")


def check_shapes(options: argparse.Namespace, target: PreTrainedModel) -> None:
    """Raises ValueError, before any work, where the command line does not fit the target."""
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    mask = options.mask_token_id
    if mask is not None and not 0 <= mask < vocab_size:
        raise ValueError(f"`--mask-token-id` is {mask}; the target's vocabulary is 0..{vocab_size - 1}.")
    if options.start_from is None:
        drafter_from_target(target, mask_token_id=mask or 0, **_shape(options))
    else:
        drafter_from_checkpoint(options.start_from, target, options.transition_rank)


def _text(
    options: argparse.Namespace, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, place: Workplace
) -> list[TokenSequence]:
    """The sequences that the options ask for; the target's own text is written to text.jsonl first."""
    limits = Limits(target.config.get_text_config(decoder=True).vocab_size, options.max_length, options.sequences)
    if options.data is not None and not options.answer_with_target:
        return load_sequences(options.data, tokenizer, limits)
    prompts = None if options.data is None else load_prompts(options.data, tokenizer, limits)
    count = _lines(options) if prompts is None else options.sequences or len(prompts)
    settings = TextSettings(
        count=count, batch_size=options.batch_size, max_new_tokens=options.answer_tokens, seed=options.seed
    )
    path = place.training / "text.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    generate_text(target, tokenizer, path, settings, prompts)
    return list(islice(read_lines(path), count))  # a file that a longer run left has the same text first


def _lines(options: argparse.Namespace) -> int:
    """How many the target writes with prompts of its own."""
    return options.sequences or TextSettings.count


def _known(options: argparse.Namespace, target: PreTrainedModel) -> dict[str, Any]:
    """What is known of a run before its text is."""
    known = known_identity(target, _settings(options))
    if options.data is not None:
        return known
    lines = _lines(options)
    return {**known, "sequences": lines - len(range(0, lines, HELD_EVERY))}


def _split(sequences: list[TokenSequence]) -> tuple[list[TokenSequence], list[TokenSequence]]:
    """Training and evaluation sequences of two answer tokens and more."""
    train, held = ([s for s in part if s.answer_length >= 2] for part in split_held(sequences))
    if not train or not held:
        raise ValueError(
            f"The data has {len(train)} sequences to train on and {len(held)} held out ({HELD_OUT}), answers shorter "
            "than two tokens left out; give more of it."
        )
    greedy = [sequence for sequence in held if sequence.greedy]
    if not greedy:
        logger.warning(
            "No held-out answer is the target's own greedy one, so acceptance on them says less than on its own text, "
            "and there is no calibration; `--answer-with-target` lets the target answer the prompts of `--data`."
        )
    return train, (greedy or held)[:HELD_SEQUENCES]


def _drafter(
    options: argparse.Namespace,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sequences: list[TokenSequence],
) -> DFlashDraftModel:
    if options.start_from is not None:
        return drafter_from_checkpoint(options.start_from, target, options.transition_rank)
    vocab_size = target.config.get_text_config(decoder=True).vocab_size
    counts = torch.cat([sequence.tokens for sequence in sequences]).bincount(minlength=vocab_size)
    mask = choose_mask_token(tokenizer, counts) if options.mask_token_id is None else options.mask_token_id
    return drafter_from_target(target, mask_token_id=mask, **_shape(options))


def _transition_rank(options: argparse.Namespace) -> int:
    """The rank asked for, else that of the drafter to go on with, else 256."""
    asked, own = options.transition_rank, 0
    if options.start_from is not None:
        try:
            own = read_config(options.start_from).transition_rank or 0
        except (OSError, ValueError) as error:
            raise ValueError(
                f"`--start-from {options.start_from}` can't be loaded; give a drafter's folder or Hub name: {error}"
            ) from error
    if asked is None:
        return own or TRANSITION_RANK
    if own and asked != own:
        logger.warning(
            f"`--transition-rank {asked}` is not the {own} of the transition that `--start-from {options.start_from}` "
            "was trained with: it is dropped. Leave the rank out to go on with it."
        )
    return asked


def _shape(options: argparse.Namespace) -> dict[str, Any]:
    block_size = BLOCK_SIZE if options.block_size is None else options.block_size
    return {
        "num_layers": LAYERS if options.layers is None else options.layers,
        "block_size": block_size,
        "target_layer_ids": options.target_layer_ids,
        "transition_rank": options.transition_rank if block_size > 2 else 0,  # its first depth is the second
    }


def _settings(options: argparse.Namespace) -> TrainingSettings:
    rate = {} if options.learning_rate is None else {"learning_rate": options.learning_rate}
    return TrainingSettings(
        steps=options.steps,
        minutes=None if options.steps is not None else options.minutes or TrainingSettings.minutes,
        rows=options.rows,
        blocks=options.blocks,
        micro_batches=options.accumulate,
        min_count=options.min_count,
        seed=options.seed,
        **rate,
    )
