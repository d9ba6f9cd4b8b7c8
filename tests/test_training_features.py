"""The feature store: what it gives is what the target computes, from disk or not, after kills and failed writes too."""

import json
import resource

import pytest
import torch
from stubs import VOCAB, make_target

import hf_ddtree.training.features as features
from hf_ddtree.training.data import TokenSequence, compute_features
from hf_ddtree.training.features import FeatureStore, target_digest

TAPS = [0, 2]


@pytest.fixture(scope="module")
def target():
    return make_target("llama").bfloat16()


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(features, "SHARD_BYTES", 40_000)  # a token is 192 bytes: about 200 tokens a shard


@pytest.fixture
def warnings(monkeypatch):
    """The warnings given, as text; the library's logger does not propagate."""
    given: list[str] = []
    monkeypatch.setattr(features.logger, "warning", given.append)
    return given


@pytest.fixture
def forwards(target, monkeypatch):
    """Batch sizes of the target's forwards."""
    sizes: list[int] = []
    real = features.batch_features
    monkeypatch.setattr(features, "batch_features", lambda *args: sizes.append(len(args[1])) or real(*args))
    return sizes


def make_sequences(count=24, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(8, 60, (count,), generator=generator).tolist()
    return [TokenSequence(torch.randint(0, VOCAB, (n,), generator=generator), 4, None) for n in lengths]


def assert_features(store, indices, exact=False):
    """Compares with one forward per sequence."""
    for index, item in zip(indices, store.get(indices), strict=True):
        (expected,) = compute_features(store.target, [store.sequences[index]], TAPS)
        assert item.sequence is store.sequences[index]
        assert item.context.dtype == item.final.dtype == torch.bfloat16
        assert item.context.shape == (len(item.sequence.tokens), len(TAPS) * 32)
        for name in ("context", "final"):
            given, wanted = getattr(item, name).float(), getattr(expected, name).float()
            # Another batch composition rounds differently: a few bfloat16 steps of 2^-8 of the largest values.
            assert (given - wanted).abs().max() <= (0 if exact else 0.04 * wanted.abs().max())


def test_without_a_folder_everything_is_one_forward(target, forwards):
    store = FeatureStore(target, make_sequences(), TAPS, None, 1.0)
    store.fill()
    lengths = [len(sequence.tokens) for sequence in store.sequences]
    assert lengths == sorted(lengths) and len(store) == 24 and store.cached == 0
    store.get([5, 0, 23, 5])
    assert forwards == [3]
    assert_features(store, [5, 0, 23, 5])


def test_a_filled_store_reads_and_does_not_compute(target, forwards, tmp_path):
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path / "features", 1.0)
    store.fill()
    assert len(store.shards) > 3 and store.cached == 24
    forwards.clear()
    store.get(list(range(24)))
    assert forwards == []
    assert_features(store, [7, 23, 0, 7])


def test_bfloat16_comes_back_bit_by_bit(target, tmp_path, monkeypatch):
    monkeypatch.setattr(features, "FILL_ROWS", 1)
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    store.fill()
    assert_features(store, list(range(24)), exact=True)


def test_beyond_the_limit_features_are_computed(target, forwards, tmp_path):
    sequences = make_sequences()
    total = sum(len(sequence.tokens) for sequence in sequences) * 192
    store = FeatureStore(target, sequences, TAPS, tmp_path, total / 2 / 1e9)
    store.fill()
    assert 0 < store.cached < 24
    kept = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert total / 4 < kept < 0.6 * total
    forwards.clear()
    store.get([23, 0, 22])
    assert forwards == [2]
    assert_features(store, [23, 0, 22])


def test_a_lower_limit_frees_the_disk_and_keeps_the_rest(target, forwards, tmp_path):
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    forwards.clear()
    lower = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1e-4)
    lower.fill()
    after = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.safetensors")}
    assert 0 < len(after) == len(lower.shards) < len(before)
    assert after.items() <= before.items() and forwards == []
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 0).fill()
    assert not list(tmp_path.glob("*.safetensors"))


def test_a_killed_fill_loses_one_shard(target, forwards, tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    real, calls = features.save_file, []

    def killing(tensors, path):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half a sh")
            raise Killed
        real(tensors, path)

    monkeypatch.setattr(features, "save_file", killing)
    with pytest.raises(Killed):
        FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    assert len(list(tmp_path.glob("*.safetensors"))) == 2

    (tmp_path / "shard-00002.123.partial").write_bytes(b"what a kill that nobody can catch leaves")
    monkeypatch.setattr(features, "save_file", real)
    forwards.clear()
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    store.fill()
    assert sum(forwards) == sum(len(shard) for shard in store.shards[2:])
    assert store.cached == 24 and not list(tmp_path.glob("*.partial"))
    assert_features(store, [0, 23])


def test_the_next_fill_computes_only_what_is_missing(target, forwards, tmp_path, warnings):
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    store.fill()
    (tmp_path / "shard-00001.safetensors").unlink()
    damaged = tmp_path / "shard-00002.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-100])
    forwards.clear()
    again = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    again.fill()
    assert sum(forwards) == len(store.shards[1]) + len(store.shards[2])
    assert len(warnings) == 1 and "damaged" in warnings[0]
    assert_features(again, [0, 10, 23])


@pytest.mark.parametrize("changed", ["sequences", "taps", "target"])
def test_features_of_something_else_are_not_used(changed, target, tmp_path, warnings):
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    sequences = make_sequences(seed=1 if changed == "sequences" else 0)
    taps = [1, 2] if changed == "taps" else TAPS
    other = make_target("llama", seed=7).bfloat16() if changed == "target" else target
    store = FeatureStore(other, sequences, taps, tmp_path, 1.0)
    store.fill()
    assert len(warnings) == 1 and changed in warnings[0] and "anew" in warnings[0]
    (expected,) = compute_features(other, [store.sequences[3]], taps)
    (given,) = store.get([3])
    torch.testing.assert_close(given.context, expected.context, atol=0.1, rtol=0.05)


def test_a_torn_fingerprint_means_anew(target, tmp_path, warnings):
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    path = tmp_path / "fingerprint.json"
    path.write_text(path.read_text()[:20])
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    store.fill()
    assert store.cached == 24 and "anew" in warnings[0]
    json.loads(path.read_text())


def test_a_full_disk_ends_the_cache_not_the_run(target, tmp_path, warnings):
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0)
    store._clear_folder(tmp_path)
    store._write(0)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # every further file is too large
    try:
        store.fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "--cache-gb" in warnings[0] and f"{len(store.shards[0])} of 24" in warnings[0]
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["fingerprint.json", "shard-00000.safetensors"]
    assert_features(store, [0, 23, 5])


def test_a_folder_that_cannot_be_is_no_error(target, tmp_path, warnings):
    (tmp_path / "file").write_text("in the way")
    store = FeatureStore(target, make_sequences(), TAPS, tmp_path / "file" / "features", 1.0)
    store.fill()
    assert "--cache-gb" in warnings[0]
    assert_features(store, [1])


def test_the_digest_sees_weights_and_dtype_and_not_the_place(target):
    assert target_digest(make_target("llama").bfloat16()) == target_digest(target)
    assert target_digest(make_target("llama")) != target_digest(target)
    moved = make_target("llama").bfloat16()
    moved.config._name_or_path = "elsewhere"
    assert target_digest(moved) == target_digest(target)
    with torch.no_grad():
        moved.base_model.layers[3].mlp.down_proj.weight *= 1.01
    assert target_digest(moved) != target_digest(target)


def test_a_second_process_finds_everything_and_writes_nothing(target, forwards, tmp_path):
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    forwards.clear()
    FeatureStore(target, make_sequences(), TAPS, tmp_path, 1.0).fill()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before and forwards == []
