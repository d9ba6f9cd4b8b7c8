"""Any causal LM as assistant: its trees are the exact best-first ones, and its cache holds the committed text."""

import heapq

import pytest
import torch
from keyed import sampled
from stubs import decode, greedy, make_drafter, make_target, make_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from hf_ddtree import DDTreeConfig
from hf_ddtree.context import Context
from hf_ddtree.drafting import Request, assistant
from hf_ddtree.drafting.assistant import AssistantDrafter
from hf_ddtree.drafting.make import make_drafter as drafter_for

FAMILIES = ("llama", "qwen3-sliding", "mistral", "gemma3", "gpt_oss", "deepseek_v3")
PROMPT = torch.tensor([[7, 3, 44, 12, 9, 30, 2, 55, 41, 8]])
TEXTS = [torch.tensor(ids) for ids in ([7, 3, 44, 12, 9, 30, 2, 55, 41, 8], [5, 60, 1], [17, 23, 50, 6, 33, 20, 11])]
NEW = 20


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return make_target(request.param, seed=3)


@pytest.fixture(scope="module")
def qwen():
    return make_target("qwen3", seed=10)


def request_for(texts, max_depth=4, noise=None):
    nothing = Context(torch.empty(len(texts), 0, 0), torch.empty(len(texts), 0), [0] * len(texts))
    return Request(texts, nothing, max_depth, noise or (lambda depth, like: None))


def make(model, rows=3, target=None, **fields):
    config = DDTreeConfig(**{"tree_budget": 9, "do_sample": False, **fields})
    return AssistantDrafter(model, model if target is None else target, config, rows)


@torch.no_grad()
def brute_force(model, text, budget, depth, noise=None, temperature=1.0):
    """The `budget` most probable continuations of at most `depth` tokens, each after a forward over the whole text."""

    def children(path):
        logits = model(torch.tensor([text.tolist() + path])).logits[0, -1].float()
        logits = logits if noise is None else logits + noise[len(path)]
        return (logits / temperature).log_softmax(-1).double().tolist()

    heap = [(-value, [token]) for token, value in enumerate(children([]))]
    heapq.heapify(heap)
    best = []
    while heap and len(best) < budget:
        negative, path = heapq.heappop(heap)
        best.append((path, -negative))
        if len(path) < depth:
            for token, value in enumerate(children(path)):
                heapq.heappush(heap, (negative - value, [*path, token]))
    return best


def paths_of(tree, row):
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    paths = [[]]
    for node in range(1, len(tokens)):
        paths.append([*paths[parents[node]], tokens[node]])
    return paths[1:]


@pytest.mark.parametrize("budget, depth", [(1, 1), (1, 4), (9, 1), (9, 4), (30, 3)])
def test_trees_are_the_most_probable_continuations(model, budget, depth):
    tree = make(model, tree_budget=budget).draft(request_for(TEXTS, max_depth=depth))
    assert tree.tokens[:, 0].tolist() == [int(text[-1]) for text in TEXTS]
    for row, text in enumerate(TEXTS):
        expected = brute_force(model, text, budget, depth)
        assert paths_of(tree, row) == [path for path, _ in expected]
        scores = torch.tensor([score for _, score in expected], dtype=torch.float64)
        torch.testing.assert_close(tree.scores[row, 1:], scores, atol=1e-4, rtol=1e-4)
        assert tree.depths[row, 1:].tolist() == [len(path) for path, _ in expected]


def test_noise_and_temperature_are_in_the_tree(model):
    noise = torch.randn(len(TEXTS), 4, 64, generator=torch.Generator().manual_seed(0))
    drafter = make(model, do_sample=True, draft_temperature=0.7)
    tree = drafter.draft(request_for(TEXTS, noise=lambda depth, like: noise[:, :depth]))
    for row, text in enumerate(TEXTS):
        expected = brute_force(model, text, 9, 4, noise[row], temperature=0.7)
        assert paths_of(tree, row) == [path for path, _ in expected]


@pytest.mark.parametrize("chunk", [1, 2, 3, 512])
def test_cache_holds_each_text_after_every_round(model, chunk, monkeypatch):
    """Rows read different amounts at a time, in chunks; the trees stay those of a new drafter."""
    monkeypatch.setattr(assistant, "CHUNK", chunk)
    drafter, rows = make(model), [0, 1, 2]
    texts = list(TEXTS)
    more = torch.randint(2, 64, (3, 40), generator=torch.Generator().manual_seed(1))
    for step, news in enumerate([(1, 4, 2), (3, 1, 1), (1, 1, 5), (9, 2, 7)]):
        texts = [
            torch.cat([text, more[i, step * 9 :][:new]]) for i, (text, new) in enumerate(zip(texts, news, strict=True))
        ]
        if step == 2:  # the second text has ended
            drafter.keep([0, 2])
            rows = [0, 2]
        live = [texts[row] for row in rows]
        tree, fresh = drafter.draft(request_for(live)), make(model, rows=len(live)).draft(request_for(live))
        assert tree.tokens.tolist() == fresh.tokens.tolist() and tree.parents.tolist() == fresh.parents.tolist()
        torch.testing.assert_close(tree.scores, fresh.scores, atol=1e-4, rtol=1e-4)
        assert drafter.trees.ends.tolist() == [len(text) for text in live]


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("budget", [1, 7, 32])
def test_text_is_the_targets(model, qwen, budget, sampling):
    options = {"do_sample": True, "seed": 4, "top_k": 0} if sampling else {}
    expected = sampled(qwen, PROMPT, NEW, 4, top_k=0) if sampling else greedy(qwen, PROMPT, NEW)
    for helper in (model, qwen):
        tokens = decode(qwen, helper, PROMPT, max_new_tokens=NEW, tree_budget=budget, **options)
        assert tokens.tolist() == expected.tolist()


@pytest.mark.parametrize("sampling", [False, True], ids=["greedy", "sampled"])
def test_an_assistant_that_is_the_target_is_right(qwen, sampling):
    options = {"do_sample": True, "seed": 4, "top_k": 0, "draft_noise_scale": 1.0} if sampling else {}
    result = decode(
        qwen,
        qwen,
        PROMPT,
        max_new_tokens=40,
        tree_budget=32,
        draft_block_size=4,
        return_dict_in_generate=True,
        **options,
    )
    assert result.mean_acceptance_length > 2.5  # 4 at most


def test_depth_is_the_block_size_less_one(qwen):
    for block, deepest in ((2, 2), (5, 5)):
        result = decode(
            qwen, qwen, PROMPT, max_new_tokens=30, tree_budget=64, draft_block_size=block, return_dict_in_generate=True
        )
        assert max(result.acceptance_lengths) <= deepest


@pytest.mark.parametrize("rows", [60, 72])
def test_fault_19_padded_vocabularies(qwen, rows):
    helper = make_target("llama", vocab_size=rows)
    prompt = PROMPT % 60
    assert decode(qwen, helper, prompt, max_new_tokens=NEW).tolist() == greedy(qwen, prompt, NEW).tolist()
    tree = make(helper, target=qwen, rows=1, tree_budget=64).draft(request_for([TEXTS[0] % 60]))
    assert int(tree.tokens.max()) < min(rows, 64)


def test_fault_19_tokens_that_the_assistant_lacks_in_the_text(qwen):
    """It reads another token in their place; the text stays the target's."""
    helper = make_target("llama", vocab_size=20)
    assert decode(qwen, helper, PROMPT, max_new_tokens=NEW).tolist() == greedy(qwen, PROMPT, NEW).tolist()


def test_other_vocabularies_are_refused(qwen):
    large = make_target("llama", vocab_size=3000)
    with pytest.raises(ValueError, match="vocabulary of 3000"):
        decode(qwen, large, PROMPT, max_new_tokens=2)
    tokenizer, other = make_tokenizer(), make_tokenizer()
    other.add_tokens("zz")
    with pytest.raises(ValueError, match="assistant_tokenizer"):
        decode(qwen, make_target("llama"), PROMPT, max_new_tokens=2, tokenizer=tokenizer, assistant_tokenizer=other)
    options = {"max_new_tokens": 4, "tokenizer": tokenizer, "assistant_tokenizer": make_tokenizer()}
    assert decode(qwen, make_target("llama"), PROMPT, **options).tolist() == greedy(qwen, PROMPT, 4).tolist()


def test_assistants_that_cannot_draft_are_refused(qwen):
    headless = make_target("llama").model
    with pytest.raises(ValueError, match=r"LlamaModel.*from_pretrained"):
        decode(qwen, headless, PROMPT, max_new_tokens=2)
    config = AutoConfig.for_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ValueError, match=r"assistant_model.*recurrent"):
        decode(qwen, AutoModelForCausalLM.from_config(config), PROMPT, max_new_tokens=2)


def test_one_source_of_drafts_is_asked_for(qwen):
    for assistant_model, fields in ((None, {}), (make_drafter(qwen), {"drafter": "lookup"})):
        with pytest.raises(ValueError, match=r"assistant_model.*drafter"):
            drafter_for(assistant_model, qwen, DDTreeConfig(**fields), 1)


def test_classical_rules_need_distributions(qwen):
    with pytest.raises(ValueError, match="AssistantDrafter"):
        decode(qwen, qwen, PROMPT, max_new_tokens=4, do_sample=True, acceptance="recursive")
