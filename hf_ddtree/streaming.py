"""Streamers that see rounds: how each token came about, not only which it was."""

from transformers import PreTrainedTokenizerBase
from transformers.generation.streamers import BaseStreamer

from .acceptance import Accepted
from .emission import Emissions
from .tree import Tree


class RoundStreamer(BaseStreamer):
    """A streamer that is given each round's tree and what was accepted of it, in place of the bare tokens."""

    def put_round(self, tree: Tree, accepted: Accepted) -> None:
        """Called after each round, the prefill included (its tree is the root alone)."""
        raise NotImplementedError


SPINE, BRANCH, BONUS, PLAIN = "\033[32m", "\033[36m", "\033[33m", "\033[0m"
LEGEND = (
    f"{SPINE}first choice of the drafter{PLAIN}, {BRANCH}another branch of the tree{PLAIN}, {BONUS}target's own{PLAIN}"
)


class ColourStreamer(RoundStreamer):
    """Prints the answer with each token coloured: the drafter's first choice, another branch, or the target's bonus.

    Args:
        tokenizer: the target's.
        colour: off where the output is not a terminal.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, colour: bool = True):
        self.tokenizer, self.colour = tokenizer, colour
        self.ids: list[int] = []
        self.printed = ""

    def put(self, value: object) -> None:
        """The prompt, which is not printed."""

    def put_round(self, tree: Tree, accepted: Accepted) -> None:
        """Prints the round's tokens."""
        parents = tree.parents[0].tolist()
        on_spine = True
        for token, node in zip(accepted.tokens, [*accepted.path[1:], None], strict=True):
            if node is None:
                self._print(token, BONUS)
            else:
                # Siblings come in the order of their probability: the first child of its parent is the first choice.
                on_spine = on_spine and parents.index(parents[node], 1) == node
                self._print(token, SPINE if on_spine else BRANCH)

    def end(self) -> None:
        """Prints what was held back of an unfinished character, and ends the line."""
        print(self._text()[len(self.printed) :], end="")
        print(PLAIN if self.colour else "", flush=True)

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)

    def _print(self, token: int, colour: str) -> None:
        self.ids.append(token)
        text = self._text()
        if text.endswith("\N{REPLACEMENT CHARACTER}"):  # a character that later tokens complete
            return
        new, self.printed = text[len(self.printed) :], text
        print(f"{colour}{new}" if self.colour else new, end="", flush=True)


class Streaming:
    """Hands rounds to a streamer as it wants them: whole, or step after step, as plain decoding gives them.

    Args:
        streamer: of `generate`; None = nobody listens.
        emissions: the texts. Of a batch, a step is given once every row has its token of it, or has ended.
    """

    def __init__(self, streamer: BaseStreamer | None, emissions: Emissions):
        self.streamer, self.emissions = streamer, emissions
        self.given = emissions.prompts.shape[1]

    def put(self, tree: Tree, accepted: list[Accepted]) -> None:
        """Called after each round, the prefill included (its tree is the root alone)."""
        if isinstance(self.streamer, RoundStreamer):
            self.streamer.put_round(tree, accepted[0])
        elif self.streamer is not None:
            steps = self.emissions.common_steps(self.given)
            self.given += steps.shape[1]
            for step in steps.cpu().unbind(1):
                self.streamer.put(step)
