"""Training text from files, folders and the Hub, as token sequences."""

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase
from transformers.utils.logging import get_logger

from .data import FOREIGN, TokenSequence, read_lines

logger = get_logger(__name__)

CHAT = ("messages", "conversations", "conversation")
PROMPT = ("prompt", "instruction", "question")
ANSWER = ("completion", "response", "answer", "output")
UNDERSTOOD = (
    f"a chat ({', '.join(CHAT)}); {' or '.join(PROMPT)} with {' or '.join(ANSWER)}; text; or our own p, g and t"
)
LOADERS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
TEXT_PROMPT = 16  # tokens of a plain text that stand for its prompt


@dataclass(frozen=True)
class Limits:
    """What the sequences must fit in.

    Attributes:
        vocab_size: of the target.
        max_length: tokens of a sequence; what is beyond is cut off.
        max_sequences: read no more than these; None = all.
    """

    vocab_size: int
    max_length: int = 2048
    max_sequences: int | None = None


class UnusableRowError(ValueError):
    """A row that gives no sequence, and why."""


def load_sequences(data: str, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> list[TokenSequence]:
    """The sequences of `data`; answers that come from elsewhere than the target have the temperature `FOREIGN`.

    Rows that give no sequence are left out, with one warning.

    Args:
        data: a file or folder, or a Hub dataset as `name`, `name:split` or `name:config:split`. Our own JSON lines
            (`read_lines`); else what `datasets` reads, with columns as `UNDERSTOOD` says. In a chat the answer is the
            last assistant turn, in a plain text all but the first tokens; a .txt file has a text per paragraph.

    Raises:
        ImportError: `datasets` is needed and not installed.
        ValueError: nothing there, no column understood, no chat template for chats, ids beyond the vocabulary.
    """

    def convert(row: dict[str, Any] | TokenSequence, number: int) -> TokenSequence:
        if isinstance(row, TokenSequence):
            return _fitted(row, limits)
        prompt, answer = _encode(row, tokenizer)
        return _fitted(TokenSequence(torch.tensor(prompt + answer), len(prompt), FOREIGN, number), limits)

    return _collect(data, _open(data, ANSWER, "paragraph"), convert, limits)


def load_prompts(data: str, tokenizer: PreTrainedTokenizerBase, limits: Limits) -> list[list[int]]:
    """The prompts of `data` alone, token ids each, for the target to answer; there need be no answers.

    As `load_sequences`, but a plain text is a prompt as a whole (a .txt file has one per line), and prompts longer than
    `max_length` are left out.
    """

    def convert(row: dict[str, Any] | TokenSequence, number: int) -> list[int]:
        if isinstance(row, TokenSequence):
            prompt = row.tokens[: row.prompt_length].tolist()
        else:
            prompt = _encode_prompt(row, tokenizer)
        _check_ids(torch.tensor(prompt), limits)
        if not 0 < len(prompt) <= limits.max_length:
            raise UnusableRowError(f"the prompt has {len(prompt)} tokens; 1 to {limits.max_length} are wanted")
        return prompt

    return _collect(data, _open(data, (), "line"), convert, limits)


def _collect(data: str, rows: Iterator[Any], convert: Callable[[Any, int], Any], limits: Limits) -> list[Any]:
    """What `convert` makes of the rows and their numbers, those that it finds `UnusableRowError` left out."""
    kept: list[Any] = []
    unusable = []
    for number, row in enumerate(islice(rows, limits.max_sequences)):
        try:
            kept.append(convert(row, number))
        except UnusableRowError as error:
            unusable.append(f"row {number + 1}: {error}")
        except ValueError as error:
            raise ValueError(f"`--data {data}`, row {number + 1}: {error}") from error
    if not kept:
        reason = f"; {unusable[0]}" if unusable else ""
        raise ValueError(f"`--data {data}` holds {len(unusable)} rows, none usable{reason}. Give other data.")
    if unusable:
        logger.warning(f"{data}: {len(unusable)} of {len(kept) + len(unusable)} rows left out ({unusable[0]}).")
    return kept


def _fitted(sequence: TokenSequence, limits: Limits) -> TokenSequence:
    """The sequence cut to `max_length`, of ids that the target has."""
    _check_ids(sequence.tokens, limits)
    tokens = sequence.tokens[: limits.max_length]
    if sequence.prompt_length == 0 or len(tokens) < sequence.prompt_length + 2:
        raise UnusableRowError(
            f"the prompt has {sequence.prompt_length} of {len(tokens)} tokens; an answer needs 2 (limit "
            f"{limits.max_length})"
        )
    return replace(sequence, tokens=tokens)


def _check_ids(ids: torch.Tensor, limits: Limits) -> None:
    outside = ids[(ids < 0) | (ids >= limits.vocab_size)]
    if len(outside):
        raise ValueError(
            f"token id {int(outside[0])} is outside the target's vocabulary of {limits.vocab_size}; use the tokenizer, "
            "and data, of this target."
        )


def _encode(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Prompt ids and answer ids, the end of the turn included."""
    turns = _turns(row)
    if not turns:
        ids = tokenizer(_text(row.get("text")).strip()).input_ids
        cut = min(TEXT_PROMPT, len(ids) // 2)
        return ids[:cut], ids[cut:]
    last = max((n for n, turn in enumerate(turns) if turn["role"] == "assistant"), default=0)
    if last == 0:
        raise UnusableRowError("no assistant turn with a prompt before it")
    if tokenizer.chat_template is None and _is_plain(row):
        prompt_ids, answer = tokenizer(turns[0]["content"]).input_ids, turns[last]["content"]
    else:
        opening = render(tokenizer, turns[:last], add_generation_prompt=True)
        whole = render(tokenizer, turns[: last + 1])
        prompt_ids = _ids(tokenizer, opening)
        # Some templates open answers otherwise than they show them, with a thought for one.
        answer = whole[len(opening) :].rstrip() if whole.startswith(opening) else turns[last]["content"]
    answer_ids = _ids(tokenizer, answer)
    if tokenizer.eos_token_id is not None and not special_ids(tokenizer).intersection(answer_ids[-1:]):
        answer_ids = [*answer_ids, tokenizer.eos_token_id]
    return prompt_ids, answer_ids


def _encode_prompt(row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of all up to the last user turn, and the opening of an answer."""
    turns = _turns(row)
    plain = not turns or _is_plain(row)
    turns = turns or [{"role": "user", "content": _text(row.get("text"))}]
    last = max((n for n, turn in enumerate(turns) if turn["role"] == "user" and turn["content"].strip()), default=-1)
    if last < 0:
        raise UnusableRowError("no user turn")
    if tokenizer.chat_template is None and plain:
        return tokenizer(turns[0]["content"]).input_ids
    return _ids(tokenizer, render(tokenizer, turns[: last + 1], add_generation_prompt=True))


def _turns(row: dict[str, Any]) -> list[dict[str, str]]:
    """The row as a chat of role and content; empty if it holds neither a chat nor a prompt."""
    chat = _first(row, CHAT)
    if chat is None:
        prompt, answer = _first(row, PROMPT), _first(row, ANSWER)
        if prompt is None:
            return []
        if _is_plain(row):
            prompt = [{"role": "user", "content": "\n\n".join(filter(None, map(_text, (prompt, row.get("input")))))}]
        if answer is not None and not isinstance(answer, list):
            answer = [{"role": "assistant", "content": _text(answer)}]
        chat = [*prompt, *(answer or [])]
    if not isinstance(chat, list):
        raise UnusableRowError(f"a chat is a {type(chat).__name__}, not a list of turns")
    return [_turn(turn) for turn in chat]


def _turn(turn: Any) -> dict[str, str]:
    if not isinstance(turn, dict):
        raise UnusableRowError(f"a turn is a {type(turn).__name__}, not a role with content")
    role = _text(_first(turn, ("role", "from")))
    return {"role": SHAREGPT_ROLES.get(role, role), "content": _text(_first(turn, ("content", "value")))}


def _text(cell: Any) -> str:
    """A cell as text, a number in digits; empty for one that is not filled in."""
    if cell is None or cell != cell:  # not a number: how tables mark a gap
        return ""
    if isinstance(cell, bool) or not isinstance(cell, str | int | float):
        raise UnusableRowError(f"a cell is a {type(cell).__name__}, not text")
    return f"{cell:.15g}" if isinstance(cell, float) else str(cell)  # a gap makes a column of whole numbers floats


def _is_plain(row: dict[str, Any]) -> bool:
    """Whether the row's prompt is one cell, which needs no template."""
    return _first(row, CHAT) is None and not isinstance(_first(row, PROMPT), list)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> Any:
    """The first of the columns that is filled in."""
    return next((row[name] for name in names if row.get(name) not in (None, "", [])), None)


def render(tokenizer: PreTrainedTokenizerBase, turns: list[dict[str, str]], **options: Any) -> str:
    if tokenizer.chat_template is None:
        raise ValueError(
            "a chat needs a chat template and the tokenizer has none; give data with a text column, or with prompt and "
            "completion, or use an instruction-tuned target."
        )
    try:
        return tokenizer.apply_chat_template(turns, tokenize=False, **options)
    except TemplateError as error:
        raise UnusableRowError(f"the chat template refuses it: {error}") from error


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Tokens that mark up a chat and never stand for text."""
    added = {token_id for token_id, token in tokenizer.added_tokens_decoder.items() if token.special}
    return added | set(tokenizer.all_special_ids)


def _open(data: str, answer_columns: tuple[str, ...], sample_by: str) -> Iterator[dict[str, Any] | TokenSequence]:
    """Sequences if the file is in our format, else rows."""
    path = Path(data)
    if not path.exists() and (path.is_absolute() or path.suffix in {*LOADERS, ".gz"}):
        raise ValueError(f"`--data {data}`: there is no such file or folder; give one, or the name of a Hub dataset.")
    if path.is_file() and path.stat().st_size == 0:
        raise ValueError(f"`--data {data}` is empty; give a file with text.")
    return read_lines(path) if _is_own(path) else _checked_rows(data, answer_columns, sample_by)


def _is_own(path: Path) -> bool:
    """Whether the file's first line is one of ours."""
    if not path.is_file() or not path.name.removesuffix(".gz").endswith((".json", ".jsonl")):
        return False
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else open(path) as lines:
            return lines.read(1) == "{" and {"p", "g"} <= json.loads("{" + lines.readline()).keys()
    except (OSError, EOFError, ValueError):  # whoever reads the file says what is wrong with it
        return False


def _checked_rows(data: str, answer_columns: tuple[str, ...], sample_by: str) -> Iterator[dict[str, Any]]:
    """The rows of `data`, the first one seen to have columns that we understand."""
    rows = _rows(data, sample_by)
    first = next(rows, None)
    if first is None:
        raise ValueError(f"`--data {data}` holds no rows; give other data.")
    names = set(first)
    answered = bool(names & set(PROMPT)) and (not answer_columns or bool(names & set(answer_columns)))
    if not (names & {"text", *CHAT} or answered):
        raise ValueError(
            f"`--data {data}` has the columns {', '.join(sorted(names))}; understood are {UNDERSTOOD}. Rename them."
        )
    return chain([first], rows)


def _rows(data: str, sample_by: str) -> Iterator[dict[str, Any]]:
    """The rows, streamed: no copy of the data is made in the user's cache."""
    try:
        import datasets
    except ImportError as error:
        raise ImportError(
            f"Reading `--data {data}` needs the package `datasets`: pip install 'hf-ddtree[train]'"
        ) from error
    try:
        yield from _dataset(datasets, data, sample_by)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"`--data {data}` can't be read ({type(error).__name__}: {error}); give a file ({', '.join(LOADERS)}), a "
            "folder, or a Hub dataset as name, name:split or name:config:split."
        ) from error


def _dataset(datasets: Any, data: str, sample_by: str) -> Any:
    path = Path(data)
    if path.is_dir():
        if (path / "state.json").exists():
            return datasets.load_from_disk(data)
        if (path / "dataset_dict.json").exists():
            return datasets.load_from_disk(data)["train"]
        return datasets.load_dataset(data, split="train", streaming=True)
    if path.is_file():
        suffix = Path(path.stem if path.suffix == ".gz" else path.name).suffix
        if suffix not in LOADERS:
            raise ValueError(f"the suffix {suffix!r} is not one of them")
        options = {"sample_by": sample_by} if suffix == ".txt" else {}
        return datasets.load_dataset(LOADERS[suffix], data_files=data, split="train", streaming=True, **options)
    name, *config, split = data.split(":") if ":" in data else (data, "train")
    return datasets.load_dataset(name, *config, split=split, streaming=True)
