"""The commands about drafters end to end: from nothing to a drafter that pays, after kills and full disks too."""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from chat import END, make_chat_tokenizer
from safetensors.torch import load_file
from stubs import decode, greedy, make_target
from transformers import AutoModelForCausalLM, AutoTokenizer

import hf_ddtree.training.checkpoint as checkpoint
import hf_ddtree.training.features as features
from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.cli import main
from hf_ddtree.drafting.corrections import BigramTable
from hf_ddtree.training.data import read_sequences

ROOT = Path(__file__).parent.parent
COMMON = ["--layers", "2", "--transition-rank", "16", "--rows", "8", "--blocks", "16", "--min-count", "1"]
COMMON += ["--dtype", "float32", "--cpu"]


@torch.no_grad()
def learnable_target():
    """Its text is mostly a function of the last token or two, and its turns end."""
    target = make_target("llama", initializer_range=0.1, eos_token_id=END)
    generator = torch.Generator().manual_seed(0)
    target.lm_head.weight.normal_(0, 0.7, generator=generator)
    target.model.embed_tokens.weight.normal_(0, 1, generator=generator)
    target.lm_head.weight[END] *= 1.5
    target.generation_config.eos_token_id = END
    return target


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target with its tokenizer."""
    path = tmp_path_factory.mktemp("target")
    learnable_target().save_pretrained(path)
    make_chat_tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """The folder of a drafter that began as nothing but its target."""
    out = tmp_path_factory.mktemp("trained") / "drafter"
    arguments = ["train", "--model", str(folder), "--out", str(out), "--sequences", "160", "--answer-tokens", "32"]
    assert main([*arguments, "--steps", "120", *COMMON]) == 0
    return out


@pytest.fixture(scope="module")
def text(trained):
    """What the target wrote."""
    return trained / "training" / "text.jsonl"


@pytest.fixture(scope="module")
def few(text, tmp_path_factory):
    """The text's first 40 lines."""
    path = tmp_path_factory.mktemp("few") / "few.jsonl"
    path.write_text("".join(text.read_text().splitlines(keepends=True)[:40]))
    return path


@pytest.fixture
def train(folder, few, tmp_path, capfd):
    """Trains for six steps, or as `extra` says; gives the exit status and what went to stderr, bars left out."""

    def run(*extra, data=few, model=folder, out=tmp_path / "out"):
        given = [] if data is None else ["--data", str(data)]
        status = main(["train", "--model", str(model), "--out", str(out), *given, *COMMON, "--steps", "6", *extra])
        return status, "\n".join(line for line in capfd.readouterr().err.splitlines() if "%|" not in line)

    return run


def state_of(out):
    return torch.load(out / "training" / "checkpoint.pt", weights_only=True)


def assert_same_weights(one, other):
    one, other = (load_file(each / "model.safetensors") for each in (one, other))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# From nothing to a drafter


def figures_of(out):
    """The card's table of figures."""
    return {name: float(value) for name, value in re.findall(r"\| ([\w-]+) \| ([\d.]+) \|\n", card_of(out))}


def card_of(out):
    return (out / "README.md").read_text()


def test_more_than_two_tokens_per_round_on_held_text(trained):
    figures = figures_of(trained)
    log = [json.loads(line) for line in (trained / "training" / "log.jsonl").read_text().splitlines()]
    assert figures["tree-16"] > 2 and figures["chain"] > 1.5
    assert len(log) == 10 and log[-1]["step"] == 120
    assert log[-1]["tree-16"] > 2 > log[0]["tree-16"] and log[-1]["loss"] < 0.6 * log[0]["loss"]


def test_the_transition_pays(trained):
    figures = figures_of(trained)
    assert figures["tree-16"] > 1.12 * figures["tree-16-marginal"]


def test_real_decoding_is_as_fast_and_exact(folder, trained, text):
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    drafter = DFlashDraftModel.from_pretrained(trained)
    config = DDTreeConfig.from_pretrained(trained, max_new_tokens=32, do_sample=False, return_dict_in_generate=True)
    tokens, rounds = 0, 0
    for sequence in read_sequences(text)[1]:
        prompt = sequence.tokens[None, : sequence.prompt_length]
        result = target.generate(prompt, assistant_model=drafter, generation_config=config)
        assert result.sequences.tolist() == greedy(target, prompt, 32).tolist()
        tokens, rounds = tokens + sum(result.acceptance_lengths[1:]), rounds + result.rounds - 1
    assert tokens > 2 * rounds > 0


def test_the_folder_is_ready_for_the_hub(folder, trained):
    names = {path.name for path in trained.iterdir()}
    assert names == {"config.json", "model.safetensors", "generation_config.json", "README.md", "training"}
    assert type(DDTreeConfig.from_pretrained(trained)) is DDTreeConfig
    drafter = DFlashDraftModel.from_pretrained(trained)
    assert drafter.dtype == torch.float32 and drafter.config.transition_rank == 16
    assert len(drafter.config.depth_temperatures) == 7
    card = card_of(trained)
    assert card.startswith("---\nlibrary_name: transformers\n") and "base_model" not in card and folder.name in card
    assert f'DFlashDraftModel.from_pretrained("{trained.name}"' in card and "rank 16" in card


def test_text_is_the_targets_own(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    lines = [json.loads(line) for line in text.read_text().splitlines()]
    assert len(lines) >= 160 and {line["t"] for line in lines} == {None, 0.7, 1.0}
    assert all(tokenizer.decode(line["p"]).endswith("<end>\n<assistant>") for line in lines)


def test_a_card_that_somebody_wrote_stays(train, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "README.md").write_text("Mine.")
    assert train()[0] == 0
    assert card_of(tmp_path / "out") == "Mine."
    assert "## Tokens per round" in (tmp_path / "out" / "README.generated.md").read_text()
    assert train()[0] == 0 and card_of(tmp_path / "out") == "Mine."


# Kills


def start(*arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([sys.executable, *map(str, arguments)], cwd=ROOT, env=environment, **quiet)


def wait_for_step(step, out, process):
    while not (out / "training" / "checkpoint.pt").exists() or state_of(out)["step"] < step:
        assert process.poll() is None, f"ended with {process.returncode} before step {step}"
        time.sleep(0.2)


def test_a_killed_run_ends_with_the_same_weights(folder, few, train, tmp_path):
    """Killed at a random step, in the middle of writing a checkpoint as well as not."""
    long = ["--steps", "40"]
    assert train(*long, out=tmp_path / "whole")[0] == 0
    arguments = ["train", "--model", folder, "--data", few, "--out", tmp_path / "parts", *COMMON, *long]
    process = start(ROOT / "tests" / "train_driver.py", *arguments)
    wait_for_step(random.randint(1, 20), tmp_path / "parts", process)
    process.kill()
    process.wait()
    assert 1 <= state_of(tmp_path / "parts")["step"] < 40
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert train(*long, out=tmp_path / "parts")[0] == 0
    assert state_of(tmp_path / "parts")["losses"] == state_of(tmp_path / "whole")["losses"]
    assert_same_weights(tmp_path / "parts", tmp_path / "whole")


def test_a_finished_run_is_published_again_without_training(train, tmp_path, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(DFlashDraftModel, "save_pretrained", no_room)
        status, errors = train()
        assert status == 1 and "No space left" in errors
    before = state_of(out)["drafter"]
    assert train()[0] == 0
    after = load_file(out / "model.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


# Several processes, several forwards per step


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    """20 steps from nothing by one process, and the arguments."""
    out = tmp_path_factory.mktemp("one") / "out"
    arguments = ["train", "--model", str(folder), "--sequences", "24", "--batch-size", "24", "--answer-tokens", "16"]
    arguments += [*COMMON, "--steps", "20"]
    assert main([*arguments, "--out", str(out)]) == 0
    return out, arguments


@pytest.fixture(scope="module")
def halves(written, tmp_path_factory):
    """The same with two forwards per step."""
    out = tmp_path_factory.mktemp("halves") / "out"
    assert main([*written[1], "--out", str(out), "--accumulate", "2"]) == 0
    return out


def test_accumulated_steps_are_whole_steps(written, halves):
    """Sums in another order differ by 1e-7; Muon iterates in bfloat16, which makes that 8e-4 in the weights after 20
    steps (measured).
    """
    one, other = state_of(written[0]), state_of(halves)
    assert other["losses"][:2] == pytest.approx(one["losses"][:2], rel=1e-5)
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-3)
    for name, weight in one["drafter"].items():
        torch.testing.assert_close(other["drafter"][name], weight, rtol=0, atol=3e-3, msg=name)


def test_two_processes_are_two_forwards_per_step_bit_for_bit(written, halves, tmp_path):
    """The text is written by the first; gradients are summed in the same order."""
    out = tmp_path / "out"
    launcher = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "-m", "hf_ddtree.cli"]
    assert start(*launcher, *written[1], "--out", out).wait() == 0
    assert (out / "training" / "text.jsonl").read_text() == (halves / "training" / "text.jsonl").read_text()
    assert state_of(out)["losses"] == state_of(halves)["losses"] != state_of(written[0])["losses"]
    assert_same_weights(out, halves)


def test_gradients_of_several_forwards_are_those_of_one(train, tmp_path, monkeypatch):
    seen, clip = [], Accelerator.clip_grad_norm_

    def watched(self, parameters, *args):
        parameters = list(parameters)
        seen.append([parameter.grad.clone() for parameter in parameters])
        return clip(self, parameters, *args)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", watched)
    for forwards in ("1", "2", "8"):
        assert train("--steps", "1", "--accumulate", forwards, out=tmp_path / forwards)[0] == 0
    seen = seen[::2]  # the other half only checks that a second step could follow
    assert len(seen) == 3 and any(gradient.any() for gradient in seen[0])
    for other in seen[1:]:
        torch.testing.assert_close(other, seen[0], rtol=1e-4, atol=1e-5)


# Refusals: each with its remedy, in one line

BAD_OPTIONS = {
    "layer ids": (["--target-layer-ids", "0", "4"], r"`--target-layer-ids` is \[0, 4\].*0\.\.3"),
    "layer ids twice": (["--target-layer-ids", "1", "1"], r"`--target-layer-ids`.*each taken once"),
    "layers": (["--layers", "4"], r"`--layers` is 4.*1 to 3"),
    "no layers": (["--layers", "0"], r"`--layers` is 0.*1 to 3"),
    "block": (["--block-size", "1"], r"`--block-size` is 1.*at least 2"),
    "rows": (["--rows", "7", "--accumulate", "2"], r"`--rows` is 7.*multiple of 2"),
    "no rows": (["--rows", "0"], r"`--rows` is 0.*above 0"),
    "no blocks": (["--blocks", "0"], r"`--blocks` is 0.*above 0"),
    "no forwards": (["--accumulate", "0"], r"`--accumulate` is 0.*above 0"),
    "rank": (["--transition-rank", "-1"], r"`--transition-rank` is -1"),
    "mask token": (["--mask-token-id", "64"], r"`--mask-token-id` is 64.*0\.\.63"),
    "negative mask token": (["--mask-token-id", "-1"], r"`--mask-token-id` is -1.*0\.\.63"),
    "steps": (["--steps", "0"], r"`--steps` is 0.*above 0"),
    "rare tokens": (["--min-count", "100000"], r"`--min-count` is 100000.*give more data"),
    "one sequence": (["--sequences", "1"], r"0 sequences to train on and 1 held out"),
    "no data": (["--data", "nowhere.jsonl"], r"`--data nowhere\.jsonl`: there is no such file"),
}


@pytest.mark.parametrize("options, message", BAD_OPTIONS.values(), ids=BAD_OPTIONS)
def test_bad_options_are_refused_with_a_remedy(train, options, message):
    status, errors = train(*options)
    assert status == 1 and re.search("hf-ddtree train: .*" + message, errors)
    assert "Traceback" not in errors


def test_rows_are_checked_before_text_is_written(train, tmp_path):
    assert train("--rows", "7", "--accumulate", "2", data=None)[0] == 1
    assert not (tmp_path / "out").exists()


def test_empty_data_is_refused(train, tmp_path):
    (tmp_path / "empty.jsonl").touch()
    status, errors = train(data=tmp_path / "empty.jsonl")
    assert status == 1 and "is empty; give a file with text" in errors


def test_chats_without_a_template_are_refused(train, tmp_path):
    learnable_target().save_pretrained(tmp_path / "target")
    make_chat_tokenizer(template=None).save_pretrained(tmp_path / "target")
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "hello you"}]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    status, errors = train(data=tmp_path / "chats.jsonl", model=tmp_path / "target")
    assert status == 1 and "needs a chat template" in errors and "give data with a text column" in errors


def test_data_of_another_vocabulary_is_refused(train, tmp_path):
    (tmp_path / "other.jsonl").write_text(json.dumps({"p": [1, 2], "g": [3, 64], "t": None}) + "\n")
    status, errors = train(data=tmp_path / "other.jsonl")
    assert status == 1 and "token id 64" in errors and "of this target" in errors


def test_a_diverging_run_says_what_to_lower(train):
    status, errors = train("--learning-rate", "1e30")
    assert status == 1 and re.search(r"The loss is (nan|inf).*lower `--learning-rate`.*--no-resume", errors)
    assert train("--no-resume")[0] == 0


def test_a_run_goes_on_with_a_lower_learning_rate(train, tmp_path):
    """As the error of a diverging run tells its reader to do."""
    assert train()[0] == 0
    assert train("--steps", "8", "--learning-rate", "1e-3")[0] == 0
    assert state_of(tmp_path / "out")["step"] == 8


@pytest.mark.parametrize(
    "options, named",
    [
        (["--transition-rank", "8"], "`--transition-rank` 16, not 8"),
        (["--block-size", "6"], "`--block-size` 8, not 6"),
        (["--layers", "1"], "`--layers` 2, not 1"),
        (["--rows", "4"], "`--rows` 8, not 4"),
        (["--seed", "3"], "`--seed` 0, not 3"),
        (["--sequences", "30"], "38 sequences to train on, not 28"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_can_be_overridden(train, tmp_path, options, named):
    assert train("--steps", "2")[0] == 0
    before = (tmp_path / "out" / "training" / "checkpoint.pt").read_bytes()
    status, errors = train(*options)
    assert status == 1 and named in errors and "--no-resume" in errors
    assert (tmp_path / "out" / "training" / "checkpoint.pt").read_bytes() == before
    assert train(*options, "--steps", "1", "--no-resume")[0] == 0
    assert state_of(tmp_path / "out")["step"] == 1


@pytest.mark.parametrize("keep", [0, 100, -100])
def test_a_torn_checkpoint_is_refused_with_a_remedy(train, tmp_path, keep):
    path = tmp_path / "out" / "training" / "checkpoint.pt"
    assert train("--steps", "1")[0] == 0
    path.write_bytes(path.read_bytes()[:keep])
    status, errors = train()
    assert status == 1 and "checkpoint.pt is no checkpoint" in errors and "--no-resume" in errors
    assert train("--steps", "1", "--no-resume")[0] == 0


# Full disks


def no_room(*args, **kwargs):
    raise OSError(28, "No space left on device")


def test_no_room_for_features_slows_the_run_only(train, tmp_path, monkeypatch, caplog):
    assert train(out=tmp_path / "kept")[0] == 0
    monkeypatch.setattr(features, "save_file", no_room)
    assert train(out=tmp_path / "out")[0] == 0
    assert "No space left" in caplog.text and "--cache-gb" in caplog.text
    assert not list((tmp_path / "out" / "training" / "features").glob("shard-*"))
    for name, weight in state_of(tmp_path / "kept")["drafter"].items():
        torch.testing.assert_close(state_of(tmp_path / "out")["drafter"][name], weight, rtol=0, atol=3e-3, msg=name)


def test_no_room_for_a_checkpoint_keeps_the_last_one(train, tmp_path, monkeypatch, caplog):
    """The run goes on to its end, which it can't keep, and says so; with room again nothing is lost."""
    assert train("--steps", "4", out=tmp_path / "out")[0] == 0
    path = tmp_path / "out" / "training" / "checkpoint.pt"
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", no_room)
        status, errors = train("--steps", "8")
    assert status == 1 and "could not be written" in errors and "make room" in errors
    assert "Training goes on" in caplog.text
    assert path.read_bytes() == before and [each.name for each in path.parent.glob("*.partial")] == []
    assert train("--steps", "8")[0] == 0 and state_of(tmp_path / "out")["step"] == 8


# The other commands


@pytest.fixture(scope="module")
def table(folder, text, tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "new" / "table.safetensors"
    assert main(["table", "--model", str(folder), "--data", str(text), "--out", str(path)]) == 0
    return path


def test_a_table_of_the_training_text_decodes_exactly(folder, trained, text, table):
    pairs = {
        pair
        for sequence in read_sequences(text)[0]
        for pair in zip(sequence.tokens[:-1].tolist(), sequence.tokens[1:].tolist(), strict=True)
    }
    assert BigramTable.load(table, 64).keys.tolist() == sorted(64 * parent + child for parent, child in pairs)
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompt = read_sequences(text)[1][0]
    ids = prompt.tokens[None, : prompt.prompt_length]
    drafter = DFlashDraftModel.from_pretrained(trained)
    assert decode(target, drafter, ids, max_new_tokens=32, draft_table=str(table)).tolist() == (
        greedy(target, ids, 32).tolist()
    )


def test_inspect_says_what_was_trained(folder, trained, capsys):
    assert main(["inspect", str(trained), "--model", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "path-conditional, rank 16" in out and "by depth" in out and re.search(r"fits +yes, llama", out)


def test_export_writes_what_other_engines_know(trained, tmp_path, capsys):
    """All but the transition, and the calibration that goes with it."""
    arguments = ["export", str(trained), str(tmp_path / "out"), "--layout", "published"]
    assert main(arguments) == 0
    own, exported = (load_file(each / "model.safetensors") for each in (trained, tmp_path / "out"))
    assert exported.keys() == {name for name in own if not name.startswith("transition")}
    assert all(torch.equal(weight, own[name]) for name, weight in exported.items())
    assert DFlashDraftModel.from_pretrained(tmp_path / "out").transition is None
    assert main(arguments) == 1 and "new or an empty folder" in capsys.readouterr().err


def test_bench_drafter_measures_every_source(folder, trained, text, table, tmp_path, capsys):
    paths = ["--model", folder, "--drafter", trained, "--data", text, "--table", table, "--json", tmp_path / "out.json"]
    assert main(["bench", "drafter", *map(str, paths), "--dtype", "float32"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record == json.loads((tmp_path / "out.json").read_text())
    lengths = {(row["source"], row["budget"]): row["acceptance_length"] for row in record["acceptance"]}
    assert {name for name, _ in lengths} >= {"running text", "bigram table", "all three"}
    assert lengths["transition", 16] > 1.12 * lengths["marginals alone", 16]
    assert all(lengths["all three", budget] > lengths["marginals alone", budget] for budget in (16, 32, 64))
    assert set(record["reliability"]) == {"uncalibrated", "calibrated"}
    assert all(sum(each["nodes"] for each in bins) > 100 for bins in record["reliability"].values())
