"""The target writes its own training text: prompts by its own template (Magpie, arXiv 2406.08464), then answers."""

import hashlib
import json
import os
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import get_logger, tqdm

from .features import read_json, target_digest
from .sources import render, special_ids

logger = get_logger(__name__)

SENTINEL = "SENTINEL"
REMEDY = "Give prompts of your own with `--data` and `--answer-with-target`"
# Settings, and parts of a text's identity, by the options that they come from.
OPTIONS = {
    "batch_size": "--batch-size",
    "max_new_tokens": "--answer-tokens",
    "seed": "--seed",
    "target": "--model",
    "prompts": "--data",
}
PATIENCE = 20  # batches in a row without a usable line before giving up
PROMPT_ROUNDS = 4  # rounds of sampling prompts, at most, before a batch is taken as it is
BASE_PROMPT = 16  # tokens sampled as a prompt where there is no chat template


@dataclass(frozen=True)
class TextSettings:
    """How the target writes.

    Attributes:
        count: lines wanted; the last batch is written whole, so there may be some more.
        batch_size: sequences generated together.
        max_new_tokens: of an answer.
        max_prompt_tokens: of a prompt that the target makes up, beside its template's; longer ones are dropped.
        min_prompt_characters: likewise; shorter ones are dropped.
        temperatures: of the answers, one per batch in turn; None = greedy.
        prompt_temperature, prompt_top_k: of made-up prompts.
        seed: same seed and settings, same text.
    """

    count: int = 4000
    batch_size: int = 32
    max_new_tokens: int = 256
    max_prompt_tokens: int = 128
    min_prompt_characters: int = 12
    temperatures: tuple[float | None, ...] = (None, 0.7, 1.0)
    prompt_temperature: float = 0.9
    prompt_top_k: int = 60
    seed: int = 0


def generate_text(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    settings: TextSettings,
    prompts: list[list[int]] | None = None,
) -> int:
    """Appends lines `{"p": prompt ids, "g": answer ids, "t": temperature, null = greedy}`; returns how many are there.

    Goes on where an earlier call with the same target and settings was stopped or killed, and to the same text as if it
    had not been: a batch depends on the seed, its number, and the lines before it. The target's generation_config gives
    the end tokens; its penalties and warpers are left out, since training is on the target's own distribution.

    Args:
        path: of the text; a small state file, `path` and .state, goes beside it.
        prompts: token ids each, to be answered once each; those that leave no room for an answer are left out. None =
            the target makes them up.

    Raises:
        ValueError: `path` is of something else, a setting does not fit the target, or nothing usable comes.
        OSError: the text can't be written; the whole batches stay.
    """
    writer = Writer(target, tokenizer, settings)
    given = None if prompts is None else _distinct(prompts, writer.prompt_room)
    if given is None:
        writer.check_can_prompt()
    text = TextFile(path, writer.identity(given))
    fruitless = 0
    with tqdm(total=settings.count, initial=len(text.prompts), desc="writing text", unit="line") as bar:
        while len(text.prompts) < settings.count:
            start = text.batches * settings.batch_size
            if given is not None and start >= len(given):
                logger.warning(f"{path} has {len(text.prompts)} of {settings.count} lines: the prompts are used up.")
                break
            with seeded(target.device, settings.seed, text.batches):
                batch = writer.sample_prompts(text.prompts) if given is None else given[start:][: settings.batch_size]
                rows = writer.answer(batch, settings.temperatures[text.batches % len(settings.temperatures)])
            text.append(rows)
            bar.update(len(rows))
            fruitless = 0 if rows else fruitless + 1
            if fruitless == PATIENCE:
                raise ValueError(
                    f"The target wrote nothing usable in {PATIENCE} batches in a row (in the last: "
                    f"{len(batch)} prompts, no answer of 2 tokens). {REMEDY}."
                )
    return len(text.prompts)


class Writer:
    """Prompts and answers from a target, by `settings`.

    Raises:
        ValueError: a setting does not fit the target.
    """

    def __init__(self, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, settings: TextSettings):
        self.target, self.tokenizer, self.settings = target, tokenizer, settings
        for name, least in (("count", 1), ("batch_size", 1), ("max_prompt_tokens", 1), ("max_new_tokens", 2)):
            if (value := getattr(settings, name)) < least:
                raise ValueError(f"`{OPTIONS.get(name, name)}` is {value}; it must be at least {least}.")
        if not settings.temperatures or any(t is not None and t <= 0 for t in settings.temperatures):
            raise ValueError(f"`temperatures` is {settings.temperatures}; give positive numbers, or None for greedy.")
        positions = getattr(target.config.get_text_config(), "max_position_embeddings", None) or sys.maxsize
        self.prompt_room = positions - settings.max_new_tokens
        if self.prompt_room < 1:
            raise ValueError(
                f"`--answer-tokens` is {settings.max_new_tokens}, and the target has {positions} positions, prompts "
                "included; lower it."
            )
        ends = target.generation_config.eos_token_id
        self.ends = set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
        self.special = special_ids(tokenizer) | self.ends
        pad = tokenizer.pad_token_id
        self.pad = min(self.ends, default=0) if pad is None else pad

    def identity(self, prompts: list[list[int]] | None) -> dict[str, Any]:
        """What must be the same for a text to be gone on with, as JSON."""
        settings = asdict(self.settings)
        del settings["count"]
        parts = {"template": self.tokenizer.chat_template, "prompts": prompts, "end tokens": sorted(self.ends)}
        digests = {name: hashlib.sha256(json.dumps(part).encode()).hexdigest() for name, part in parts.items()}
        return json.loads(json.dumps({"target": target_digest(self.target), **digests, **settings}))

    def check_can_prompt(self) -> None:
        """Refuses, before work starts, targets that can't make up prompts, or not of this length."""
        fixed = self._fixed_tokens()
        if fixed >= self.prompt_room:
            raise ValueError(
                f"`--answer-tokens` is {self.settings.max_new_tokens}, which leaves {self.prompt_room} of the target's "
                f"positions for prompts, and the template alone has {fixed} tokens; lower it."
            )

    def sample_prompts(self, seen: set[tuple[int, ...]]) -> list[list[int]]:
        """Up to `batch_size` prompts made up by the target, all different and none of `seen`."""
        chat = self.tokenizer.chat_template is not None
        longest = min(self.prompt_room, self._fixed_tokens() + self.settings.max_prompt_tokens)
        found: dict[tuple[int, ...], None] = {}  # a set in order
        for _ in range(PROMPT_ROUNDS):
            for prompt in self._sample_user_turns() if chat else self._sample_beginnings():
                if len(prompt) <= longest and tuple(prompt) not in seen:
                    found[tuple(prompt)] = None
            if len(found) >= self.settings.batch_size:
                break
        return [list(prompt) for prompt in found][: self.settings.batch_size]

    def answer(self, prompts: list[list[int]], temperature: float | None) -> list[dict[str, Any]]:
        """A line each for the prompts whose answers have two tokens or more."""
        answers = self._generate(prompts, self.settings.max_new_tokens, self.ends, temperature) if prompts else []
        return [
            {"p": prompt, "g": answer, "t": temperature}
            for prompt, answer in zip(prompts, answers, strict=True)
            if len(answer) >= 2
        ]

    def _sample_user_turns(self) -> list[list[int]]:
        """The target continues the opening of a user turn; turns that it ends are rendered as prompts."""
        opening, closing = self._template()
        marker = closing.strip()
        end = self._ids(closing)[:1]  # a token of its own, or the beginning of a marker in plain text
        ends = self.ends.union(self.special.intersection(end))
        prompts = []
        for turn in self._sample(self._ids(opening), self.special):
            words = turn[:-1] if turn[-1] in self.special else turn
            text, found, _ = self.tokenizer.decode(words).partition(marker)
            if (found or turn[-1] in ends) and self._reads_well(text):
                chat = [{"role": "user", "content": text.strip()}]
                prompts.append(self._ids(render(self.tokenizer, chat, add_generation_prompt=True)))
        return prompts

    def _sample_beginnings(self) -> list[list[int]]:
        """The first tokens of texts, for targets without a chat template."""
        begin = self._begin()
        texts = [tokens[:BASE_PROMPT] for tokens in self._sample(begin, self.special, BASE_PROMPT)]
        return [
            begin + tokens
            for tokens in texts
            if not self.special.intersection(tokens) and self._reads_well(self.tokenizer.decode(tokens))
        ]

    def _reads_well(self, text: str) -> bool:
        """Whether text is long enough, whole characters, and spells no markup."""
        long_enough = len(text.strip()) >= self.settings.min_prompt_characters
        return long_enough and "\ufffd" not in text and not self.special.intersection(self._ids(text))

    def _template(self) -> tuple[str, str]:
        """What the chat template puts before and after a user's words."""
        chat = [{"role": "user", "content": SENTINEL}]
        parts = render(self.tokenizer, chat, add_generation_prompt=True).split(SENTINEL)
        if len(parts) != 2 or not parts[1].strip():
            raise ValueError(
                f"The chat template shows a user's words {len(parts) - 1} times, or nothing after them; prompts can be "
                f"made up where it is once, with an end. {REMEDY}."
            )
        return parts[0], parts[1]

    def _fixed_tokens(self) -> int:
        """Tokens of a made-up prompt that are the same in every one."""
        parts = map(self._ids, self._template()) if self.tokenizer.chat_template else [self._begin()]
        return sum(map(len, parts))

    def _begin(self) -> list[int]:
        """The token that texts begin with."""
        for token_id in (self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token_id is not None:
                return [token_id]
        raise ValueError(f"The tokenizer has no chat template, no bos and no eos token. {REMEDY}.")

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _sample(self, opening: list[int], stops: set[int], most: int = sys.maxsize) -> list[list[int]]:
        """`batch_size` continuations of `opening` with the settings for prompts."""
        settings = self.settings
        batch = [opening] * settings.batch_size
        length = min(most, settings.max_prompt_tokens, self.prompt_room - len(opening))
        return self._generate(batch, length, stops, settings.prompt_temperature, settings.prompt_top_k)

    def _generate(
        self, prompts: list[list[int]], max_new_tokens: int, stops: set[int], temperature: float | None, top_k: int = 0
    ) -> list[list[int]]:
        """The new tokens of each prompt, up to and with the first of `stops`."""
        width = max(map(len, prompts))
        ids = torch.tensor([[self.pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        sampling = {} if temperature is None else {"temperature": temperature, "top_k": top_k, "top_p": 1.0}
        config = GenerationConfig(
            do_sample=bool(sampling),
            max_new_tokens=max_new_tokens,
            eos_token_id=sorted(stops) or None,
            pad_token_id=self.pad,
            **sampling,
        )
        inputs = {"input_ids": ids.to(self.target.device), "attention_mask": mask.to(self.target.device)}
        with _generation_config(self.target, config):
            rows = self.target.generate(**inputs)[:, width:].tolist()
        return [row[: next((n + 1 for n, token in enumerate(row) if token in stops), len(row))] for row in rows]


class TextFile:
    """A text that grows batch by batch, with a state file that says what of it is whole.

    Args:
        identity: what must be the same for an existing text to be gone on with.

    Raises:
        ValueError: `path` is of another identity, not a text of ours, or shorter than it was.
    """

    def __init__(self, path: Path, identity: dict[str, Any]):
        if path.suffix == ".gz":
            raise ValueError(f"`path` is {path}; text is appended line by line, so give a name without .gz.")
        self.path, self.state_path = path, path.with_name(path.name + ".state")
        self.identity, self.batches = identity, 0
        self.prompts: set[tuple[int, ...]] = set()  # all different, so that their number is that of the lines
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.stat().st_size:
            self._resume()
        else:
            self._write(b"", 0)

    def append(self, rows: list[dict[str, Any]]) -> None:
        """Adds a batch; it counts once the state file says so."""
        self._write("".join(json.dumps(row) + "\n" for row in rows).encode(), self.batches + 1)
        self.prompts.update(tuple(row["p"]) for row in rows)

    def _write(self, lines: bytes, batches: int) -> None:
        partial = self.state_path.with_name(self.state_path.name + ".partial")
        try:
            with open(self.path, "ab") as out:
                out.write(lines)
                out.flush()
                size = out.tell()
            partial.write_text(json.dumps({"identity": self.identity, "batches": batches, "bytes": size}))
            partial.replace(self.state_path)
        except OSError as error:
            raise OSError(
                f"{self.path} can't be written ({error}); make room, or give another path. What was written before is "
                "whole, and the same command goes on from it."
            ) from error
        self.batches = batches

    def _resume(self) -> None:
        """Cuts off what a kill left half-written, and takes up the rest."""
        state = read_json(self.state_path)
        remedy = "give another --out, or remove it and its .state file to start over"
        if not state:
            raise ValueError(f"{self.path} is there without a state file, so it is not ours to append to; {remedy}.")
        theirs = state["identity"]
        changed = [OPTIONS.get(name, name) for name in self.identity if theirs.get(name) != self.identity[name]]
        if changed:
            raise ValueError(f"{self.path} was written with another {', '.join(changed)}; use the same, {remedy}.")
        if self.path.stat().st_size < state["bytes"]:
            raise ValueError(f"{self.path} is shorter than when it was written; {remedy}.")
        os.truncate(self.path, state["bytes"])
        self.batches = state["batches"]
        with open(self.path) as lines:
            self.prompts.update(tuple(json.loads(line)["p"]) for line in lines)


def _distinct(prompts: list[list[int]], max_length: int) -> list[list[int]]:
    """The prompts that are not too long, once each."""
    kept = [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts)) if 0 < len(prompt) <= max_length]
    if not kept:
        raise ValueError(
            f"None of {len(prompts)} prompts has 1 to {max_length} tokens; give others, or lower `--answer-tokens`."
        )
    if len(kept) < len(prompts):
        logger.warning(f"{len(prompts) - len(kept)} of {len(prompts)} prompts left out: repeated, or too long.")
    return kept


@contextmanager
def seeded(device: torch.device, *parts: int) -> Iterator[None]:
    """Draws on `device` and the CPU depend on `parts` alone; the caller's generators are as before afterwards."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(random.Random(repr(parts)).getrandbits(32))  # the CPU's generator takes 32 bits
        yield


@contextmanager
def _generation_config(target: PreTrainedModel, config: GenerationConfig) -> Iterator[None]:
    """`target` with `config` alone: whatever a call leaves open is filled in from the model's own otherwise."""
    own, target.generation_config = target.generation_config, config
    try:
        yield
    finally:
        target.generation_config = own
