"""The command line, on tiny models in folders."""

import json

import pytest
import torch
from stubs import VOCAB, make_drafter, make_target
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hf_ddtree import DFlashDraftModel
from hf_ddtree.benchmark.race import first_difference
from hf_ddtree.cli import main


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = make_target("llama")
    target.save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w2"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w0", bos_token="w1").save_pretrained(root / "target")
    return root


def generate(folders, *extra):
    model, drafter = str(folders / "target"), str(folders / "drafter")
    common = ["--dtype", "float32", "--max-new-tokens", "12", "--repeats", "1", "--device", "cpu"]
    return main(["generate", "w7 w3 w44", "--model", model, "--drafter", drafter, *common, *extra])


def test_generate_streams_races_and_checks(folders, capsys):
    assert generate(folders) == 0
    out = capsys.readouterr().out
    rows = json.loads(next(line for line in out.splitlines() if line.startswith("[{")))
    assert {row["method"] for row in rows} >= {"plain generate", "transformers' DFlash chain", "DDTree, budget 32"}
    assert all(row["identical"] == row["prompts"] == 1 for row in rows)
    assert "float32 check: 1 of 1 prompts, identical text" in out


def test_generate_without_a_race(folders, capsys):
    assert generate(folders, "--no-race") == 0
    assert "tokens a round" in capsys.readouterr().out


def test_errors_are_one_line(folders, capsys):
    assert generate(folders, "--budget", "-1") == 1
    error = capsys.readouterr().err
    assert "tree_budget" in error and "-1" in error and len(error.splitlines()) == 1


def test_train_makes_a_drafter_that_loads(folders, tmp_path, capsys):
    generator = torch.Generator().manual_seed(0)
    with open(tmp_path / "text.jsonl", "w") as out:
        for _ in range(40):
            tokens = torch.randint(2, VOCAB, (30,), generator=generator).tolist()
            out.write(json.dumps({"p": tokens[:6], "g": tokens[6:], "t": None}) + "\n")
    arguments = ["train", "--model", str(folders / "target"), "--data", str(tmp_path / "text.jsonl")]
    arguments += ["--out", str(tmp_path / "out"), "--minutes", "0.03", "--layers", "1", "--mask-token-id", "5"]
    assert main(arguments) == 0
    drafter = DFlashDraftModel.from_pretrained(tmp_path / "out")
    assert drafter.config.num_target_layers == 4 and drafter.dtype == torch.bfloat16
    assert main(arguments) == 0  # resumes, with no time left
    assert "resumed" in capsys.readouterr().out


def test_first_difference_measures_the_gap():
    target = make_target("llama")
    prompt = torch.tensor([[7, 3, 44]])
    plain = target.generate(prompt, do_sample=False, max_new_tokens=6)[0, 3:].tolist()
    assert first_difference(target, prompt, plain, plain) is None
    other = [*plain[:4], (plain[4] + 1) % VOCAB, plain[5]]
    difference = first_difference(target, prompt, other, plain)
    logits = target(torch.tensor([[7, 3, 44, *plain[:4]]])).logits[0, -1].detach()
    assert difference.position == 4
    assert difference.gap == pytest.approx(float(logits[plain[4]] - logits[other[4]]), rel=1e-4)
    assert difference.gap > difference.rounding
