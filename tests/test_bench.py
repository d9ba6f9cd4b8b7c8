"""`hf-ddtree bench sampling`: its replay, its statistics, its command."""

import json
import statistics

import pytest
import torch
from chat import make_chat_tokenizer
from stubs import VOCAB, decode, make_drafter, make_target
from transformers import AutoModelForCausalLM

from hf_ddtree import DDTreeConfig
from hf_ddtree.benchmark import coupling
from hf_ddtree.benchmark.race import in_float32
from hf_ddtree.benchmark.statistics import quotient, ratio_of_sums, with_error
from hf_ddtree.cli import main

PROMPTS = [torch.tensor([6, 34, 56, 50]), torch.tensor([30, 20, 44, 15, 38, 10])]


def test_ratio_of_sums_over_equal_counts_is_a_plain_mean():
    totals = [3, 8, 5, 6]
    mean, error = ratio_of_sums(totals, [2] * 4)
    assert mean == pytest.approx(statistics.mean(totals) / 2)
    assert error == pytest.approx(statistics.stdev(totals) / 2 / 4**0.5)


def test_error_of_a_ratio_is_that_of_repeated_samples():
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(20, 60, (400, 30), generator=generator)
    totals = counts * (2 + 0.5 * torch.randn(400, 30, generator=generator))
    samples = [ratio_of_sums(t.tolist(), c.tolist()) for t, c in zip(totals, counts, strict=True)]
    spread = statistics.stdev(mean for mean, _ in samples)
    assert statistics.mean(error for _, error in samples) == pytest.approx(spread, rel=0.1)


def test_quotient_knows_that_calls_are_paired():
    totals, counts = [30, 80, 50], [10, 20, 30]
    assert quotient((totals, counts), (totals, counts)) == (1.0, 0.0)
    double = quotient(([2 * total for total in totals], counts), (totals, counts))
    assert double == (pytest.approx(2.0), pytest.approx(0.0))
    value, error = quotient((totals, counts), ([50, 30, 80], [10, 20, 30]))
    assert value == pytest.approx(1.0) and error > 0.2
    assert ratio_of_sums([6], [3]) == (2.0, None) and with_error(2.0, None).strip() == "2.00 ±?"


@pytest.mark.parametrize("shape", ["best_first", "chain"])
def test_replay_counts_the_rounds_of_decoding(shape, monkeypatch):
    target = make_target("qwen3", seed=10, initializer_range=0.2)
    drafter = make_drafter(target)
    monkeypatch.setattr(coupling, "SCALES", (0.0, 1.0))
    monkeypatch.setattr(coupling, "DRAFT_TEMPERATURES", (0.5, 1.0))
    fields = {"do_sample": True, "temperature": 1.5, "top_k": 0, "max_new_tokens": 30, "tree_shape": shape}
    rows = coupling.scan(target, drafter, PROMPTS, DDTreeConfig(tree_budget=12, seed=4, **fields))
    common = {"tree_budget": 12, "return_dict_in_generate": True}
    assert len(rows) == 4
    for row in rows:
        draft = {name: row[name] for name in ("draft_noise_scale", "draft_temperature")}
        results = [
            decode(target, drafter, ids[None], **common, seed=4 + index, **draft, **fields)
            for index, ids in enumerate(PROMPTS)
        ]
        committed = sum(sum(result.acceptance_lengths[1:]) for result in results)
        assert row["acceptance_length"] == round(committed / sum(result.rounds - 1 for result in results), 3)
    assert len({row["acceptance_length"] for row in rows}) > 1


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    target = make_target("llama")
    target.save_pretrained(root / "target")
    make_chat_tokenizer().save_pretrained(root / "target")
    make_drafter(target).save_pretrained(root / "drafter")
    generator = torch.Generator().manual_seed(0)
    with open(root / "text.jsonl", "w") as out:
        for _ in range(60):
            tokens = torch.randint(2, VOCAB, (12,), generator=generator).tolist()
            out.write(json.dumps({"p": tokens[:6], "g": tokens[6:], "t": None}) + "\n")
    return root


def bench(folders, *extra, what="sampling", data="text.jsonl"):
    paths = ["--model", folders / "target", "--drafter", folders / "drafter", "--data", folders / data]
    common = ["--prompts", "3", "--dtype", "float32"]
    calls = [] if what == "drafter" else ["--max-new-tokens", "10", "--repeats", "1"]
    budget = ["--budget", "8"] if what == "sampling" else []
    return main(["bench", what, *map(str, paths), *common, *calls, *budget, *extra])


def test_bench_sampling_prints_tables_and_json(folders, capsys, tmp_path):
    assert bench(folders, "--temperatures", "0.7", "1.5", "--scan", "--json", str(tmp_path / "out.json")) == 0
    out = capsys.readouterr().out
    assert "float32 check: 4 of 4 texts, identical" in out
    record = json.loads(out.splitlines()[-1])
    assert record == json.loads((tmp_path / "out.json").read_text())
    rows = record["temperature 1.5"]
    assert len(rows) == 8 and rows[0]["method"] == "plain generate" and rows[0]["acceptance_length"] == 1
    assert all(row["method"] in out and row["tokens_per_second"] > 0 for row in rows)
    assert len(record["scan at 0.7"]) == len(coupling.SCALES) * len(coupling.DRAFT_TEMPERATURES)


@pytest.mark.parametrize("mixed", [[], ["--mixed"]], ids=["equal", "mixed"])
def test_fault_60_bench_batch_prints_speed_and_accepted_length(folders, capsys, tmp_path, mixed):
    extra = ["--batches", "1", "3", "--budgets", "4", "--json", str(tmp_path / "out.json"), *mixed]
    assert bench(folders, *extra, what="batch") == 0
    out = capsys.readouterr().out
    assert "rows of one batch, identical to plain decoding of each row alone" in out
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["batch"], row["method"]) for row in rows] == [
        (size, name) for size in (1, 3) for name in ("plain generate", "DDTree, budget 4")
    ]
    assert all(row["tokens_per_second"] > 0 and row["acceptance_length"] >= 1 for row in rows)
    assert rows[0]["acceptance_length"] == rows[2]["acceptance_length"] == 1


@pytest.mark.parametrize("extra", [["--temperatures", "-1"], ["--budget", "-2"]], ids=["temperature", "budget"])
def test_bench_refuses_bad_values_in_one_line(folders, capsys, extra):
    assert bench(folders, *extra) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert extra[1] in error and "must be" in error


def test_bench_takes_the_data_that_train_takes(folders, capsys):
    (folders / "chats.jsonl").write_text('{"prompt": "why", "completion": "so it is"}\n')
    assert bench(folders, "--temperatures", "0.7", data="chats.jsonl") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["temperature 0.7"]


@pytest.mark.parametrize(
    ("what", "row", "named"),
    [
        ("drafter", '{"prompt": "why", "completion": "so it is"}', "no greedy answer of the target"),
        ("drafter", '{"p": [7], "g": [8, 9], "t": 0.7}', "no greedy answer of the target"),
        ("sampling", '{"p": [7], "g": [8], "t": 0.7}\n{"p": [7], "g": [8, 9], "t": 0.7}', "no usable row"),
    ],
)
def test_bench_says_where_nothing_is_held_out(what, row, named, folders, capsys):
    (folders / "few.jsonl").write_text(row + "\n")
    assert bench(folders, what=what, data="few.jsonl") == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert named in error and "few.jsonl" in error and "every 20th" in error


def test_float32_checks_leave_the_models_as_they_were(folders):
    """A model's own `.to(bfloat16)` would round RoPE's frequencies, which stay float32 in `from_pretrained`."""
    target = AutoModelForCausalLM.from_pretrained(folders / "target", dtype=torch.bfloat16)
    tensors = [*target.named_parameters(), *target.named_buffers()]
    before = {name: tensor.clone() for name, tensor in tensors}
    assert {tensor.dtype for tensor in before.values()} == {torch.bfloat16, torch.float32}
    with in_float32(target):
        assert {tensor.dtype for _, tensor in tensors} == {torch.float32} and target.dtype == torch.float32
    after = dict((*target.named_parameters(), *target.named_buffers()))
    assert all(after[name].dtype == old.dtype and torch.equal(after[name], old) for name, old in before.items())
