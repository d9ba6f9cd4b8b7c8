"""The emitted texts: what the target's next choice is made from, and what happens when a token is emitted."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation import stopping_criteria

from .acceptance import Accepted
from .processors import for_row, knows_whole_batch
from .stops import Stops

# Exact types: they judge a row by itself, so rows may be at different lengths when they are called.
ROW_CRITERIA = {
    getattr(stopping_criteria, name)
    for name in ("MaxLengthCriteria", "MaxTimeCriteria", "EosTokenCriteria", "StopStringCriteria")
}


class Emission:
    """Rows of text that grow in step, one token each at a time, as plain decoding grows a batch.

    Processors and criteria are called once per token, on exactly the ids emitted by then.

    Args:
        input_ids: [rows, prompt] the prompts' ids; [rows, 0] where they came as embeddings.
        processors, criteria: as `generate` built them, or their views of one row.
        config: says which scores to keep.
        padding: per row, tokens of its prompt that are padding.

    Attributes:
        ended: per row, whether its text is complete.
        last_tokens: per row, the last token of its own, not of the padding after its end.
        scores, raw_logits: per step [rows, vocab] float32, after and before the processors; None if not asked. Rows
            that had ended have zeros.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        padding: list[int],
    ):
        self.processors, self.stops, self.padding = processors, Stops(criteria), padding
        self.length = input_ids.shape[1]
        self.max_length = config.max_length
        self.buffer = input_ids  # [rows, capacity]; grows by doubling
        self.ended = [False] * len(input_ids)
        self.last_tokens = [0] * len(input_ids)
        self.flagged = [False] * len(input_ids)
        self.pad_token = pad_token(config)
        self.pads = _has_eos(criteria)  # else rows write on until all may end
        wants = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.raw_logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None

    @property
    def ids(self) -> torch.Tensor:
        """[rows, length] the prompts and all tokens emitted so far."""
        return self.buffer[:, : self.length]

    def text(self, row: int) -> torch.Tensor:
        """[tokens] a row's ids, its padding left out."""
        return self.ids[row, self.padding[row] :]

    def position(self, row: int) -> int:
        """Of a row's next token, padding not counted."""
        return self.length - self.padding[row]

    @property
    def remaining(self) -> int:
        """Tokens that `max_length` leaves to emit."""
        return self.max_length - self.length

    def emit(self, tokens: list[int], logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Appends a token to each row and finds out which rows end with it; rows that have ended get padding.

        Args:
            tokens: -1 where there was nothing to choose from.
            logits, scores: [rows, vocab] what they were chosen from, before and after the processors.

        Raises:
            ValueError: a row that has not ended has no token.
        """
        tokens = [self.pad_token if ended else token for token, ended in zip(tokens, self.ended, strict=True)]
        if any(token < 0 for token in tokens):
            raise ValueError(
                "The logits processors left no token to sample: all scores are -inf, or one is NaN. Relax the "
                "constraints, or look for NaN in the model's logits."
            )
        self.last_tokens = [
            last if ended else token for last, token, ended in zip(self.last_tokens, tokens, self.ended, strict=True)
        ]
        if self.raw_logits is not None:
            self.raw_logits.append(logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.length == self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, max(64, self.length)))
        if len(tokens) == 1:
            self.buffer[0, self.length] = tokens[0]  # no tensor is made for one token
        else:
            self.buffer[:, self.length] = torch.tensor(tokens, device=self.buffer.device)
        self.length += 1
        may_end = self.stops(self.ids, tokens, None if self.scores is None else tuple(self.scores))
        self.flagged = [before or now for before, now in zip(self.flagged, may_end, strict=True)]
        self.ended = self.flagged if self.pads else [all(self.flagged)] * len(tokens)

    def emit_path(self, path: list[int], tokens: list[int], logits: torch.Tensor, scores: torch.Tensor) -> Accepted:
        """Emits the tokens of a single row one after another until one ends the text.

        Args:
            path, tokens: as in `Accepted`, before any stop.
            logits, scores: [nodes, vocab] of the whole tree.
        """
        for count, (node, token) in enumerate(zip(path, tokens, strict=True), start=1):
            row = slice(node, node + 1)
            self.emit([token], logits[row].clone(), scores[row].clone())  # not views, which would hold whole rounds
            if self.ended[0]:
                return Accepted(path[:count], tokens[:count], finished=True)
        return Accepted(path, tokens, finished=False)


class Emissions:
    """A batch's texts: rows that go their own ways where nothing looks at several of them, else all rows in step.

    Args:
        input_ids: [batch, prompt]. processors, criteria, config: as `generate` prepared them.
        padding: per row, tokens of its prompt that are padding.

    Attributes:
        prompts, config: as given.
        groups: emissions; one row each, or one for all.
        live: (emission, row in it) of each row that has not ended, in the order of trees and caches.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        padding: list[int],
    ):
        self.prompts, self.config, self.pad_token = input_ids, config, pad_token(config)
        if len(input_ids) == 1 or self.must_step(processors, criteria):
            self.groups = [Emission(input_ids, processors, criteria, config, padding)]
        else:
            self.groups = [
                Emission(input_ids[row : row + 1], for_row(processors, row, len(padding)), criteria, config, [pads])
                for row, pads in enumerate(padding)
            ]
        self.live = [(group, row) for group in self.groups for row in range(len(group.ended))]

    @staticmethod
    def must_step(processors: LogitsProcessorList, criteria: StoppingCriteriaList) -> bool:
        """Whether something must see the batch as plain decoding shows it, all rows at the same length.

        That is a processor or criterion that is not known to judge rows by themselves; and any criterion but a common
        length where there is no end token, because plain decoding then writes on until the last row may end.
        """
        kinds = {type(criterion) for criterion in criteria}
        lengths_only = kinds <= {stopping_criteria.MaxLengthCriteria}
        return knows_whole_batch(processors) or not kinds <= ROW_CRITERIA or not (lengths_only or _has_eos(criteria))

    @property
    def roots(self) -> torch.Tensor:
        """[live, 1] the last token of each live row."""
        return torch.stack([group.buffer[row, group.length - 1 : group.length] for group, row in self.live])

    @property
    def texts(self) -> list[torch.Tensor]:
        """Per live row [length] its ids, padding left out; copies, so that a drafter can't write into the text."""
        return [group.text(row).clone() for group, row in self.live]

    @property
    def last_tokens(self) -> torch.Tensor:
        """[batch, 1] the last token of every row, its end token where it ended before others."""
        last = [token for group in self.groups for token in group.last_tokens]
        return torch.tensor(last, device=self.prompts.device)[:, None]

    @property
    def remaining(self) -> int:
        """Tokens that `max_length` leaves to emit to the row that has most of them left."""
        return max(group.remaining for group, _ in self.live)

    def drop_ended(self) -> list[int]:
        """Takes ended rows out of `live`; returns which of the former ones stay."""
        staying = [index for index, (group, row) in enumerate(self.live) if not group.ended[row]]
        self.live = [self.live[index] for index in staying]
        return staying

    def common_steps(self, start: int) -> torch.Tensor:
        """[batch, steps] the columns from `start` on that are settled in all rows."""
        ends = [group.length for group in self.groups if not all(group.ended)]
        end = min(ends) if ends else max(group.length for group in self.groups)
        return self.sequences[:, start:end]

    @property
    def sequences(self) -> torch.Tensor:
        """[batch, longest] all rows' ids, padded on the right."""
        return _stacked([group.ids for group in self.groups], self.pad_token)

    def steps(self, name: str) -> tuple[torch.Tensor, ...] | None:
        """`scores` or `raw_logits` per step [batch, vocab]; None if not kept."""
        kept = [getattr(group, name) for group in self.groups]
        if kept[0] is None:
            return None
        longest = max(len(steps) for steps in kept)
        padded = [[*steps, *[torch.zeros_like(steps[0])] * (longest - len(steps))] for steps in kept]
        return tuple(torch.cat(rows) for rows in zip(*padded, strict=True))


def pad_token(config: GenerationConfig) -> int:
    """The id that ended rows are filled with; 0 where there is none, since then no row ends before another."""
    token = config._pad_token_tensor
    return 0 if token is None else int(token)


def _has_eos(criteria: StoppingCriteriaList) -> bool:
    return any(hasattr(criterion, "eos_token_id") for criterion in criteria)


def _stacked(blocks: list[torch.Tensor], filler: int) -> torch.Tensor:
    longest = max(block.shape[1] for block in blocks)
    return torch.cat([torch.nn.functional.pad(ids, (0, longest - ids.shape[1]), value=filler) for ids in blocks])
