"""`hf-ddtree bench rounds` on shapes small enough for a CPU, with graphs of a CPU's too."""

import json
from dataclasses import replace

import pytest
import torch
from fake_graph import FakeGraph

from hf_ddtree import DDTreeConfig, compiled
from hf_ddtree.benchmark import rounds
from hf_ddtree.benchmark.shapes import KIMI, QWEN3_8B, SHAPES, make_models
from hf_ddtree.cli import main
from hf_ddtree.drafting.dflash import check_drafter
from hf_ddtree.figures import STAGES, Figures
from hf_ddtree.target import Target

# The large shapes' widths cut down; depth, dtype, and how experts are chosen stay.
QWEN3_SMALL = replace(
    QWEN3_8B,
    target={
        **QWEN3_8B.target,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
        "vocab_size": 2048,
    },
    drafter={
        **QWEN3_8B.drafter,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 512,
    },
)
KIMI_SMALL = replace(
    KIMI,
    target={
        **KIMI.target,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "intermediate_size": 512,
        "moe_intermediate_size": 64,
        "n_routed_experts": 16,
        "vocab_size": 2048,
    },
    drafter={**KIMI.drafter, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 512},
)


def bench(capsys, *arguments):
    """The exit status, what was printed, and the record on its last line."""
    status = main(["bench", "rounds", "--device", "cpu", *arguments])
    printed = capsys.readouterr().out
    return status, printed, json.loads(printed.splitlines()[-1])


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(FakeGraph, "made", [])
    monkeypatch.setattr(compiled, "GRAPHS", {"cpu": FakeGraph})
    return FakeGraph.made


def test_all_modes_write_the_same_text_and_every_figure_is_there(capsys, tmp_path):
    path = tmp_path / "rounds.json"
    status, printed, record = bench(capsys, "--shape", "tiny", "--context", "40", "--json", str(path))
    assert status == 0 and json.loads(path.read_text()) == record
    assert [row["same_text"] for row in record["rows"]] == [True] * 4
    assert all(record["checks"].values()) and not record["graphs_here"] and "no graphs here" in printed
    for row in record["rows"]:
        assert row["tokens_per_second"] > 0 and row["ms_per_token"] > 0 and row["speed_up"] > 0
    for row in record["rows"][1:3]:
        assert set(row["stages_ms"]) == set(STAGES) and set(row["forwards_ms"]) == {"target", "drafter"}
        assert 0 < sum(row["forwards_ms"].values()) < sum(row["stages_ms"].values())
        assert 0 < row["outside_waiting"] < 1 and 40 < row["steady_rounds"] < row["rounds"] < 90
    assert record["shape"] == "tiny" and record["hardware"]["cpu"] and record["new_tokens"] == 240


@pytest.mark.parametrize("acceptance", ["1", "2.5", "4", "6"])
def test_the_oracle_is_right_as_often_as_asked(capsys, acceptance):
    _, _, record = bench(capsys, "--shape", "tiny", "--context", "24", "--acceptance", acceptance)
    for row in record["rows"][1:3]:
        assert row["acceptance_length"] == pytest.approx(float(acceptance), rel=0.25)


@pytest.mark.parametrize("name", ["qwen3-8b", "kimi"])
def test_shapes_in_16_bit_write_texts_that_no_rounding_turns(capsys, monkeypatch, name):
    monkeypatch.setitem(SHAPES, name, {"qwen3-8b": QWEN3_SMALL, "kimi": KIMI_SMALL}[name])
    status, _, record = bench(capsys, "--shape", name, "--rounds", "12", "--context", "32", "--acceptance", "3")
    assert status == 0 and [row["same_text"] for row in record["rows"]] == [True] * 4
    assert record["dtype"] == "bfloat16" and record["rows"][1]["acceptance_length"] == pytest.approx(3, rel=0.4)


@pytest.mark.parametrize(("name", "parameters"), [("qwen3-8b", 8.19e9), ("kimi", 11.78e9)])
def test_large_shapes_are_what_they_are_called(name, parameters):
    target, drafter = make_models(SHAPES[name], torch.device("meta"))
    assert target.num_parameters() == pytest.approx(parameters, rel=0.01)
    assert target.dtype == drafter.dtype == torch.bfloat16
    check_drafter(drafter, target, DDTreeConfig())
    assert target.get_memory_footprint() + drafter.get_memory_footprint() < 40e9


@torch.no_grad()
@pytest.mark.parametrize("shape", [QWEN3_SMALL, KIMI_SMALL], ids=["qwen3", "kimi"])
def test_margins_are_many_roundings(shape):
    target, _ = make_models(shape, torch.device("cpu"))
    ids = torch.randint(1, 1024, (1, 64), generator=torch.Generator().manual_seed(3))
    logits = target(ids).logits[0].float()
    best = logits.topk(2).values
    assert logits.argmax(1).tolist() == (ids[0] + 1).tolist()
    assert bool((best[:, 0] - best[:, 1] > 32 * torch.finfo(torch.bfloat16).eps * best[:, 0].abs()).all())


def test_with_graphs_replays_are_timed_and_overhead_is_judged(capsys, monkeypatch, graphs):
    arguments = ("--shape", "tiny", "--context", "24", "--rounds", "20")
    status, printed, record = bench(capsys, *arguments)
    row = record["rows"][2]
    assert graphs and 5 < row["replayed_rounds"] == row["steady_rounds"] and record["graphs_here"]
    assert record["checks"]["graphs were replayed"] and record["checks"]["graphs and eager: same tokens"]
    assert status == 1 and "FAILED  graphs: at most 5% of a round" in printed  # so small a model is mostly Python
    monkeypatch.setattr(rounds, "MOST_OUTSIDE", 1.0)
    assert bench(capsys, *arguments)[0] == 0


def test_graphs_that_cant_be_recorded_are_no_pass(capsys, monkeypatch, graphs):
    def record(self, function):
        raise RuntimeError("no capture")

    monkeypatch.setattr(FakeGraph, "record", record)
    status, printed, record = bench(capsys, "--shape", "tiny", "--context", "24", "--rounds", "20")
    assert status == 1 and not record["checks"]["graphs were replayed"] and "FAILED  graphs were replayed" in printed


def test_other_tokens_with_graphs_are_a_failure(capsys, monkeypatch, graphs):
    """A target whose graphs read the positions they were recorded with."""
    verify = Target.verify

    def wrong(self, tree):
        logits = verify(self, tree)
        return logits.roll(1, -1) if self.forwards.replays > 5 else logits

    monkeypatch.setattr(Target, "verify", wrong)
    status, printed, record = bench(capsys, "--shape", "tiny", "--context", "24", "--rounds", "20")
    assert status == 1 and "FAILED  graphs and eager: same tokens" in printed
    assert [row["same_text"] for row in record["rows"]] == [True, True, False, True]


def test_plain_decoding_that_cant_be_compiled_is_left_out(capsys, monkeypatch):
    generate = rounds.Subject.generate

    def broken(self, config, **arguments):
        if config.cache_implementation == "static":
            raise RuntimeError("no compiler\nat all")
        return generate(self, config, **arguments)

    monkeypatch.setattr(rounds.Subject, "generate", broken)
    status, printed, record = bench(capsys, "--shape", "tiny", "--context", "24", "--rounds", "20")
    assert status == 0 and record["rows"][3]["failure"] == "RuntimeError: no compiler" in printed


@pytest.mark.falls_back
def test_rounds_that_fell_back_are_a_failure(capsys, monkeypatch):
    monkeypatch.setattr("hf_ddtree.benchmark.oracle.Oracle.draft", lambda self, request: 1 / 0)
    status, printed, _ = bench(capsys, "--shape", "tiny", "--context", "24", "--rounds", "20")
    assert status == 1 and "FAILED  no round fell back" in printed


def test_the_instruments_are_gone_afterwards(capsys):
    before = Figures.stage, compiled.Forwards.run
    bench(capsys, "--shape", "tiny", "--context", "8", "--rounds", "10")
    assert (Figures.stage, compiled.Forwards.run) == before


def test_refusals(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(rounds, "make_models", lambda *_: pytest.fail("models were made"))
    for arguments, named in (
        (("--device", "cpu", "--shape", "tiny", "--acceptance", "9"), "--acceptance 9.0"),
        (("--device", "cpu", "--shape", "tiny", "--rounds", "9"), "--rounds 9"),
        (("--device", "cpu", "--shape", "tiny", "--json", str(tmp_path / "no" / "x.json")), "--json"),
        *([] if torch.cuda.is_available() else [(("--device", "cuda"), "--device cuda")]),
    ):
        assert main(["bench", "rounds", *arguments]) == 1
        assert named in capsys.readouterr().err
