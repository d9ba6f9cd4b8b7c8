"""Drafts that depend on their parent: trees exact, text unchanged, more accepted where a source knows something."""

import itertools
import math
from functools import partial

import pytest
import torch
from keyed import sampled
from safetensors.torch import save_file
from stubs import BLOCK, VOCAB, StubDrafter, decode, greedy, make_context, make_drafter, make_request, make_target

from hf_ddtree import DDTreeConfig, DFlashDraftModel
from hf_ddtree.drafting import DDTreeCandidateGenerator
from hf_ddtree.drafting.corrections import BigramTable, logits_of_change
from hf_ddtree.drafting.draft import Draft
from hf_ddtree.drafting.running_text import running_text_correction
from hf_ddtree.models.head import head_logits, is_plain_linear
from hf_ddtree.training.bigrams import PRIOR, count_bigrams, save_table
from hf_ddtree.tree import Marginals, build_tree_by_heap, build_tree_by_level, condition, top_marginals

BUILDERS = {"heap": build_tree_by_heap, "level": build_tree_by_level}
ROOT = 9

# Conditional marginals and trees


def random_values(generator, *shape, quantised, specials):
    values = 3 * torch.randn(*shape, generator=generator)
    if quantised:
        values = values.round()
    for special in specials:
        values[torch.rand(*shape, generator=generator) < 0.08] = special
    return values


def random_marginals(seed, *, quantised=False, impossible=False, corrections=()):
    """Conditional marginals of 2 rows, 4 depths and 5 of 9 tokens.

    Args:
        quantised: whole scores, which tie often.
        impossible: some tokens are, and some depths are NaN.
        corrections: values strewn over the corrections.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = random_values(generator, 2, 4, 9, quantised=quantised, specials=[-torch.inf] * impossible)
    if impossible and seed % 3 == 0:
        logits[0, 1] = torch.nan
    added = random_values(generator, 2, 4, 5, 5, quantised=quantised, specials=corrections)
    return condition(top_marginals(logits, 5), added)


def tied_marginals(seed, batch=2, depth=3, width=3):
    """Conditional log-probabilities in halves, some -inf, so that sums are exact and tie often."""
    generator = torch.Generator().manual_seed(seed)

    def halves(*shape):
        values = -torch.randint(0, 6, shape, generator=generator) / 2
        return values.masked_fill(torch.rand(shape, generator=generator) < 0.1, -torch.inf)

    log_probs = halves(batch, depth, width).sort(-1, descending=True).values
    tokens = torch.arange(batch * depth * width).view(batch, depth, width)
    return Marginals(tokens, log_probs, halves(batch, depth, width, width))


def assert_same_tree(one, other):
    for field in ("tokens", "parents", "depths", "scores"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field


MAKERS = {
    "random": random_marginals,
    "rounded": partial(random_marginals, quantised=True),
    "ties": tied_marginals,
    "impossible tokens": partial(random_marginals, impossible=True),
    "rounded, NaN": partial(random_marginals, quantised=True, impossible=True, corrections=[torch.nan]),
    "infinite corrections": partial(random_marginals, corrections=[-torch.inf, torch.inf]),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_heap_and_levels_build_the_same_conditional_tree(make):
    for seed in range(80):
        marginals = make(seed)
        root = torch.full((2, 1), ROOT)
        for budget in (1, 2, 3, 1 + seed % 64, 64):
            assert_same_tree(*(build(root, marginals, budget) for build in BUILDERS.values()))


def brute_force(marginals, row, budget):
    """The `budget` best prefixes as (tokens, score), ties by rank tuple."""
    depths, width = marginals.tokens.shape[1:]
    conditional = marginals.conditional[row].double()
    prefixes = []
    for depth in range(1, depths + 1):
        for ranks in itertools.product(range(width), repeat=depth):
            parents = (0, *ranks[:-1])
            score = 0.0
            for index in range(depth):
                score += float(conditional[index, parents[index], ranks[index]])
            prefixes.append((-score, ranks))
    prefixes.sort()
    tokens = marginals.tokens[row].tolist()
    return [
        (tuple(tokens[index][rank] for index, rank in enumerate(ranks)), -negative)
        for negative, ranks in prefixes[:budget]
    ]


def prefixes_of(tree, row):
    paths = [()]
    for parent, token in list(zip(tree.parents[row].tolist(), tree.tokens[row].tolist(), strict=True))[1:]:
        paths.append((*paths[parent], token))
    return list(zip(paths[1:], tree.scores[row, 1:].tolist(), strict=True))


@pytest.mark.parametrize("kind", BUILDERS)
def test_conditional_trees_are_the_best_prefixes(kind):
    for seed in range(30):
        marginals = tied_marginals(seed)
        for budget in (1, 2, 5, 12, 38, 64):
            tree = BUILDERS[kind](torch.full((2, 1), ROOT), marginals, budget)
            for row in range(2):
                assert prefixes_of(tree, row) == brute_force(marginals, row, budget)


@pytest.mark.parametrize("make", [each for name, each in MAKERS.items() if name != "ties"])
def test_children_share_the_mass_of_their_depths_candidates(make):
    for seed in range(30):
        marginals = make(seed)
        assert marginals.conditional.dtype == torch.float32 and not marginals.conditional.isnan().any()
        assert bool((marginals.conditional <= 0).all())
        mass = marginals.log_probs.exp().sum(-1, keepdim=True).expand_as(marginals.tokens)
        torch.testing.assert_close(marginals.conditional.exp().sum(-1), mass, rtol=1e-4, atol=1e-5)
        impossible = (marginals.log_probs == -torch.inf)[:, :, None].expand_as(marginals.conditional)
        assert bool((marginals.conditional[impossible] == -torch.inf).all())


def test_no_correction_leaves_the_marginals_tree():
    marginals = top_marginals(torch.randn(1, 4, 12, generator=torch.Generator().manual_seed(0)), 6)
    conditional = condition(marginals, torch.zeros(1, 4, 6, 6))
    torch.testing.assert_close(conditional.conditional, marginals.log_probs[:, :, None].expand(-1, -1, 6, -1))
    trees = [build_tree_by_heap(torch.tensor([[ROOT]]), each, 20) for each in (marginals, conditional)]
    assert (
        trees[0].tokens.tolist() == trees[1].tokens.tolist() and trees[0].parents.tolist() == trees[1].parents.tolist()
    )


# Text

PROMPT = torch.tensor([[6, 34, 56, 50, 30, 20, 44, 15, 38, 10, 34, 56]])
NEW = 24


class Head(torch.nn.Linear):
    """A head that the package can't read rows of, as quantised ones are."""


def wrapped_head():
    target = make_target("llama", initializer_range=0.2)
    head = Head(target.lm_head.in_features, target.lm_head.out_features, bias=False)
    head.weight = target.lm_head.weight
    target.set_output_embeddings(head)
    return target


TARGETS = {
    "llama": lambda: make_target("llama", initializer_range=0.2),
    "softcapped": lambda: make_target("gemma3", initializer_range=0.2, final_logit_softcapping=2.0),
    "head only called": wrapped_head,
}
NOTHING = {"draft_transition": False, "draft_text_weight": 0.0}
# The drafts are random, so that weights of this size decide what is in the tree.
SOURCES = {
    "transition": {"draft_transition": True, "draft_text_weight": 0.0},
    "table": {**NOTHING, "draft_table_weight": 3.0},
    "text": {"draft_transition": False, "draft_text_weight": 4.0},
    "all": {"draft_table_weight": 2.0, "draft_text_weight": 2.0},
}


def with_transition(target, rank=6, **overrides):
    """A random drafter whose transition is random too."""
    drafter = make_drafter(target, transition_rank=rank, **overrides)
    torch.nn.init.normal_(drafter.transition.up_proj.weight, generator=torch.Generator().manual_seed(2))
    return drafter


@pytest.fixture(scope="module")
def table_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("table") / "table.safetensors"
    texts = torch.randint(0, VOCAB, (20, 30), generator=torch.Generator().manual_seed(4))
    save_table(count_bigrams(texts, VOCAB), path)
    return str(path)


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return TARGETS[request.param]()


@pytest.fixture(scope="module")
def plain(target):
    """Greedy text, and text sampled with two seeds."""
    texts = {None: greedy(target, PROMPT, NEW).tolist()}
    texts |= {seed: sampled(target, PROMPT, NEW, seed, temperature=0.8, top_p=0.95).tolist() for seed in (1, 2)}
    assert len({str(text) for text in texts.values()}) == 3
    return texts


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("seed", [None, 1, 2], ids=["greedy", "seed 1", "seed 2"])
def test_text_is_that_of_plain_decoding(target, plain, table_file, source, seed):
    fields = dict(SOURCES[source])
    if "draft_table_weight" in fields:
        fields["draft_table"] = table_file
    if seed is not None:
        fields |= {"do_sample": True, "seed": seed, "temperature": 0.8, "top_p": 0.95}
    drafter = with_transition(target, depth_temperatures=[0.8 + 0.1 * depth for depth in range(BLOCK - 1)])
    for budget in (3, 24):
        assert decode(target, drafter, PROMPT, max_new_tokens=NEW, tree_budget=budget, **fields).tolist() == plain[seed]


def drafted(drafter, target, **fields):
    """The draft of a first round after PROMPT, and the marginals that a tree is made of."""
    config = DDTreeConfig(tree_budget=16, **fields)
    generator = DDTreeCandidateGenerator(drafter, target, config)
    states = target(PROMPT, output_hidden_states=True).hidden_states
    context = torch.cat([states[layer + 1] for layer in generator.target_layer_ids], dim=-1)[:, :-1]
    draft = generator.draft(make_request(PROMPT, make_context(context), 100))
    return draft, draft.marginals(config)


@torch.no_grad()
def test_every_source_has_its_say(target, table_file):
    drafter = with_transition(target)
    plain = drafted(drafter, target, **NOTHING)[1]
    assert plain.conditional is None
    said = [
        drafted(drafter, target, **fields, **({"draft_table": table_file} if "draft_table_weight" in fields else {}))[1]
        for fields in SOURCES.values()
    ]
    spreads = [(each.conditional - each.log_probs[:, :, None])[0, 1:].abs().max() for each in said]
    assert all(spread > 0.1 for spread in spreads)
    assert len({each.conditional.sum().item() for each in said}) == len(said)
    chain = drafted(drafter, target, tree_shape="chain", draft_text_weight=4.0)[1]
    assert chain.conditional is None and chain.tokens.shape[2] == 1


@torch.no_grad()
def test_the_transition_adds_what_the_changed_state_has_at_the_head(target):
    """For every head, read by rows or only called: the difference of the whole vocabulary's logits."""
    generator = torch.Generator().manual_seed(3)
    states, change = torch.randn(3, 1, 32, generator=generator), torch.randn(3, 4, 32, generator=generator)
    children = torch.randint(0, VOCAB, (3, 5), generator=generator)
    added = logits_of_change(target, states, change, children)
    assert added.shape == (3, 4, 5) and added.dtype == torch.float32
    for depth, parent in itertools.product(range(3), range(4)):
        before = states[depth, 0]
        before, after = (head_logits(target, each[None]) for each in (before, before + change[depth, parent]))
        torch.testing.assert_close(added[depth, parent], (after - before)[0, children[depth]], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_calling_the_head_equals_reading_its_rows():
    rows, called = TARGETS["llama"](), wrapped_head()
    assert is_plain_linear(rows.lm_head) and not is_plain_linear(called.lm_head)
    one, other = (drafted(with_transition(each), each)[1] for each in (rows, called))
    assert torch.equal(one.tokens, other.tokens)
    torch.testing.assert_close(one.conditional, other.conditional, rtol=1e-4, atol=1e-4)


# A language whose next token is a function of the last

NEXT = torch.arange(1, VOCAB + 1) % VOCAB


@torch.no_grad()
def successor_target():
    """After token x comes x + 1, whatever was before: layers that add nothing, and a head that looks x up."""
    target = make_target("llama")
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    embedding = target.model.embed_tokens.weight
    random = torch.randn(embedding.shape, generator=torch.Generator().manual_seed(0))
    embedding.copy_(torch.nn.functional.normalize(random, dim=-1))
    target.lm_head.weight[NEXT] = embedding.clone()
    return target


class SureOfTheFirst(StubDrafter):
    """Knows the token after the root, and nothing of what comes later."""

    @staticmethod
    def logits_for(committed, real):
        logits = torch.rand(real.shape, generator=torch.Generator().manual_seed(committed))
        logits[0, 0, committed % VOCAB] = 20.0
        return logits


@torch.no_grad()
def knowing_drafter(target):
    """Its transition is the target's own rule: silu(x) - silu(-x) = x carries the parent's embedding through."""
    real = make_drafter(target, transition_rank=64)
    transition, identity = real.transition, torch.eye(32)
    transition.state_proj.weight.zero_(), transition.state_proj.bias.zero_()
    transition.parent_proj.weight.copy_(torch.cat([identity, -identity]))
    transition.up_proj.weight.copy_(3 * torch.cat([identity, -identity], dim=1))
    drafter = SureOfTheFirst(real.config).eval()
    drafter.load_state_dict(real.state_dict())
    return drafter


@pytest.fixture(scope="module")
def successors(tmp_path_factory):
    target, path = successor_target(), tmp_path_factory.mktemp("successors") / "table.safetensors"
    save_table(count_bigrams([torch.arange(3 * VOCAB) % VOCAB], VOCAB), path)
    return target, knowing_drafter(target), str(path)


def tokens_per_round(successors, **fields):
    """Over 64 tokens after a prompt that has seen every pair; token n of the text is n modulo the vocabulary."""
    target, drafter, _ = successors
    prompt = torch.arange(VOCAB + 1)[None] % VOCAB
    fields = {"max_new_tokens": 64, "tree_budget": 64, "draft_text_weight": 0.0, **fields}
    fields = {"tree_top_k": VOCAB, **fields} if fields.get("tree_shape") is None else fields
    result = decode(target, drafter, prompt, return_dict_in_generate=True, **fields)
    assert result.sequences[0].tolist() == (torch.arange(2 * VOCAB + 1) % VOCAB).tolist()
    return result.mean_acceptance_length


def test_a_source_that_knows_the_language_lengthens_rounds(successors):
    alone = tokens_per_round(successors, draft_transition=False)
    with_table = {"draft_transition": False, "draft_table": successors[2], "draft_table_weight": 3.0}
    assert alone < 3.5
    assert tokens_per_round(successors) > 2 * alone
    assert tokens_per_round(successors, **with_table) > 1.5 * alone
    assert tokens_per_round(successors, draft_transition=False, draft_text_weight=9.0) > 1.5 * alone


def test_the_transition_is_used_unless_told_not_to(successors):
    assert tokens_per_round(successors) == tokens_per_round(successors, draft_transition=True)
    chains = [tokens_per_round(successors, tree_shape="chain", draft_transition=each) for each in (None, False)]
    assert chains[0] == chains[1]


# What is refused


def test_a_transition_that_is_not_there_is_refused():
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"`draft_transition` is True.*hf-ddtree train"):
        decode(target, make_drafter(target), PROMPT, max_new_tokens=2, draft_transition=True)


@torch.no_grad()
def test_false_is_a_drafter_without_a_transition():
    target = make_target("llama")
    drafter = with_transition(target)
    without = make_drafter(target)
    without.load_state_dict({k: v for k, v in drafter.state_dict().items() if not k.startswith("transition")})
    one, other = (drafted(each, target, **NOTHING)[1] for each in (drafter, without))
    assert torch.equal(one.log_probs, other.log_probs) and one.conditional is other.conditional is None
    assert without.transition is None and drafted(without, target, draft_text_weight=0.0)[1].conditional is None


BAD_FIELDS = {
    "draft_table_weight": [-1.0, math.nan, "much", True],
    "draft_text_weight": [-0.5, math.inf, "some"],
    "draft_transition": ["yes", 2, 0, 1, 1.0],
    "draft_table": [3, ["a"]],
}


@pytest.mark.parametrize("name, value", [(name, value) for name, values in BAD_FIELDS.items() for value in values])
def test_bad_values_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=f"`{name}`"):
        DDTreeConfig(**{name: value})


def write_table(path, vocab_size):
    save_table(count_bigrams([torch.arange(10)], vocab_size), path)


def write_other_tensors(path):
    save_file({"keys": torch.zeros(2, dtype=torch.int64)}, path, metadata={"vocab_size": str(VOCAB)})


def write_torn(path):
    write_table(path, VOCAB)
    path.write_bytes(path.read_bytes()[:-9])


BAD_TABLES = {
    "missing": lambda path: None,
    "no safetensors": lambda path: path.write_text("a table"),
    "torn": write_torn,
    "other tensors": write_other_tensors,
    "another vocabulary": lambda path: write_table(path, VOCAB + 1),
    "no vocabulary": lambda path: save_file({n: torch.zeros(1) for n in ("keys", "values", "parents", "unseen")}, path),
}


@pytest.mark.parametrize("write", BAD_TABLES.values(), ids=BAD_TABLES)
def test_bad_tables_are_refused_with_a_remedy(write, tmp_path):
    write(tmp_path / "table.safetensors")
    target = make_target("llama")
    with pytest.raises(ValueError, match=r"`draft_table`.*table\.safetensors.*`hf-ddtree table`"):
        decode(target, make_drafter(target), PROMPT, max_new_tokens=2, draft_table=str(tmp_path / "table.safetensors"))


# Files of drafters

TEMPERATURES = [0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0]


@torch.no_grad()
def test_a_saved_drafter_drafts_the_same(tmp_path):
    target = make_target("llama")
    drafter = with_transition(target, depth_temperatures=TEMPERATURES)
    drafter.save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.config.transition_rank == 6 and loaded.config.depth_temperatures == TEMPERATURES
    one, other = (drafted(each, target)[1] for each in (drafter, loaded))
    for field in ("tokens", "log_probs", "conditional"):
        assert torch.equal(getattr(one, field), getattr(other, field)), field


def test_a_checkpoint_without_a_transition_has_none(tmp_path):
    make_drafter(make_target("llama")).save_pretrained(tmp_path)
    loaded = DFlashDraftModel.from_pretrained(tmp_path)
    assert loaded.transition is None
    assert loaded.config.transition_rank == 0 and loaded.config.depth_temperatures is None


def test_a_transition_that_the_weights_lack_is_refused(tmp_path):
    drafter = make_drafter(make_target("llama"))
    drafter.config.transition_rank = 4
    drafter.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks the drafter tensors.*transition"):
        DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("temperatures", [[1.0] * 6, [1.0] * 8, [], [1.0] * 6 + [0.0], [1.0] * 6 + [math.inf]])
def test_temperatures_that_do_not_fit_are_refused(temperatures):
    with pytest.raises(ValueError, match=r"`depth_temperatures`.*7 positive"):
        make_drafter(make_target("llama"), depth_temperatures=temperatures)


def test_a_new_transition_changes_nothing():
    target = make_target("llama")
    drafter = make_drafter(target, transition_rank=4)
    assert not drafter.transition.up_proj.weight.any()


# Tables and running text by hand

#                      0 -> 1 twice, 1 -> 0 twice, 0 -> 2 once; 2 is never a parent
SMALL = torch.tensor([0, 1, 0, 1, 0, 2])


def test_a_table_holds_smoothed_mutual_information():
    table = count_bigrams([SMALL], 4)
    expected = {
        (0, 1): math.log((2 + PRIOR * 2 / 5) / (3 + PRIOR) / (2 / 5)),
        (0, 2): math.log((1 + PRIOR * 1 / 5) / (3 + PRIOR) / (1 / 5)),
        (1, 0): math.log((2 + PRIOR * 2 / 5) / (2 + PRIOR) / (2 / 5)),
        (0, 0): math.log(PRIOR / (3 + PRIOR)),
        (1, 3): math.log(PRIOR / (2 + PRIOR)),
        (2, 0): 0.0,
        (3, 3): 0.0,
    }
    everything = torch.arange(4)[None]
    looked_up = table.lookup(everything, everything)[0]
    assert {pair: pytest.approx(float(looked_up[pair]), abs=1e-6) for pair in expected} == expected


def test_a_tables_probabilities_add_up():
    texts = torch.randint(0, 12, (6, 40), generator=torch.Generator().manual_seed(0))
    table = count_bigrams(texts, 12)
    background = texts[:, 1:].flatten().bincount(minlength=12) / texts[:, 1:].numel()
    everything = torch.arange(12)[None]
    totals = (background * table.lookup(everything, everything)[0].exp()).sum(-1)
    torch.testing.assert_close(totals, torch.ones(12))


def test_pairs_do_not_reach_over_texts():
    table = count_bigrams([torch.tensor([0, 1]), torch.tensor([2, 3]), torch.tensor([3])], 4)
    assert table.keys.tolist() == [0 * 4 + 1, 2 * 4 + 3] and table.parents.tolist() == [0, 2]


def test_a_saved_table_is_the_same_in_half_precision(tmp_path):
    table = count_bigrams([SMALL], 4)
    save_table(table, tmp_path / "deep" / "table.safetensors")
    loaded = BigramTable.load(tmp_path / "deep" / "table.safetensors", 4)
    everything = torch.arange(4)[None]
    torch.testing.assert_close(
        loaded.lookup(everything, everything), table.lookup(everything, everything), rtol=2**-10, atol=0
    )


@pytest.mark.parametrize("texts", [[], [torch.tensor([1])]])
def test_no_pairs_are_refused(texts):
    with pytest.raises(ValueError, match="two tokens"):
        count_bigrams(texts, 4)


def test_running_text_counts_its_pairs():
    """Of each row its own."""
    correct = running_text_correction([SMALL, SMALL[:1], SMALL[1:3]], weight=0.5)
    parents, children = torch.tensor([[0, 0, 0], [1, 2, 0]]), torch.tensor([[1, 2, 3], [0, 1, 2]])
    counts = torch.tensor([[[2, 1, 0]] * 3, [[2, 0, 0], [0, 0, 0], [0, 2, 1]]])
    once = torch.tensor([[[0, 0, 0]] * 3, [[1, 0, 0], [0, 0, 0], [0, 0, 0]]])
    expected = 0.5 * (1 + torch.stack([counts, torch.zeros_like(counts), once])).log()
    corrections = correct(parents.expand(3, -1, -1), children.expand(3, -1, -1))
    torch.testing.assert_close(corrections, expected)


def test_running_text_knows_two_tokens_at_the_first_two_depths():
    """At the first the one before the root, at the second the root; deeper the path decides."""
    ids = torch.tensor([3, 1, 0, 3, 1, 0, 3, 1])  # 3 1 0 twice, 1 0 3 twice; the root is 1
    parents, children = torch.tensor([[[1], [0], [0]]]), torch.tensor([[[0], [3], [3]]])
    pair, triple = torch.log(torch.tensor(3.0)), 2 * torch.log(torch.tensor(3.0))
    expected = torch.stack([pair + triple, pair + triple, pair]).view(1, 3, 1, 1)
    torch.testing.assert_close(running_text_correction([ids], weight=1.0)(parents, children), expected)
    strangers = running_text_correction([torch.tensor([3, 1, 0, 3, 1, 0, 2, 1])], weight=1.0)
    torch.testing.assert_close(strangers(parents, children)[0, 0], pair.view(1, 1))


def test_corrections_add_up_before_the_temperature():
    """By hand: log softmax of (logits + both corrections) / temperature within the depth's candidates."""
    logits = torch.tensor([[[0.0, 1.0, 2.0], [2.0, 0.0, 1.0]]])
    table, text = count_bigrams([SMALL], 3), running_text_correction([SMALL], 1.0)
    draft = Draft(torch.tensor([[1]]), logits, (table.correction(2.0), text), torch.tensor([[0.5], [2.0]]))
    marginals = draft.marginals(DDTreeConfig(tree_budget=3))
    everything = torch.arange(3)[None]
    parents = torch.stack([torch.tensor([1, 1, 1]), marginals.tokens[0, 0]])
    children = everything.expand(2, -1)
    added = 2.0 * table.lookup(parents, children) + text(parents[None], children[None])[0]
    for index, temperature in ((0, 0.5), (1, 2.0)):
        order = marginals.tokens[0, index]
        expected = ((logits[0, index] + added[index]) / temperature).log_softmax(-1)[:, order]
        torch.testing.assert_close(marginals.conditional[0, index], expected)
