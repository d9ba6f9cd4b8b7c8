"""`hf-ddtree train` given again: what it goes on from, what it refuses, and that a refusal costs nothing."""

import fcntl
import json
import re

import pytest
import torch
from accelerate import Accelerator
from chat import make_chat_tokenizer
from stubs import VOCAB, make_drafter, make_target
from test_train_command import COMMON, learnable_target, no_room, state_of

import hf_ddtree.training.log as log
import hf_ddtree.training.run as run
from hf_ddtree import DFlashDraftModel
from hf_ddtree.cli import main
from hf_ddtree.training.log import read_log


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "target"
    learnable_target().save_pretrained(path)
    make_chat_tokenizer().save_pretrained(path)
    return path


def write_data(path, seed=0):
    tokens = torch.randint(5, VOCAB, (40, 20), generator=torch.Generator().manual_seed(seed)).tolist()
    path.write_text("".join(json.dumps({"p": row[:6], "g": row[6:], "t": None}) + "\n" for row in tokens))
    return path


@pytest.fixture
def data(tmp_path):
    return write_data(tmp_path / "data.jsonl")


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


@pytest.fixture
def train(folder, data, out, capfd):
    """Trains for two steps, or as `extra` says; gives the exit status and the last line of stderr."""

    def call(*extra, data=data, model=folder):
        given = [] if data is None else ["--data", str(data)]
        status = main(["train", "--model", str(model), "--out", str(out), *given, *COMMON, "--steps", "2", *extra])
        return status, (capfd.readouterr().err.strip().splitlines() or [""])[-1]

    return call


def snapshot(out):
    """Every file's content and time."""
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in out.rglob("*.*") if path.is_file()}


OWN_TEXT = ["--batch-size", "8", "--answer-tokens", "8"]


def test_a_refused_command_costs_nothing_and_the_first_goes_on(train, out):
    assert train("--sequences", "24", *OWN_TEXT, data=None)[0] == 0
    before = snapshot(out)
    status, error = train("--sequences", "40", *OWN_TEXT, data=None)
    assert status == 1 and "22 sequences to train on, not 38" in error
    assert snapshot(out) == before
    assert (
        train(
            "--sequences",
            "24",
            *OWN_TEXT,
            data=None,
        )[0]
        == 0
    )


def test_a_longer_text_begins_with_the_same_lines(train, out):
    """The first command sees what it saw, whatever was written since."""
    first = ["--sequences", "21", *OWN_TEXT, "--steps", "3"]
    assert train(*first, data=None)[0] == 0
    checkpoint = (out / "training" / "checkpoint.pt").read_bytes()
    assert train("--sequences", "40", *OWN_TEXT, "--no-resume", data=None)[0] == 0
    assert len((out / "training" / "text.jsonl").read_text().splitlines()) >= 40
    (out / "training" / "checkpoint.pt").write_bytes(checkpoint)
    assert train(*first, data=None)[0] == 0


@pytest.mark.parametrize("other", ["taps", "text", "target", "fewer"])
def test_features_survive_a_refusal(other, train, out, data, tmp_path):
    taps = ["--target-layer-ids", "0", "1"]
    assert train(*taps)[0] == 0
    shards = {path: value for path, value in snapshot(out).items() if "features" in str(path)}
    assert len(shards) >= 2
    if other == "taps":
        status, error = train("--target-layer-ids", "0", "2")
        assert "`--target-layer-ids` [0, 1], not [0, 2]" in error
    elif other == "text":
        write_data(data, seed=1)
        status, error = train(*taps)
        assert "another text (`--data`" in error
    elif other == "fewer":
        status, error = train(*taps, "--sequences", "30")
        assert "38 sequences to train on, not 28" in error
    else:
        make_target("llama", seed=4).save_pretrained(tmp_path / "other")
        make_chat_tokenizer().save_pretrained(tmp_path / "other")
        status, error = train(*taps, model=tmp_path / "other")
        assert "another target (`--model`" in error
    assert status == 1 and "--no-resume" in error
    assert {path: value for path, value in snapshot(out).items() if "features" in str(path)} == shards
    assert train(*taps)[0] == (0 if other in ("taps", "target", "fewer") else 1)


def test_a_second_run_in_the_folder_is_refused(train, out):
    assert train()[0] == 0
    before = snapshot(out)
    with open(out / "training" / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        status, error = train()
    assert status == 1 and f"`--out {out}` belongs to another run" in error
    assert snapshot(out) == before
    assert train()[0] == 0


@pytest.mark.parametrize("how", ["no fcntl", "no locks on this disk"])
def test_where_nothing_can_be_locked_runs_start_all_the_same(how, train, monkeypatch):
    def fail(*args):
        raise OSError(95, "Operation not supported")

    if how == "no fcntl":
        monkeypatch.setattr(run, "fcntl", None)
    else:
        monkeypatch.setattr(run.fcntl, "flock", fail)
    assert train()[0] == 0


def test_an_out_that_is_a_file_is_refused(train, out):
    out.write_text("mine")
    status, error = train()
    assert status == 1 and f"`--out {out}` is a file" in error


# The log


def steps_of(out):
    return [record["step"] for record in read_log(out / "training" / "log.jsonl")]


def test_the_log_is_this_runs(train, out):
    assert train("--steps", "4")[0] == 0
    assert steps_of(out) == [1, 2, 3, 4]
    assert train("--steps", "3", "--no-resume")[0] == 0
    assert steps_of(out) == [1, 2, 3]
    path = out / "training" / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 4, "loss": 1.0}\n{"step": 3, "lo')
    assert train("--steps", "5")[0] == 0
    assert steps_of(out) == [1, 2, 3, 4, 5]
    assert len(re.findall(r"^\| \d \|", (out / "README.md").read_text(), re.MULTILINE)) == 5


@pytest.mark.parametrize("line", ['{"step": 1, "lo', "[1]", '{"loss": 1.0}', "\udcff"])
def test_torn_lines_of_the_log_are_passed_over(line, tmp_path):
    (tmp_path / "log.jsonl").write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n', errors="surrogateescape")
    assert read_log(tmp_path / "log.jsonl") == [{"step": 1}, {"step": 2}]


def test_a_full_disk_costs_the_record_only(train, out, monkeypatch, caplog):
    monkeypatch.setattr(log.Path, "replace", no_room)
    assert train("--cache-gb", "0")[0] == 0
    assert "log.jsonl could not be written" in caplog.text and not list(out.rglob("*.partial"))


def test_a_diverged_run_keeps_the_good_checkpoint(train, out):
    assert train()[0] == 0
    before = (out / "training" / "checkpoint.pt").read_bytes()
    status, error = train("--steps", "8", "--learning-rate", "1e30")
    assert status == 1 and "lower `--learning-rate`" in error
    assert (out / "training" / "checkpoint.pt").read_bytes() == before
    assert train("--steps", "8")[0] == 0 and state_of(out)["step"] == 8


# Going on with a drafter


@pytest.fixture
def go_on(folder, data, out, tmp_path):
    """Trains a drafter with a transition of `own` rank further; gives its rank afterwards."""

    def call(own, *extra):
        make_drafter(make_target("llama"), num_target_layers=4, transition_rank=own).save_pretrained(tmp_path / "own")
        arguments = ["train", "--model", folder, "--data", data, "--out", out, "--start-from", tmp_path / "own"]
        arguments += ["--steps", "1", "--rows", "4", "--dtype", "float32", "--cpu", "--min-count", "1", *extra]
        assert main([str(argument) for argument in arguments]) == 0
        return DFlashDraftModel.from_pretrained(out).config.transition_rank

    return call


@pytest.mark.parametrize("asked, rank", [([], 12), ([12], 12), ([0], 0), ([20], 20)])
def test_a_trained_transition_is_dropped_only_when_asked_for(asked, rank, go_on, caplog):
    assert go_on(12, *(["--transition-rank", *asked] if asked else [])) == rank
    assert ("the 12 of the transition" in caplog.text) == (rank != 12)


def test_a_drafter_without_a_transition_gets_one(go_on):
    assert go_on(0) == run.TRANSITION_RANK


def test_a_drafter_that_is_not_there_is_named(folder, out, capsys):
    arguments = ["--model", str(folder), "--out", str(out), "--start-from", "./nowhere", "--cpu", "--dtype", "float32"]
    assert main(["train", *arguments]) == 1
    assert "`--start-from ./nowhere` can't be loaded" in capsys.readouterr().err and not out.exists()


# What is said and written


def test_the_card_names_this_folder(train, out, tmp_path, folder, data, monkeypatch):
    out.mkdir()
    (out / "README.md").write_bytes(b"caf\xe9")
    monkeypatch.chdir(out)
    assert main(["train", "--model", str(folder), "--data", str(data), "--out", ".", *COMMON, "--steps", "1"]) == 0
    assert (out / "README.md").read_bytes() == b"caf\xe9"
    card = (out / "README.generated.md").read_text()
    assert 'from_pretrained("out"' in card and "base_model" not in card and "# DFlash drafter for target" in card


def test_a_short_answer_is_refused_by_its_flag(train):
    status, error = train("--answer-tokens", "1", data=None)
    assert status == 1 and "`--answer-tokens` is 1" in error


def test_processes_wait_for_text_as_long_as_it_takes(train, monkeypatch):
    handlers = []

    class Watched(Accelerator):
        def __init__(self, *args, kwargs_handlers, **kwargs):
            handlers.extend(kwargs_handlers)
            super().__init__(*args, kwargs_handlers=kwargs_handlers, **kwargs)

    monkeypatch.setattr(run, "Accelerator", Watched)
    assert train()[0] == 0
    assert [handler.timeout for handler in handlers] == [run.PATIENCE]
