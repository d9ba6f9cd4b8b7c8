"""Training text from everywhere: the same chat from every format, honest about who wrote it, errors that help."""

import gzip
import json
import math
import sys

import datasets
import pytest
from chat import ASSISTANT, END, TEMPLATE, USER, make_chat_tokenizer
from datasets import Dataset, DatasetDict

import hf_ddtree.training.sources as sources
from hf_ddtree.training.data import read_lines, split_held
from hf_ddtree.training.sources import Limits, load_prompts, load_sequences

LIMITS = Limits(vocab_size=64, max_length=200)
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]
LONGER = [*CHAT, {"role": "user", "content": "bye"}, {"role": "assistant", "content": "so long"}]


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """The library counts uses of its loaders at the Hub."""
    monkeypatch.setattr(datasets.config, "HF_UPDATE_DOWNLOAD_COUNTS", False)


@pytest.fixture
def tokenizer():
    return make_chat_tokenizer()


@pytest.fixture
def bare():
    return make_chat_tokenizer(template=None)


@pytest.fixture
def warnings(monkeypatch):
    given: list[str] = []
    monkeypatch.setattr(sources.logger, "warning", given.append)
    return given


def write(path, rows):
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wt") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
    return str(path)


def texts(tokenizer, sequence):
    """(prompt, answer) as text, markup shown."""
    cut = sequence.prompt_length
    return tokenizer.decode(sequence.tokens[:cut]), tokenizer.decode(sequence.tokens[cut:])


ROWS = {
    "messages": {"messages": LONGER},
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "hi"},
            {"from": "gpt", "value": "hello"},
            {"from": "human", "value": "bye"},
            {"from": "gpt", "value": "so long"},
        ]
    },
    "ends with a question": {"messages": [*LONGER, {"role": "user", "content": "wait"}]},
    "prompt as a chat": {"prompt": LONGER[:3], "completion": LONGER[3:]},
    "a chat and a prompt": {"prompt": "something else", "messages": LONGER},
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_chats_of_every_form(row, tokenizer, tmp_path):
    (sequence,) = load_sequences(write(tmp_path / "x.jsonl", [row]), tokenizer, LIMITS)
    opening = "<user>hi<end>\n<assistant>hello<end>\n<user>bye<end>\n<assistant>"
    assert texts(tokenizer, sequence) == (opening, "so long<end>")
    assert sequence.tokens[0] == USER and sequence.tokens[-1] == END
    assert sequence.tokens[sequence.prompt_length - 1] == ASSISTANT


@pytest.mark.parametrize("prompt", ["prompt", "instruction", "question"])
@pytest.mark.parametrize("answer", ["completion", "response", "answer", "output"])
def test_prompts_with_answers(prompt, answer, tokenizer, bare, tmp_path):
    data = write(tmp_path / "x.jsonl", [{prompt: "hi", answer: "hello"}])
    (sequence,) = load_sequences(data, tokenizer, LIMITS)
    assert texts(tokenizer, sequence) == ("<user>hi<end>\n<assistant>", "hello<end>")
    (sequence,) = load_sequences(data, bare, LIMITS)
    assert texts(bare, sequence) == ("hi", "hello<end>")


def test_an_instruction_with_an_input(tokenizer, tmp_path):
    rows = [{"instruction": "add", "input": "a b", "output": "ab"}, {"instruction": "go", "input": "", "output": "ok"}]
    first, second = load_sequences(write(tmp_path / "x.jsonl", rows), tokenizer, LIMITS)
    assert texts(tokenizer, first) == ("<user>add\n\na b<end>\n<assistant>", "ab<end>")
    assert texts(tokenizer, second) == ("<user>go<end>\n<assistant>", "ok<end>")


NUMBERS = {
    "csv": ("x.csv", "question,answer\n12,34\n,\n5,0\n", ["12", "5"], ["34<end>", "0<end>"]),
    "input": ("x.jsonl", '{"question": "add", "input": 7, "answer": 1.5}\n', ["add\n\n7"], ["1.5<end>"]),
    "turns": (
        "x.jsonl",
        '{"messages": [{"role": "user", "content": 3}, {"role": "assistant", "content": 0}]}\n',
        ["3"],
        ["0<end>"],
    ),
}


@pytest.mark.parametrize(("name", "content", "prompts", "answers"), NUMBERS.values(), ids=NUMBERS)
def test_numbers_are_their_digits(name, content, prompts, answers, tmp_path):
    digits = make_chat_tokenizer(characters="0123456789.ad\n")
    (tmp_path / name).write_text(content)
    read = [texts(digits, s) for s in load_sequences(str(tmp_path / name), digits, LIMITS)]
    asked = [f"<user>{prompt}<end>\n<assistant>" for prompt in prompts]
    assert read == list(zip(asked, answers, strict=True))
    assert [digits.decode(p) for p in load_prompts(str(tmp_path / name), digits, LIMITS)] == asked


UNUSABLE = [
    {"text": ["a", "list"]},
    {"text": True},
    {"text": {"a": 1}},
    {"question": True, "answer": "yes"},
    {"question": {"a": 1}, "answer": "yes"},
    {"question": "why", "input": {"a": 1}, "answer": "so"},
    {"messages": [{"role": ["user"], "content": "hi"}, CHAT[1]]},
    {"messages": [{"role": "user", "content": ["hi"]}, CHAT[1]]},
    {"messages": ["hi", "hello"]},
    {"messages": 3},
    {"messages": {"role": "user"}},
]


@pytest.mark.parametrize("row", UNUSABLE, ids=str)
@pytest.mark.parametrize("load", [load_sequences, load_prompts])
def test_cells_that_are_no_text_make_a_row_unusable(row, load, tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"none usable; row 1: a (cell|turn|chat) is a (list|bool|dict|str|int)"):
        load(write(tmp_path / "x.jsonl", [row]), tokenizer, LIMITS)


def test_rows_left_out_move_no_other_to_the_other_side(tokenizer, tmp_path):
    """Which are held out is decided by their number in the data."""
    rows = [{"prompt": "hi", "completion": "" if n % 3 == 1 else f"hello {'x' * n}"} for n in range(45)]
    sequences = load_sequences(write(tmp_path / "x.jsonl", rows), tokenizer, LIMITS)
    assert [s.number for s in sequences] == [n for n in range(45) if n % 3 != 1]
    train, held = split_held(sequences)
    assert [s.number for s in held] == [0, 20] and len(train) == 28
    own = [{"p": [7], "g": [8, 9] if n % 3 else [8], "t": None} for n in range(45)]
    data = write(tmp_path / "own.jsonl", own)
    kept = load_sequences(data, tokenizer, LIMITS)
    assert [s.number for s in split_held(kept)[1]] == [20, 40]
    assert [s.number for s in read_lines(tmp_path / "own.jsonl")] == list(range(45))


def test_a_temperature_of_zero_is_greedy(tokenizer, tmp_path):
    data = write(tmp_path / "own.jsonl", [{"p": [7], "g": [8, 9], "t": t} for t in (0, 0.0, None, 0.7)])
    assert [s.temperature for s in load_sequences(data, tokenizer, LIMITS)] == [None, None, None, 0.7]


def test_an_answer_that_the_template_opens_otherwise(tmp_path):
    thinking = make_chat_tokenizer(TEMPLATE.replace("<assistant>{% endif %}", "<assistant>think!{% endif %}"))
    (sequence,) = load_sequences(write(tmp_path / "x.jsonl", [{"messages": CHAT}]), thinking, LIMITS)
    assert texts(thinking, sequence) == ("<user>hi<end>\n<assistant>think!", "hello<end>")


def test_plain_text(bare, tmp_path):
    text = "abcdefghijklmnopqrstuvwxyz" * 2
    long, short = load_sequences(write(tmp_path / "x.jsonl", [{"text": text}, {"text": "abcde"}]), bare, LIMITS)
    assert texts(bare, long) == (text[:16], text[16:])
    assert texts(bare, short) == ("ab", "cde")


def test_only_our_own_format_can_be_greedy(tokenizer, tmp_path):
    rows = [{"p": [7], "g": [8, 9], "t": None}, {"p": [7], "g": [8, 9], "t": 1}]
    own = load_sequences(write(tmp_path / "own.jsonl.gz", rows), tokenizer, LIMITS)
    assert [s.greedy for s in own] == [True, False] and [s.temperature for s in own] == [None, 1.0]
    assert own[0].tokens.tolist() == [7, 8, 9] and own[0].prompt_length == 1
    (other,) = load_sequences(write(tmp_path / "chat.jsonl", [{"messages": CHAT}]), tokenizer, LIMITS)
    assert not other.greedy and math.isnan(other.temperature)


FORMATS = ["x.jsonl", "x.jsonl.gz", "array.json", "x.csv", "x.parquet", "x.arrow", "saved", "split", "folder"]


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name, tokenizer, tmp_path):
    rows = [{"prompt": "hi", "completion": f"hello {letter}"} for letter in "abc"]
    dataset, path = Dataset.from_list(rows), tmp_path / name
    if name == "array.json":
        path.write_text(json.dumps(rows, indent=1))
    elif name == "x.csv":
        path.write_text("prompt,completion\n" + "".join(f"{row['prompt']},{row['completion']}\n" for row in rows))
    elif name == "x.parquet":
        dataset.to_parquet(path)
    elif name == "x.arrow":
        dataset.save_to_disk(tmp_path / "source")
        (tmp_path / "source" / "data-00000-of-00001.arrow").rename(path)
    elif name == "saved":
        dataset.save_to_disk(path)
    elif name == "split":
        DatasetDict(train=dataset, test=dataset.select([0])).save_to_disk(path)
    elif name == "folder":
        path.mkdir()
        dataset.to_parquet(path / "train.parquet")
    else:
        write(path, rows)
    sequences = load_sequences(str(path), tokenizer, LIMITS)
    assert [texts(tokenizer, s)[1] for s in sequences] == ["hello a<end>", "hello b<end>", "hello c<end>"]
    assert len(load_sequences(str(path), tokenizer, Limits(64, max_sequences=2))) == 2


def test_text_files_are_read_by_paragraph_and_prompts_by_line(bare, tokenizer, tmp_path):
    path = tmp_path / "x.txt"
    path.write_text("first line\nsecond line\n\nanother one\n")
    sequences = load_sequences(str(path), bare, LIMITS)
    assert ["".join(texts(bare, s)) for s in sequences] == ["first line\nsecond line", "another one"]
    assert [tokenizer.decode(p) for p in load_prompts(str(path), tokenizer, LIMITS)] == [
        f"<user>{line}<end>\n<assistant>" for line in ("first line", "second line", "another one")
    ]


@pytest.mark.parametrize(
    ("data", "asked"),
    [("a/b", ("a/b", "train")), ("a/b:test", ("a/b", "test")), ("a/b:all:test", ("a/b", "all", "test"))],
)
def test_names_on_the_hub(data, asked, tokenizer, monkeypatch):
    calls = []

    def load(*names, split, streaming):
        calls.append((*names, split))
        return [{"messages": CHAT}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert len(load_sequences(data, tokenizer, LIMITS)) == 1
    assert calls == [asked]


def test_long_sequences_are_cut(tokenizer, warnings, tmp_path):
    rows = [{"prompt": "hi", "completion": "a" * 50}, {"prompt": "a" * 50, "completion": "b"}]
    data = write(tmp_path / "x.jsonl", rows)
    (sequence,) = load_sequences(data, tokenizer, Limits(64, max_length=20))
    assert len(sequence.tokens) == 20 and texts(tokenizer, sequence)[1] == "a" * 14
    assert len(warnings) == 1 and "1 of 2" in warnings[0] and "row 2" in warnings[0]


def test_prompts(tokenizer, bare, warnings, tmp_path):
    rows = [{"messages": LONGER}, {"messages": LONGER[1:2]}, {"messages": [{"role": "user", "content": "a" * 300}]}]
    (prompt,) = load_prompts(write(tmp_path / "x.jsonl", rows), tokenizer, LIMITS)
    assert tokenizer.decode(prompt) == "<user>hi<end>\n<assistant>hello<end>\n<user>bye<end>\n<assistant>"
    assert "2 of 3" in warnings[0]
    own = write(tmp_path / "own.jsonl", [{"p": [7, 8], "g": [9, 9], "t": None}])
    assert load_prompts(own, tokenizer, LIMITS) == [[7, 8]]
    (prompt,) = load_prompts(write(tmp_path / "y.jsonl", [{"question": "why"}]), bare, LIMITS)
    assert bare.decode(prompt) == "why"


def test_rows_that_do_not_work_are_left_out(tokenizer, warnings, tmp_path):
    rows = [
        {"messages": [{"role": "system", "content": "be good"}, *CHAT]},  # the template refuses it
        {"messages": CHAT[:1]},
        {"messages": CHAT},
        {"messages": []},
        {"messages": [CHAT[0], {"role": "assistant", "content": ""}]},
    ]
    (sequence,) = load_sequences(write(tmp_path / "x.jsonl", rows), tokenizer, LIMITS)
    assert texts(tokenizer, sequence)[1] == "hello<end>"
    assert "4 of 5" in warnings[0] and "no such role" in warnings[0]


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("x.jsonl", '{"title": "a", "body": "b"}', r"body, title; understood are .*messages"),
        ("x.jsonl", '{"prompt": "a"}', "prompt; understood"),
        ("x.jsonl", "", "is empty"),
        ("x.jsonl", '{"messages": [', "can't be read"),
        ("x.jsonl", '{"messages": []}', "none usable.*row 1"),
        ("x.jsonl", '{"p": [1], "g": [2]}', "line 1.*'t'"),
        ("x.jsonl", '{"p": [1], "g": [2, 64], "t": null}', "token id 64 is outside"),
        ("x.jsonl", '{"p": [-1], "g": [2, 3], "t": null}', "token id -1 is outside"),
        ("x.xml", "<a/>", "'.xml' is not one"),
        ("x.jsonl.gz", "not gzip", "can't be read"),
    ],
)
def test_errors_name_the_data(name, content, named, tokenizer, tmp_path):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(ValueError, match=named) as caught:
        load_sequences(str(path), tokenizer, LIMITS)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("data", ["/no/such/folder", "missing.jsonl", "missing.jsonl.gz"])
def test_a_missing_file_is_not_sought_on_the_hub(data, tokenizer):
    with pytest.raises(ValueError, match=f"{data}.*no such file"):
        load_sequences(data, tokenizer, LIMITS)


def test_chats_need_a_template(bare, tmp_path):
    data = write(tmp_path / "x.jsonl", [{"messages": CHAT}])
    for load in (load_sequences, load_prompts):
        with pytest.raises(ValueError, match="chat template and the tokenizer has none; give data with"):
            load(data, bare, LIMITS)


def test_another_tokenizer_is_found_out(tokenizer, tmp_path):
    data = write(tmp_path / "x.jsonl", [{"messages": CHAT}])
    with pytest.raises(ValueError, match=r"row 1: token id \d+ is outside the target's vocabulary of 10"):
        load_sequences(data, tokenizer, Limits(vocab_size=10))


def test_datasets_is_needed_only_for_what_others_wrote(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    own = write(tmp_path / "own.jsonl", [{"p": [7], "g": [8, 9], "t": None}])
    assert len(load_sequences(own, tokenizer, LIMITS)) == 1
    with pytest.raises(ImportError, match=r"pip install 'hf-ddtree\[train\]'"):
        load_sequences(write(tmp_path / "x.jsonl", [{"messages": CHAT}]), tokenizer, LIMITS)
