"""Processors over a whole tree: every node gets what a call of its own, on its own ids, gives it."""

from collections.abc import Callable

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation import logits_process as library

from hf_ddtree.processors import BY_ROW, BY_SEQUENCE, CONTEXT_FREE, outside, process_tree
from hf_ddtree.tree import Tree

VOCAB = 48
IDS = torch.tensor([[7, 3, 11, 7, 19, 3, 2, 11, 7]])  # the root last; a node of depth d has 9 + d ids
END = torch.tensor([5])

PROCESSORS: dict[str, Callable[[], LogitsProcessor]] = {
    "temperature": lambda: library.TemperatureLogitsWarper(0.7),
    "top_k": lambda: library.TopKLogitsWarper(5),
    "top_p": lambda: library.TopPLogitsWarper(0.6),
    "min_p": lambda: library.MinPLogitsWarper(0.1),
    "typical": lambda: library.TypicalLogitsWarper(0.5),
    "epsilon": lambda: library.EpsilonLogitsWarper(0.05),
    "eta": lambda: library.EtaLogitsWarper(0.3),
    "top_h": lambda: library.TopHLogitsWarper(0.4),
    "suppress": lambda: library.SuppressTokensLogitsProcessor([1, 4]),
    "remove inf and nan": lambda: library.InfNanRemoveLogitsProcessor(),
    "normalise": lambda: library.LogitNormalization(),
    "repetition": lambda: library.RepetitionPenaltyLogitsProcessor(1.7),
    "repetition, new only": lambda: library.RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=9),
    "no repeated 1-gram": lambda: library.NoRepeatNGramLogitsProcessor(1),
    "no repeated 2-gram": lambda: library.NoRepeatNGramLogitsProcessor(2),
    "sequence bias": lambda: library.SequenceBiasLogitsProcessor([[[7, 3], 4.0], [[3], -2.0], [[7, 7, 2], 9.0]]),
    "bad words": lambda: library.NoBadWordsLogitsProcessor([[7, 3], [9], [7, 7, 2], [3, 7]], END),
    "min_length": lambda: library.MinLengthLogitsProcessor(11, END),
    "min_new_tokens": lambda: library.MinNewTokensLengthLogitsProcessor(6, 5, END),
    "forced begin": lambda: library.ForcedBOSTokenLogitsProcessor(2),
    "forced end": lambda: library.ForcedEOSTokenLogitsProcessor(12, END),
    "exponential decay": lambda: library.ExponentialDecayLengthPenalty((3, 1.5), END, 6),
    "suppress at begin": lambda: library.SuppressTokensAtBeginLogitsProcessor([1, 4], 10),
    "watermark lefthash": lambda: library.WatermarkLogitsProcessor(VOCAB, "cpu"),
    "watermark selfhash": lambda: library.WatermarkLogitsProcessor(
        *(VOCAB, "cpu"), seeding_scheme="selfhash", context_width=3
    ),
    "encoder repetition": lambda: library.EncoderRepetitionPenaltyLogitsProcessor(1.7, IDS[:, :3]),
    "encoder no repeated 2-gram": lambda: library.EncoderNoRepeatNGramLogitsProcessor(2, IDS),
}

if Version(transformers.__version__) >= Version("5.24"):  # as `generate` builds it for a padded prompt
    PROCESSORS["repetition, padded"] = lambda: library.RepetitionPenaltyLogitsProcessor(
        1.7, prompt_ignore_length=torch.tensor([3])
    )


def random_tree(seed: int, nodes: int, depth: int) -> Tree:
    """Parents before children, up to `depth` deep, over few enough tokens that paths repeat themselves."""
    generator = torch.Generator().manual_seed(seed)

    def below(limit):
        return int(torch.randint(limit, (), generator=generator))

    tokens, parents, depths = [int(IDS[0, -1])], [0], [0]
    while len(tokens) < nodes:
        parent = below(len(tokens))
        if depths[parent] < depth:
            tokens.append((2, 3, 7, 9, 11)[below(5)])
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return Tree(*(torch.tensor([field]) for field in (tokens, parents, depths)), scores=torch.zeros(1, nodes).double())


def random_scores(seed: int, nodes: int) -> torch.Tensor:
    """With exact ties, as 16-bit logits have them, and -inf."""
    scores = 3 * torch.randn(nodes, VOCAB, generator=torch.Generator().manual_seed(seed))
    scores[torch.rand(nodes, VOCAB, generator=torch.Generator().manual_seed(seed + 1)) < 0.05] = -torch.inf
    return scores.bfloat16().float()


def path_ids(ids: torch.Tensor, tree: Tree, node: int) -> torch.Tensor:
    """[1, length] the committed ids and the tokens on the way to `node`."""
    path = []
    while node:
        path.insert(0, int(tree.tokens[0, node]))
        node = int(tree.parents[0, node])
    return torch.cat([ids, torch.tensor([path], dtype=torch.int64)], dim=1)


def one_by_one(make: Callable[[], LogitsProcessorList], ids, tree, scores):
    """Fresh processors for each node, called on that node alone."""
    rows = [make()(path_ids(ids, tree, node), scores[node : node + 1].clone()) for node in range(tree.num_nodes)]
    return torch.cat(rows)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """The same bits; NaN, which some processors make of -inf, is like NaN."""
    return torch.equal(left.isnan(), right.isnan()) and torch.equal(left.nan_to_num(0.5), right.nan_to_num(0.5))


def test_every_known_class_is_tried():
    assert {type(make()) for make in PROCESSORS.values()} == CONTEXT_FREE | BY_ROW | BY_SEQUENCE
    assert not outside([make() for make in PROCESSORS.values()], CONTEXT_FREE, BY_ROW, BY_SEQUENCE)


@pytest.mark.parametrize("name", PROCESSORS)
def test_equals_one_call_per_node(name):
    ids = IDS[:, :1] if name == "forced begin" else IDS  # which acts on a sequence of one token
    acted, minded = False, False
    for seed, (nodes, depth) in enumerate([(1, 1), (2, 1), (9, 8), (17, 3), (40, 6)]):
        tree, scores = random_tree(seed, nodes, depth), random_scores(seed, nodes)
        if name == "remove inf and nan":
            scores[0, 3], scores[-1, 4] = torch.nan, torch.inf
        expected = one_by_one(lambda: LogitsProcessorList([PROCESSORS[name]()]), ids, tree, scores)
        actual = process_tree(LogitsProcessorList([PROCESSORS[name]()]), ids, tree, scores.clone())
        assert same(actual, expected)
        at_root = torch.cat([PROCESSORS[name]()(ids, row[None].clone()) for row in scores])
        acted |= not same(expected, scores)
        minded |= not same(expected, at_root)
    assert acted
    # All but the context-free ones mind the path, which the test would otherwise not see.
    blind = {"encoder repetition"}
    assert minded == (type(PROCESSORS[name]()) not in CONTEXT_FREE and name not in blind)


MIXED = (
    *("repetition", "temperature", "encoder no repeated 2-gram", "no repeated 2-gram", "top_k", "watermark lefthash"),
    "normalise",
)


@pytest.mark.parametrize("seed", range(4))
def test_a_list_keeps_its_order(seed):
    """Each processor works on what the one before it left, whatever groups they take."""

    def make():
        return LogitsProcessorList([PROCESSORS[name]() for name in MIXED])

    tree, scores = random_tree(seed, 24, 5), random_scores(seed, 24)
    expected = one_by_one(make, IDS, tree, scores)
    assert same(process_tree(make(), IDS, tree, scores.clone()), expected)
    reversed_list = LogitsProcessorList([PROCESSORS[name]() for name in reversed(MIXED)])
    assert not same(process_tree(reversed_list, IDS, tree, scores.clone()), expected)


class Subclass(library.TopKLogitsWarper):
    """May do anything, so it counts as unknown."""


def test_other_classes_are_named():
    class Custom(LogitsProcessor):
        pass

    known = [library.TopKLogitsWarper(3), library.RepetitionPenaltyLogitsProcessor(1.2)]
    assert outside([*known, Subclass(3), Custom()], CONTEXT_FREE, BY_ROW) == ["Subclass", "Custom"]
    assert outside(known, CONTEXT_FREE) == ["RepetitionPenaltyLogitsProcessor"]
    known += [library.EncoderNoRepeatNGramLogitsProcessor(2, IDS)]
    assert outside(known, CONTEXT_FREE, BY_ROW) == ["EncoderNoRepeatNGramLogitsProcessor"]
    stateful = [library.ClassifierFreeGuidanceLogitsProcessor(2.0)]
    by_user = [library.PrefixConstrainedLogitsProcessor(lambda batch, ids: [1], num_beams=1)]
    assert len(outside([*known, *stateful, *by_user], CONTEXT_FREE, BY_ROW, BY_SEQUENCE)) == 2
