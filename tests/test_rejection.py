"""The classical acceptance rules and the walk: exact laws by complete enumeration, and numeric edges.

Every uniform number runs through a grid of K points of its own: k / K ("left points": 0 and all thresholds are among
them) or (k + 0.5) / K ("midpoints"). Targets are searched, in fractions, for thresholds that are multiples of 1 / K; on
left points they are dyadic too, hence exact in float64. So counts equal the law times the size of the grid, exactly.
"""

import inspect
import itertools
import random
from collections import defaultdict, namedtuple
from fractions import Fraction

import pytest
import torch

from hf_ddtree import rejection
from hf_ddtree.acceptance import walk, walk_at_once
from hf_ddtree.rejection import block_verification, draw, draw_without_replacement, recursive_rejection
from hf_ddtree.tree import Tree, build_tree, top_marginals

Case = namedtuple("Case", "p q")  # the target's law after each prefix, the draft law of each depth
VOCAB = 3
LEFT, MIDDLE = 0.0, 0.5
ALMOST_ONE = 1 - 2.0**-53


def quarters(*names):
    return [[Fraction(int(digit), 4) for digit in name] for name in names]


def random_laws(rng, total=8):
    while True:
        cuts = sorted(rng.choices(range(total + 1), k=VOCAB - 1))
        yield [Fraction(high - low, total) for low, high in zip([0, *cuts], [*cuts, total], strict=True)]


def positive_part(p, q):
    return [max(a - b, Fraction(0)) for a, b in zip(p, q, strict=True)]


def normal(weights):
    return [weight / sum(weights) for weight in weights] if any(weights) else weights


def on_grid(size, values):
    return all((size * value).denominator == 1 for value in values)


def prefixes_of(*lengths):
    return [prefix for length in lengths for prefix in itertools.product(range(VOCAB), repeat=length)]


def siblings_fit(p, q, coins, last):
    """Whether a node with up to len(coins) children keeps to grids of `coins` points, and its bonus token to `last`."""
    if not on_grid(last, itertools.accumulate(p)):
        return False
    for token in range(VOCAB if coins else 0):
        if q[token] and not on_grid(coins[0], [min(Fraction(1), p[token] / q[token])]):
            return False
        if p[token] < q[token]:  # it may be rejected
            left, without = positive_part(p, q), [*q[:token], Fraction(0), *q[token + 1 :]]
            if not siblings_fit(normal(left), normal(without), coins[1:], last):
                return False
    return True


def sibling_case(seed, q, coins, last):
    """`coins`: grid sizes by rank, as many as a node may have children. With two, mostly laws for which both matter."""
    laws = random_laws(rng := random.Random(seed))

    def fits(p, q):
        gains = {a / b for a, b in zip(p, q, strict=True) if b and a > b}
        return siblings_fit(p, q, coins, last) and (len(gains) >= len(coins) or rng.random() < 0.2)

    p = {prefix: next(p for p in laws if fits(p, q[len(prefix)])) for prefix in prefixes_of(*range(len(q)))}
    return Case(p | {prefix: next(laws) for prefix in prefixes_of(len(q))}, q)


def block_thresholds(ratio, p, q):
    """At a node of a chain: its own coin's threshold, the bonus token's law, the ratio of each next token."""
    left = positive_part([ratio * weight for weight in p], q)
    own = Fraction(1) if ratio == 1 else sum(left) / (sum(left) + 1 - ratio)
    ratios = [min(Fraction(1), ratio * a / b) if b else 0 for a, b in zip(p, q, strict=True)]
    return own, normal(left) if any(left) else p, ratios


def block_case(seed, q, coins, last):
    """For a chain of depth 2; `coins`: grid sizes by depth."""
    laws = random_laws(random.Random(seed))

    def fits(p, ratio, q):
        own, left, ratios = block_thresholds(ratio, p, q)
        return on_grid(coins[0], [own]) and on_grid(coins[1], ratios) and on_grid(last, itertools.accumulate(left))

    p = {(): next(p for p in laws if fits(p, Fraction(1), q[0]))}
    for token, ratio in enumerate(block_thresholds(Fraction(1), p[()], q[0])[2]):
        p[token,] = next(p for p in laws if fits(p, ratio, q[1]))
    return Case(p | {prefix: next(laws) for prefix in prefixes_of(2)}, q)


def tensor(laws):
    return torch.tensor([[float(weight) for weight in law] for law in laws], dtype=torch.float64)


def numbers(case, drafts, coins, last, offset):
    """Drafts as `RejectionRule.build` draws them, coins, bonus numbers: grids of so many points by depth and rank."""
    columns = torch.cartesian_prod(*((torch.arange(n).double() + offset) / n for n in [*drafts, *coins, last]))
    drafted, tested = columns[:, :-1].reshape(len(columns), 2, len(case.q), -1).unbind(1)
    return draw_without_replacement(tensor(case.q).expand(len(columns), -1, -1), drafted), tested, columns[:, -1]


def emit(case, topology, rule, drafts, coins, last):
    """[rows, depth + 1] tokens accepted, then a bonus token drawn from the returned weights, then -1."""
    rows, depth, ranks = drafts.shape
    children = torch.full((len(topology) + 1, ranks), -1)
    depths, tokens, prefixes = [0], [torch.full((rows,), VOCAB - 1)], [torch.zeros(rows, dtype=torch.int64)]
    for node, (parent, rank) in enumerate(topology, start=1):
        children[parent, rank] = node
        depths.append(depths[parent] + 1)
        tokens.append(drafts[:, depths[parent], rank])
        prefixes.append(prefixes[parent] * VOCAB + tokens[node])
    tables = [tensor(case.p[prefix] for prefix in prefixes_of(length)) for length in depths]
    p = torch.stack([table[prefix] for table, prefix in zip(tables, prefixes, strict=True)], dim=1)
    tokens = torch.stack(tokens, dim=1)
    path, weights = rule(p, tensor(case.q).expand(rows, -1, -1), tokens, children, coins)
    assert path.shape == (rows, depth + 1) and bool((path[:, 0] == 0).all())
    emitted = torch.where(path > 0, tokens.gather(1, path.clamp(min=0)), -1).roll(-1, dims=1)
    return emitted.scatter(1, (path >= 0).sum(1, keepdim=True) - 1, draw(weights, last)[:, None])


def block(p, q, tokens, children, coins):
    return block_verification(p, q, tokens, coins[..., 0])


def extensions(case, prefix, length):
    """The target's law of the streams of `length` tokens, given their first."""
    if len(prefix) == length:
        return {prefix: Fraction(1)}
    return {
        stream: chance * rest
        for token, chance in enumerate(case.p[prefix])
        for stream, rest in (extensions(case, (*prefix, token), length) if chance else {}).items()
    }


def bias(case, emitted):
    """Total variation from the target's law. Rows are equally likely; the target continues those that end early."""
    length, base = emitted.shape[1], VOCAB + 1
    streams = defaultdict(Fraction)
    codes, counts = ((emitted + 1) * base ** torch.arange(length)).sum(1).unique(return_counts=True)
    for code, count in zip(codes.tolist(), counts.tolist(), strict=True):
        row = [code // base**place % base - 1 for place in range(length)]
        for stream, chance in extensions(case, tuple(token for token in row if token >= 0), length).items():
            streams[stream] += count * chance / len(emitted)
    target = extensions(case, (), length)
    return sum(abs(streams[stream] - target.get(stream, 0)) for stream in streams.keys() | target.keys()) / 2


CHAIN = [(0, 0), (1, 0)]
# (parent, rank) of each node below the root; points of the grids of drafts, coins (1 where unused), bonus token.
SHAPES = {
    "siblings": ([(0, 0), (0, 1)], [4, 6, 1, 1], [12, 12, 1, 1], 24),
    "uneven": ([(0, 0), (0, 1), (1, 0)], [4, 6, 4, 1], [4, 12, 4, 1], 24),
    "below the second": ([(0, 0), (0, 1), (2, 0)], [4, 6, 4, 1], [4, 12, 4, 1], 24),
    "full": ([(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], [4, 6, 4, 6], [4, 4, 4, 4], 8),
}


@pytest.mark.parametrize("names", list(itertools.permutations(["211", "112", "121", "220"], 2)), ids="-".join)
def test_fault_06_law_on_a_chain(names):
    """Token by token and by block, on left points; by block also with ninths and fifteenths, on midpoints."""
    q = quarters(*names)
    for seed in range(3):
        case = sibling_case(seed, q, coins=[4], last=8)
        assert bias(case, emit(case, CHAIN, recursive_rejection, *numbers(case, [4, 4], [4, 4], 8, LEFT))) == 0
        case = block_case(seed, q, coins=[8, 16], last=8)
        assert bias(case, emit(case, CHAIN, block, *numbers(case, [4, 4], [8, 16], 8, LEFT))) == 0
    case = block_case(0, q, coins=[45, 16], last=24)
    assert bias(case, emit(case, CHAIN, block, *numbers(case, [4, 4], [45, 16], 24, MIDDLE))) == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_fault_06_law_without_replacement(shape):
    """One list of drafts per depth for all parents; second drafts and second coins in thirds, on midpoints."""
    topology, drafts, coins, last = SHAPES[shape]
    for seed in [17] if shape == "full" else [4, 8, 9]:  # the full tree has 1.2 million combinations
        case = sibling_case(seed, quarters("211", "112"), coins[:2], last)
        grids = numbers(case, drafts, coins, last, MIDDLE)
        assert bias(case, emit(case, topology, recursive_rejection, *grids)) == 0


@pytest.mark.parametrize("names", list(itertools.product(["400", "004", "220", "013", "211"], repeat=2)), ids="-".join)
def test_law_where_tokens_run_out(names):
    """Three ranks, so that q may have fewer tokens; one-hot and disjoint laws, p = q. On midpoints."""
    p, *q = quarters(*names)
    case = Case({(): p} | {prefix: quarters("121")[0] for prefix in prefixes_of(1)}, q)
    assert siblings_fit(case.p[()], case.q[0], [12, 3, 2], 12)
    grids = numbers(case, [4, 6, 1], [12, 3, 2], 12, MIDDLE)
    assert bias(case, emit(case, [(0, 0), (0, 1), (0, 2)], recursive_rejection, *grids)) == 0


def example(kind, seed):
    """A case, its topology, its rule and its numbers."""
    q, rule = quarters("211", "121"), block if kind == "block" else recursive_rejection
    if kind == "siblings":
        case, (topology, *sizes) = sibling_case(seed, q, [4, 12], 24), SHAPES[kind]
        return case, topology, rule, *numbers(case, *sizes, MIDDLE)
    case = block_case(seed, q, [8, 16], 8) if kind == "block" else sibling_case(seed, q, [32], 8)
    return case, CHAIN, rule, *numbers(case, [4, 4], [32, 32], 8, LEFT)


MISUSES = ["other temperature", "other row of p", "bonus from p", "coin again", "best of q", "sorted by q"]


def misused(how, case, rule, drafts, coins, last):
    """The rule and its numbers, one of them wrong."""
    q = tensor(case.q).expand(len(last), -1, -1)
    if how == "best of q":
        drafts = q.topk(drafts.shape[2]).indices
    elif how == "sorted by q":
        drafts = drafts.gather(2, q.gather(2, drafts).argsort(dim=2, descending=True, stable=True))
    elif how == "coin again":
        last = coins[:, -1 if rule is block else 0, 0]

    def mutant(p, q, *rest):
        q = q.square() / q.square().sum(-1, keepdim=True) if how == "other temperature" else q
        path, weights = rule(p.roll(1, dims=1) if how == "other row of p" else p, q, *rest)
        return path, p[torch.arange(len(p)), path.amax(1)] if how == "bonus from p" else weights

    return mutant, drafts, coins, last


@pytest.mark.parametrize(
    "how, kind", [*itertools.product(MISUSES[:-1], ["chain", "siblings", "block"]), ("sorted by q", "siblings")]
)
def test_fault_06_07_34_misuse_is_caught(how, kind):
    """By more than 1 / 24, which is more than a threshold off its grid could shift."""
    case, topology, *used = example(kind, seed=8)
    assert bias(case, emit(case, topology, *used)) == 0
    assert bias(case, emit(case, topology, *misused(how, case, *used))) > Fraction(1, 24)


MUTATIONS = [
    ("chain", "* chance < target", "* chance <= target"),
    ("chain", "_residual(target, draft)", "target"),
    ("siblings", "_normalised(_without(draft, token))", "draft"),
    ("siblings", "_residual(target, draft)", "_residual(p[rows, cursor], draft)"),
    ("siblings", "coins[:, depth, rank]", "coins[:, depth, 0]"),
    ("block", "< passes", "<= passes"),
    ("block", ".clamp(max=1.0)", ""),
    ("block", "mass / (mass + 1 - ratio)", "ratio"),
    ("block", "ratio[:, None] * p[:, i] - q", "p[:, i] - q"),
]


@pytest.mark.parametrize("kind, old, new", MUTATIONS)
def test_altered_rule_is_caught(kind, old, new):
    case, topology, rule, *grids = example(kind, seed=4 if kind == "siblings" else 8)
    source, altered = inspect.getsource(block_verification if rule is block else recursive_rejection), {}
    assert source.count(old) == 1
    exec(source.replace(old, new), vars(rejection).copy(), altered)
    by_block = lambda *args: altered["block_verification"](*args[:3], args[4][..., 0])  # noqa: E731
    assert bias(case, emit(case, topology, altered.get("recursive_rejection", by_block), *grids)) > 0


def token_by_token(p, q, tokens, children, coins):
    return recursive_rejection(p, q, tokens, torch.tensor([[*range(1, q.shape[1] + 1), -1]]).T, coins)


@pytest.mark.parametrize("rule", [token_by_token, block])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_p_equal_to_q_accepts_every_draft(rule, depth):
    p = torch.randn(500, depth + 1, 17, dtype=torch.float64).mul(4).softmax(-1)
    drafts = draw(p[:, :-1], torch.rand(500, depth, dtype=torch.float64))
    tokens = torch.cat([torch.zeros(500, 1, dtype=torch.int64), drafts], dim=1)
    coins = torch.full((500, depth, 1), ALMOST_ONE, dtype=torch.float64)
    path, weights = rule(p, p[:, :-1], tokens, None, coins)
    assert torch.equal(path, torch.arange(depth + 1).expand(500, -1)) and torch.equal(weights, p[:, -1])
    coins[:, -1:] = 1  # out of range: the last draft is rejected, and p - q leaves nothing
    path, weights = rule(p, p[:, :-1], tokens, None, coins)
    assert torch.allclose(weights, p[:, max(depth - 1, 0)], rtol=1e-14, atol=0)


@pytest.mark.parametrize("rule", [token_by_token, block])
def test_coin_of_zero_rejects_the_impossible(rule):
    """A target probability of 0; another of 1e-13 is kept in double precision."""
    p = torch.tensor([[[0.5, 0.5 - 1e-13, 0.0, 1e-13], [1.0, 0.0, 0.0, 0.0]]], dtype=torch.float64)
    q = torch.tensor([[[0.25, 0.0, 0.75, 0.0]]], dtype=torch.float64)
    path, weights = rule(p, q, torch.tensor([[0, 2]]), None, torch.zeros(1, 1, 1, dtype=torch.float64))
    assert path.tolist() == [[0, -1]] and weights.dtype == torch.float64
    expected = pytest.approx([0.25, 0.5 - 1e-13, 0, 1e-13], rel=1e-14, abs=0)
    assert (weights[0] * 0.75 / weights.sum()).tolist() == expected


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 0.5, ALMOST_ONE])
def test_no_token_without_weight_is_drawn(u):
    weights = torch.rand(4000, 20, dtype=torch.float64) * (torch.rand(4000, 20) < torch.rand(4000, 1))
    weights[0] = torch.tensor([0.1] * 10 + [0.0] * 10)
    weights = weights[weights.sum(1) > 0]
    tokens = draw(weights, torch.full((len(weights),), u, dtype=torch.float64))
    assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_draw_at_the_edges():
    weights = torch.tensor([0.0, 1.0, 0.0, 0.0, 2.0, 5.0, 0.0], dtype=torch.float64).expand(8, -1)
    assert draw(weights, torch.arange(8) / 8.0).tolist() == [1, 4, 4, 5, 5, 5, 5, 5]
    assert draw(torch.tensor([1, 1e-12]).double(), torch.full((), ALMOST_ONE, dtype=torch.float64)).item() == 1


def assert_walks_agree(tree, choices, max_depth):
    """Both walks; returns the tokens emitted, as `walk_at_once` gives them."""
    path, emitted = walk_at_once(tree, choices, max_depth)
    for row, (nodes, tokens, script) in enumerate(zip(path.tolist(), emitted.tolist(), choices.tolist(), strict=True)):
        one = tree.row(row)
        accepted = walk(one, lambda node, script=script: (script[node], False))
        padding = [-1] * (max_depth + 1 - len(accepted.path))
        assert (nodes, tokens) == ([*accepted.path, *padding], [*accepted.tokens, *padding])
    return emitted


def random_tree(rows, depth, budget, vocab=VOCAB):
    logits = torch.randn(rows, depth, vocab) * torch.rand(rows, 1, 1) * 4
    return build_tree(torch.zeros(rows, 1, dtype=torch.int64), top_marginals(logits, 3), budget)


@pytest.mark.parametrize("budget", range(1, 7))
def test_fault_06_law_of_the_walk(budget):
    """Both walks, over every combination of what the target may choose at the nodes of a best-first tree."""
    tree = random_tree(1, 2, budget)
    paths, depths = tree.path_tokens()[0].tolist(), tree.depths[0].tolist()
    prefixes = [tuple(path[:depth]) for path, depth in zip(paths, depths, strict=True)]
    case = Case(dict(zip(prefixes_of(0, 1, 2), random_laws(random.Random(budget), 4), strict=False)), [])
    equally_likely = [[token for token in range(VOCAB) for _ in range(int(4 * case.p[of][token]))] for of in prefixes]
    choices = torch.cartesian_prod(*map(torch.tensor, equally_likely))
    trees = Tree(*(field.expand(len(choices), -1) for field in (tree.tokens, tree.parents, tree.depths, tree.scores)))
    assert bias(case, assert_walks_agree(trees, choices, max_depth=2)) == 0


def test_both_walks_agree():
    """2,500 trees of 1 node (the root alone) to 25, in batches of 4 that differ in shape."""
    lengths = set()
    for budget, depth, more in itertools.product(range(25), range(1, 6), range(5)):
        tree = random_tree(4, depth, budget, vocab=5)
        likely, choices = torch.randint(6, (2, *tree.tokens.shape))
        likely = likely.scatter(1, tree.parents[:, 1:], tree.tokens[:, 1:])
        choices = torch.where(torch.rand(choices.shape) < 0.7, likely, choices)
        emitted = assert_walks_agree(tree, choices, int(tree.depths.max()) + more)
        lengths |= set((emitted >= 0).sum(1).tolist())
    assert lengths == {1, 2, 3, 4, 5, 6}
