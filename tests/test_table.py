"""Files of bigram tables that are none, and `hf-ddtree table` where it has nothing to count or nowhere to write."""

import json

import pytest
import torch
from chat import make_chat_tokenizer
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from stubs import make_target

import hf_ddtree.training.bigrams as bigrams
from hf_ddtree.cli import main
from hf_ddtree.drafting.corrections import BigramTable
from hf_ddtree.training.bigrams import count_bigrams, save_table

EMPTY = torch.zeros(0)
MALFORMED = {
    "no pairs": {"keys": EMPTY.long(), "values": EMPTY},
    "no parents": {"parents": EMPTY.long(), "unseen": EMPTY},
    "values cut short": {"values": torch.zeros(3)},
    "unseen cut short": {"unseen": torch.zeros(1)},
    "two-dimensional keys": {"keys": torch.arange(9)[None], "values": torch.zeros(1, 9)},
    "keys out of order": {"keys": torch.arange(9).flip(0)},
    "keys twice": {"keys": torch.zeros(9).long()},
    "keys of another type": {"keys": torch.arange(9).float()},
    "short keys": {"keys": torch.arange(9).int()},
    "keys beyond the vocabulary": {"keys": torch.arange(9) + 1016},
    "negative parents": {"parents": torch.arange(9) - 1},
    "parents beyond the vocabulary": {"parents": torch.arange(9) + 24},
    "values of whole numbers": {"values": torch.zeros(9).long()},
    "values that are none": {"values": torch.full((9,), torch.nan)},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED)
def test_malformed_tables_are_refused(changes, tmp_path):
    path = tmp_path / "table.safetensors"
    save_table(count_bigrams([torch.arange(10)], 32), path)
    assert len(BigramTable.load(path, 32).keys) == 9
    save_file({**load_file(path), **changes}, path, metadata={"vocab_size": "32"})
    with pytest.raises(ValueError, match=r"`draft_table` .*table\.safetensors.*no bigram table.*`hf-ddtree table`"):
        BigramTable.load(path, 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("target")
    make_target("llama").save_pretrained(path)
    make_chat_tokenizer().save_pretrained(path)
    return path


def table(folder, data, out):
    data.write_text(json.dumps({"p": [7], "g": [8, 9], "t": None}) + "\n")
    return main(["table", "--model", str(folder), "--data", str(data), "--out", str(out)])


def test_a_row_held_out_is_said_to_be_the_reason(folder, tmp_path, capsys):
    assert table(folder, tmp_path / "one.jsonl", tmp_path / "table.safetensors") == 1
    error = capsys.readouterr().err
    assert "one.jsonl` has 1 usable rows, all of those held out (every 20th from the first)" in error


def test_a_folder_to_write_to_is_refused(folder, tmp_path, capsys):
    (tmp_path / "out").mkdir()
    assert table(folder, tmp_path / "one.jsonl", tmp_path / "out") == 1
    assert "out` is a folder; give the .safetensors file" in capsys.readouterr().err


def test_a_full_disk_is_one_line(folder, tmp_path, capsys, monkeypatch):
    """Safetensors has an error of its own for it."""

    def fail(*args, **kwargs):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(bigrams, "save_file", fail)
    data = tmp_path / "two.jsonl"
    data.write_text((json.dumps({"p": [7], "g": [8, 9], "t": None}) + "\n") * 2)
    arguments = ["--model", str(folder), "--data", str(data), "--out", str(tmp_path / "table.safetensors")]
    assert main(["table", *arguments]) == 1
    assert capsys.readouterr().err == "hf-ddtree table: No space left on device\n"
