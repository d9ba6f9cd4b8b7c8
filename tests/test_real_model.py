"""SmolLM2-135M with the shipped drafter: same text, several tokens a round; and the README's code as printed."""

import re
from pathlib import Path

import pytest
import torch

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.benchmark.prompts import PROMPTS
from hf_ddtree.benchmark.race import encode
from hf_ddtree.cli import DEMO_DRAFTER
from hf_ddtree.models.smollm2 import load_smollm2

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.real_model


@pytest.fixture(scope="module")
def models():
    target, tokenizer = load_smollm2(torch.float32)
    return target, tokenizer, DFlashDraftModel.from_pretrained(DEMO_DRAFTER, dtype=torch.float32)


def test_same_text_and_more_than_two_tokens_a_round(models):
    target, tokenizer, drafter = models
    lengths = []
    for prompt in PROMPTS[:4]:
        inputs = encode(tokenizer, prompt, target.device)
        plain = target.generate(**inputs, max_new_tokens=128, do_sample=False)
        config = DDTreeConfig(tree_budget=32, max_new_tokens=128, do_sample=False, return_dict_in_generate=True)
        ours = target.generate(**inputs, assistant_model=drafter, generation_config=config)
        assert ours.sequences.tolist() == plain.tolist()
        lengths.append(ours.mean_acceptance_length)
    assert sum(lengths) / len(lengths) > 2


def test_chain_of_the_library_gives_the_same_text(models):
    target, tokenizer, drafter = models
    inputs = encode(tokenizer, PROMPTS[0], target.device)
    plain = target.generate(**inputs, max_new_tokens=48, do_sample=False)
    chain = target.generate(
        **inputs, assistant_model=drafter, speculation_type="dflash", max_new_tokens=48, do_sample=False
    )
    assert chain.tolist() == plain.tolist()


@pytest.mark.parametrize("source", ["README.md", "docs/sampling.md", "examples/quickstart.py"])
def test_fault_63_code_runs_as_printed(source, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    text = (ROOT / source).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S) if source.endswith(".md") else [text]
    assert blocks
    scope = {"__name__": "__main__", "__file__": str(ROOT / source)}
    for block in blocks:
        exec(compile(block, source, "exec"), scope)
    assert len(capsys.readouterr().out) > 100


def test_fault_62_the_readme_says_what_exact_means():
    text = " ".join((ROOT / "README.md").read_text().split())
    assert "In float32 the tokens equal plain `generate`, up to ties" in text
    assert "In bfloat16 and float16 a forward over many tokens rounds differently" in text
