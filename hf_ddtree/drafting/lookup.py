"""A drafter without a model: what followed the text's last tokens earlier in the same text, voted into a tree.

Prompt lookup (https://github.com/apoorvumang/prompt-lookup-decoding) with several places instead of one.
"""

from itertools import islice

import torch
from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..tree import Tree
from .drafter import Drafter, Request
from .paths import tree_of_paths

# Measured on what SmolLM2-135M-Instruct wrote to 24 prompts, half of them asking for copies. Around these values little
# changes: lengths from 4 up, 8 to 32 places and bases of 2 to 4 are within 2% of each other.
LENGTHS = (8, 4, 2, 1)  # ends of the text of so many tokens are looked up; the first is the most that are compared
MOST_PLACES = 16
MOST_DEPTH = 32
# A place whose last n tokens match has 2^n votes and keeps on being right with chance votes / (votes + DOUBT): 1/2 for
# one token, 0.67 for two, 0.99 for eight.
DOUBT = 2.0
# Less likely nodes are left out. On a CPU, where each adds 3% to a forward, they cost more than they bring: drafting
# them at budget 32 adds 2% to the tokens a round of ordinary answers, and makes rounds a fifth longer.
LEAST_CHANCE = 0.03
# Text that is looked up, at most; half of it at least, since what came before is forgotten. Its index takes 0.5 KB per
# token, 60 MB per row at most, and 4 us per token once; a round over 100,000 tokens costs 0.2 ms in all.
MOST_TOKENS = 2**17


class LookupDrafter(Drafter):
    """Drafts the continuations of earlier places in the row's text, prompt included, that its end matches.

    Pays where texts repeat themselves: edits, quotes, summaries, code. Where they don't, there is little to draft.
    """

    def start(self, target: PreTrainedModel, config: DDTreeConfig, rows: int) -> None:
        """Forgets the last call's texts."""
        self.depth = MOST_DEPTH if config.draft_block_size is None else config.draft_block_size - 1
        self.places = 1 if config.tree_shape == "chain" else MOST_PLACES
        self.texts = [TextIndex() for _ in range(rows)]

    def draft(self, request: Request) -> Tree | None:
        """Trees of at most `budget` nodes; None where no row has a likely continuation."""
        self._read(request.texts)
        depth = min(request.max_depth, self.depth)
        found = [text.continuations(self.places, depth) for text in self.texts]
        paths = [[path for path, _ in row] for row in found]
        chances = [[chance for _, chance in row] for row in found]
        tree = tree_of_paths(request.roots, paths, request.budget, chances, LEAST_CHANCE)
        return tree if tree.num_nodes > 1 else None

    def keep(self, rows: list[int]) -> None:
        """Goes on with those rows."""
        self.texts = [self.texts[row] for row in rows]

    def _read(self, texts: list[torch.Tensor]) -> None:
        """Brings the indexes up to date with `texts`, per row [length]; one copy to the host for all rows."""
        for row, text in enumerate(texts):
            if len(text) < self.texts[row].length:  # not the text that was read
                self.texts[row] = TextIndex()
        news = [text[index.length :] for text, index in zip(texts, self.texts, strict=True)]
        tokens = iter(torch.cat(news).tolist())
        for index, new in zip(self.texts, news, strict=True):
            index.extend(list(islice(tokens, len(new))))


class TextIndex:
    """A growing text, and where in it the same tokens come before.

    Attributes:
        length: tokens read.
        tokens: those of them that are looked up, the last `MOST_TOKENS / 2` to `MOST_TOKENS`.
        newest: by length of `LENGTHS`, for each n-gram the last place in `tokens` that it comes before.
        older: by length, for each place the one before it that the same n-gram comes before; 0 = none.
    """

    def __init__(self) -> None:
        self.length = 0
        self._clear()

    def _clear(self) -> None:
        self.tokens: list[int] = []
        self.newest: dict[int, dict[tuple[int, ...], int]] = {n: {} for n in LENGTHS}
        self.older: dict[int, list[int]] = {n: [] for n in LENGTHS}

    def extend(self, new: list[int]) -> None:
        """Reads on. A place is indexed when its token is known, so that the text's end never finds itself."""
        start = self.length - len(self.tokens)
        self.length += len(new)
        half = MOST_TOKENS // 2
        if (forgotten := max(0, (self.length - 1) // half - 1) * half) > start:
            new = (self.tokens + new)[forgotten - start :]
            self._clear()
        for place, token in enumerate(new, start=len(self.tokens)):
            for n in LENGTHS:
                older = 0
                if place >= n:
                    gram = tuple(self.tokens[place - n :])
                    older = self.newest[n].get(gram, 0)
                    self.newest[n][gram] = place
                self.older[n].append(older)
            self.tokens.append(token)

    def matches(self, most: int) -> dict[int, int]:
        """Places whose preceding tokens are the text's last ones, and how many of them, `LENGTHS[0]` at most.

        Those found by more tokens of the text's end come first, later places before earlier ones. Takes time in
        proportion to `most`, however long the text.
        """
        found: dict[int, int] = {}
        for n in LENGTHS:
            place = self.newest[n].get(tuple(self.tokens[-n:]), 0)
            while place and len(found) < most:
                if place not in found:
                    found[place] = self._match(place, n)
                place = self.older[n][place]
        return found

    def _match(self, place: int, length: int) -> int:
        """How many tokens before `place` are the text's last ones, given that `length` of them are."""
        while length < min(place, LENGTHS[0]) and self.tokens[place - 1 - length] == self.tokens[-1 - length]:
            length += 1
        return length

    def continuations(self, most: int, depth: int) -> list[tuple[list[int], list[float]]]:
        """What followed the matching places, up to `depth` tokens, and the chance of its being right up to each."""
        votes = {place: 2.0**length for place, length in self.matches(most).items()}
        total = sum(votes.values()) + DOUBT
        found = []
        for place, its in votes.items():
            path = self.tokens[place : place + depth]
            staying = its / (its + DOUBT)
            found.append((path, [its / total * staying**step for step in range(len(path))]))
        return found
