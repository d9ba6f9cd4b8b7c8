"""`hf-ddtree bench race` and `bench build`, on tiny models in folders."""

import json
import sys

import pytest
import torch
from chat import make_chat_tokenizer
from fake_graph import FakeGraph
from stubs import decode, make_drafter, make_target

from hf_ddtree import DDTreeConfig, compiled
from hf_ddtree.benchmark import machine, measuring, methods, prompt_sets
from hf_ddtree.benchmark.meters import ForwardMeter, PeakMemory, committed_lengths
from hf_ddtree.cli import main

PLAIN = "plain generate"
REFERENCE = """
import torch
def generate(target, drafter, input_ids, max_new_tokens):
    for _ in range(max_new_tokens):
        logits = target(input_ids).logits[:, -1]
        input_ids = torch.cat([input_ids, {choice}], dim=1)
    return input_ids
"""
GREEDY, OTHER = "logits.argmax(-1, keepdim=True)", "logits.argmin(-1, keepdim=True)"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = make_target("llama")
    target.save_pretrained(root / "target")
    make_chat_tokenizer().save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    small = make_target("llama", seed=5, num_hidden_layers=1)
    small.save_pretrained(root / "assistant")
    return root


@pytest.fixture
def spoil(monkeypatch):
    """A function of a method's name, after which the first text of that method counts as another one."""

    def spoil(name):
        real = measuring.differing_texts
        monkeypatch.setattr(measuring, "differing_texts", lambda *models: {**real(*models), name: [0]})

    return spoil


def race(folders, *extra, default=False):
    paths = ["--model", folders / "target", "--drafter", folders / "drafter", "--device", "cpu", "--dtype", "float32"]
    common = ["--prompts", "2", "--check", "1", "--max-new-tokens", "10", "--budgets", "4", "8"]
    return main(["bench", *([] if default else ["race"]), *map(str, paths), *common, *map(str, extra)])


def record_of(capsys):
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_race_is_what_bench_does_and_checks_texts_first(folders, capsys, tmp_path):
    extra = ["--assistant", folders / "assistant", "--lookup", "--json", tmp_path / "race.json"]
    assert race(folders, *extra, default=True) == 0
    out = capsys.readouterr().out
    assert out.index("float32 check") < out.index("tokens/s")
    assert "texts of DDTree, identical to plain generate's" in out and "part from plain's" not in out
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads((tmp_path / "race.json").read_text())
    rows = {row["method"]: row for row in record["rows"]}
    chains = ["transformers' DFlash chain", "DDTree code, chain"]
    others = ["transformers' assisted decoding", "transformers' prompt lookup", "DDTree, lookup"]
    assert {PLAIN, *chains, *others, "DDTree, budget 4", "DDTree, budget 8", methods.AUTO} == set(rows)
    measured = [row for row in rows.values() if "failure" not in row]
    assert all(row["identical"] == row["prompts"] == 2 and row["tokens"] == 20 for row in measured)
    assert all(row["p20"] <= row["tokens_per_second"] <= row["p80"] for row in measured)
    assert all(sum(row["histogram"].values()) for row in measured)
    assert rows[PLAIN]["histogram"] == {"1": 18} and rows[PLAIN]["acceptance_length"] == rows[PLAIN]["speed_up"] == 1
    assert rows[chains[0]]["histogram"] == rows[chains[1]]["histogram"]


def test_record_says_what_was_measured_on_what(folders, capsys):
    assert race(folders, "--methods", "budget 4") == 0
    record = record_of(capsys)
    assert [row["method"] for row in record["rows"]] == [PLAIN, "DDTree, budget 4"]
    assert record["hardware"]["cores"] >= 1 and record["hardware"]["cpu"] and record["hardware"]["threads"] >= 1
    assert record["versions"]["torch"] == torch.__version__ and "commit" in record["versions"]
    assert record["command"].startswith("hf-ddtree bench race --model") and record["prompts_from"] == "shipped"
    assert record["weights_mb"]["target"] > 0 and record["prompt_tokens"]["least"] > 0
    row = record["rows"][1]
    assert set(row["stage_ms"]) == {"draft", "build", "verify", "accept", "commit"} and 0 < row["overhead"] < 1
    assert all(milliseconds > 0 for milliseconds in row["forward_ms"].values())
    assert row["forward_ms"]["target"] <= row["stage_ms"]["verify"]
    assert row["over_plain_mb"] is not None or not sys.platform.startswith("linux")


def test_another_text_stops_the_race_before_any_speed(folders, capsys, spoil, tmp_path):
    spoil("DDTree, budget 4")
    assert race(folders, "--json", tmp_path / "race.json") == 1
    out = capsys.readouterr().out
    assert "DIFFERENT TEXT" in out and "DDTree, budget 4: differs after prompt 1" in out
    assert "tokens/s" not in out and not (tmp_path / "race.json").exists()


def test_texts_are_compared_one_by_one():
    target = make_target("llama")
    prompt = {"input_ids": torch.tensor([[7, 3, 44]]), "attention_mask": torch.ones(1, 3, dtype=torch.int64)}
    plain = methods.by_generate(target, DDTreeConfig(max_new_tokens=4, do_sample=False, drafter="lookup"))

    def wrong(inputs, synchronize):
        text = plain(inputs, synchronize)
        return torch.cat([text[:, :-1], (text[:, -1:] + 1) % 64], dim=1)

    def broken(inputs, synchronize):
        raise RuntimeError("no kernel")

    racers = [methods.Contestant(PLAIN, plain), methods.Contestant("same", plain, ours=True)]
    racers += [methods.Contestant("wrong", wrong, ours=True), methods.Contestant("broken", broken)]
    different = measuring.differing_texts(target, racers, [prompt])
    assert different == {"same": [], "wrong": [0], "broken": [0]}
    racers[3] = methods.Contestant("broken", broken, ours=True)
    with pytest.raises(RuntimeError, match="no kernel"):
        measuring.differing_texts(target, racers, [prompt])


def test_a_rival_that_fails_is_left_out(folders, capsys, monkeypatch):
    real = measuring._call

    def call(target, contestant, *others):
        if "lookup" in contestant.name:
            raise RuntimeError("no kernel\nfor this device")
        real(target, contestant, *others)

    monkeypatch.setattr(measuring, "_call", call)
    assert race(folders, "--methods", "lookup", "budget 4") == 0
    out = capsys.readouterr().out
    assert "left out: RuntimeError: no kernel" in out and "for this device" not in out.split("{")[0]
    assert json.loads(out.splitlines()[-1])["rows"][1]["failure"] == "RuntimeError: no kernel"


def test_figures_are_written(folders, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    assert race(folders, "--plot", tmp_path / "figures") == 0
    files = {file.name: file.stat().st_size for file in (tmp_path / "figures").iterdir()}
    names = ("speed_up", "acceptance", "histogram", "stages")
    assert set(files) == {f"{name}.{ending}" for name in names for ending in ("png", "svg")}
    assert min(files.values()) > 2000


@pytest.mark.parametrize(("choice", "same"), [(GREEDY, 2), (OTHER, 0)], ids=["same text", "other text"])
def test_another_implementation_races_along(folders, capsys, tmp_path, choice, same):
    (tmp_path / "theirs.py").write_text(REFERENCE.format(choice=choice))
    sys.modules.pop("theirs", None)
    extra = ["--methods", "reference", "--reference", tmp_path, "--reference-module", "theirs"]
    assert race(folders, *extra) == 0
    row = record_of(capsys)["rows"][1]
    assert row["method"] == f"reference {tmp_path.name}" and row["identical"] == same
    assert len(row["differences"]) == 2 - same and row["tokens_per_second"] > 0
    assert str(tmp_path) not in sys.path


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (["--reference", "nowhere"], "no folder"),
        (["--reference", "."], "generate(target, drafter"),
        (["--methods", "beam"], '"DDTree, budget 4"'),
        (["--prompts-from", "nowhere"], "gsm8k"),
        (["--assistant", "nowhere"], "no such folder"),
        (["--json", "nowhere/race.json"], "no folder"),
        (["--budgets", "0"], "not 1 or more"),
    ],
    ids=["no folder", "no module", "no method", "no set", "no assistant", "no place", "no budget"],
)
def test_bad_options_are_one_line(folders, capsys, extra, named):
    try:
        assert race(folders, *extra) == 1
    except SystemExit as stop:
        assert stop.code == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in error and extra[1].split("/")[0] in error


def test_a_dflash_drafter_is_no_assistant(folders, capsys):
    assert race(folders, "--assistant", folders / "drafter") == 1
    assert "it is no causal LM" in capsys.readouterr().err


@pytest.mark.parametrize("drafter", ["lookup", "assistant"])
def test_drafters_of_all_kinds_race(folders, capsys, drafter):
    name = drafter if drafter == "lookup" else folders / drafter
    assert race(folders, "--drafter", name, "--methods", "budget", "auto") == 0
    rows = record_of(capsys)["rows"]
    assert [row["method"] for row in rows][:3] == [PLAIN, "DDTree, budget 4", "DDTree, budget 8"]
    assert all(row["identical"] == 2 for row in rows[:3])


def test_context_lengthens_prompts(folders, capsys):
    tokenizer = make_chat_tokenizer()
    lengths = [
        prompt_sets.encode_at(tokenizer, "why", context, torch.device("cpu"))["input_ids"].shape[1]
        for context in (None, 2, 200)
    ]
    assert lengths[0] == lengths[1] < 20 and lengths[2] == 200
    assert race(folders, "--methods", "budget 4", "--context", "300", "--prompts-from", "shipped") == 0
    assert record_of(capsys)["prompt_tokens"]["least"] >= 300


def test_shipped_prompts_are_many_and_distinct():
    rows = [json.loads(line) for line in prompt_sets.SHIPPED_FILE.read_text().splitlines()]
    prompts = prompt_sets.load_prompts("shipped", 1000)
    assert len(set(prompts)) == len(prompts) == len(rows) >= 40
    assert {row["kind"] for row in rows[:4]} == {"chat", "code", "maths", "summarising"}
    passages = [row["prompt"].split("\n\n", 1)[1] for row in rows if row["kind"] == "summarising"]
    assert all(80 <= len(passage.split()) <= 150 for passage in passages)


ROWS = {
    "gsm8k": {"question": "How many?"},
    "math500": {"problem": "How many?"},
    "humaneval": {"prompt": "def how_many():"},
    "mbpp": {"prompt": "Count.", "test_list": ["assert count([]) == 0"]},
    "mt-bench": {"prompt": ["How many?", "And why?"]},
    "alpaca": {"instruction": "Count.", "input": "one, two"},
    "cnn-dailymail": {"article": "There were many."},
}


@pytest.mark.parametrize("name", prompt_sets.SETS)
def test_sets_of_the_hub_become_prompts(name, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return [ROWS[name]] * 3

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    prompts = prompt_sets.load_prompts(name, 2)
    wanted = next(iter(ROWS[name].values()))
    assert len(prompts) == 2 and (wanted if isinstance(wanted, str) else wanted[0]) in prompts[0]
    chosen = prompt_sets.SETS[name]
    assert asked == [(chosen.dataset, chosen.config, chosen.split)]


@pytest.mark.parametrize("error", [ConnectionError("offline"), ValueError("Couldn't find cache")], ids=repr)
def test_a_hub_out_of_reach_names_the_shipped_set(error, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(ValueError, match=r"openai/gsm8k can't be had.*--prompts-from shipped"):
        prompt_sets.load_prompts("gsm8k", 2)


def test_prompts_of_files_and_folders(tmp_path):
    (tmp_path / "b.jsonl").write_text('{"prompt": "second"}\n')
    (tmp_path / "a.jsonl").write_text('{"prompt": "first", "other": 1}\n\n')
    assert prompt_sets.load_prompts(str(tmp_path), 5) == ["first", "second"]
    assert prompt_sets.load_prompts(str(tmp_path / "b.jsonl"), 5) == ["second"]
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n')
    with pytest.raises(ValueError, match="line 1: no"):
        prompt_sets.load_prompts(str(tmp_path), 5)
    (tmp_path / "b.jsonl").write_text('{"prompt": 3}\n')
    with pytest.raises(ValueError, match="the prompt is 3"):
        prompt_sets.load_prompts(str(tmp_path), 5)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no prompts"):
        prompt_sets.load_prompts(str(tmp_path / "empty"), 5)


def test_lengths_of_rounds_are_told_from_the_cache():
    assert committed_lengths([0, 5, 8, 9], prompt_length=5, new_tokens=7) == [1, 3, 1, 2]
    assert committed_lengths([0, 7, 8], prompt_length=5, new_tokens=6) == [3, 1, 2]  # drafts in the first forward
    assert committed_lengths([0, None], 5, 2) is None and committed_lengths([], 5, 2) is None
    assert committed_lengths([0, 0, 0], 5, 3) is None  # no cache


def count_hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def test_the_meter_counts_nested_forwards_once_and_goes():
    target = make_target("llama")
    prompt = torch.tensor([[7, 3, 44]])
    with ForwardMeter(target, None) as meter:
        target(prompt)
        assert meter.prefilled is not None and not any(meter.seconds.values())
        target(prompt)
        assert meter.seconds["target"] > 0 and meter.seconds["head"] == 0
        target.get_output_embeddings()(torch.zeros(1, target.config.hidden_size))
        assert meter.seconds["head"] > 0
    assert meter.cached == [0, 0]
    assert count_hooks(target) == 0


def test_forwards_that_are_graphs_are_timed_and_stay_graphs(monkeypatch):
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(compiled, "GRAPHS", {"cpu": FakeGraph})
    target = make_target("llama")
    drafter = make_drafter(target)
    run = compiled.Forwards.run
    prompt = torch.tensor([[7, 3, 44]])
    plain = decode(target, drafter, prompt, max_new_tokens=40, compile="graphs", return_dict_in_generate=True)
    recorded, hooks = len(FakeGraph.made), count_hooks(target)  # transformers leaves some to collect hidden states
    with ForwardMeter(target, drafter) as meter:
        output = decode(target, drafter, prompt, max_new_tokens=40, compile="graphs", return_dict_in_generate=True)
    assert len(FakeGraph.made) == 2 * recorded > 0 and compiled.Forwards.run is run
    assert torch.equal(output.sequences, plain.sequences) and output.acceptance_lengths == plain.acceptance_lengths
    assert len(meter.cached) == 1 and 0 < meter.seconds["target"] <= output.stage_seconds["verify"]
    assert meter.seconds["drafter"] > 0
    assert count_hooks(target) == hooks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_peak_memory_sees_what_comes_and_goes():
    with PeakMemory(torch.device("cpu")) as memory:
        block = torch.ones(16 << 20)
        for _ in range(10):
            block.add_(1)
        del block
    assert 60e6 < memory.bytes < 120e6


def test_commit_of_a_checkout_only(tmp_path):
    assert machine.commit(tmp_path) is None
    (tmp_path / ".git").mkdir()
    assert machine.commit(tmp_path) is None


def test_build_measures_both_builders(capsys, tmp_path):
    extra = ["--budgets", "4", "16", "--depths", "3", "--vocabulary", "500", "--repeats", "2"]
    assert main(["bench", "build", *extra, "--batches", "1", "2", "--json", str(tmp_path / "build.json")]) == 0
    record = record_of(capsys)
    assert record == json.loads((tmp_path / "build.json").read_text())
    shapes = [(row["batch"], row["budget"], row["builder"]) for row in record["rows"]]
    assert shapes == [
        (batch, budget, name) for batch in (1, 2) for budget in (4, 16) for name in ("heap", "level by level")
    ]
    assert all(row["same_tree"] and row["tree_ms"] > 0 and row["together_ms"] > 0 for row in record["rows"])
