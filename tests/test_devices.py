"""Target and drafter on devices of their own, with accelerators that are made up (fake_device.py), and accelerate's."""

import json
import subprocess
import sys
from pathlib import Path

import accelerate
import pytest
import torch
from stubs import decode, greedy, make_drafter, make_target
from torch.utils import backend_registration

DRIVER = Path(__file__).parent / "device_driver.py"
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [1, 50, 4, 4, 33, 21, 60, 2, 9, 17]])
NEW = 24


@pytest.fixture(scope="module")
def driven():
    """What the driver prints; a process of its own, since a device once registered stays so."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices in Python")
    done = subprocess.run([sys.executable, DRIVER], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("drafter", ["calibrated", "sliding", "assistant", "lookup"])
@pytest.mark.parametrize("away", ["drafter", "target", "both", "half the target", "both halves"])
def test_fault_15_tensors_of_two_devices_never_meet(driven, away, drafter):
    if (away, drafter) == ("drafter", "lookup"):
        pytest.skip("lookup has no model")
    device = "cpu" if away == "drafter" else "away:0"
    assert driven["runs"][f"{away}, {drafter}"] == {"same": True, "fallback_rounds": {}, "device": device}


def test_fault_58_copies_to_the_host_do_not_grow_with_tree_or_text(driven):
    """Two a round (the path; how deep the tree is), one a token (whether it ends the text), and a handful a call."""
    for call in driven["host_copies"]:
        assert call["rounds"] <= call["copies"] <= 2 * call["rounds"] + call["tokens"] + 8


MAP = {f"model.layers.{layer}": "cpu" if layer % 2 else "disk" for layer in range(4)}
MAP |= {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
DRAFTER_MAP = {"fc": "disk", "hidden_norm": "cpu", "layers.0": "cpu", "layers.1": "disk", "norm": "cpu"}
DRAFTER_MAP |= {"rotary_emb": "cpu"}


@pytest.mark.parametrize("dispatched", ["target", "drafter", "both"])
@pytest.mark.parametrize("kind", ["dflash", "assistant"])
def test_fault_15_device_maps(dispatched, kind, tmp_path):
    """Some layers in memory, some on disk, as `device_map` puts them."""
    target = make_target("qwen3")
    expected = greedy(target, PROMPT, NEW)
    drafter, drafter_map = (make_drafter(target), DRAFTER_MAP) if kind == "dflash" else (make_target("llama"), MAP)
    for name, model, device_map in (("target", target, MAP), ("drafter", drafter, drafter_map)):
        if dispatched in (name, "both"):
            accelerate.dispatch_model(model, device_map, main_device="cpu", offload_dir=tmp_path / name)
            assert "meta" in {weight.device.type for weight in model.parameters()}
    assert decode(target, drafter, PROMPT, max_new_tokens=NEW).tolist() == expected.tolist()
