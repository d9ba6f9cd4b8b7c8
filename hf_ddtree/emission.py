"""The emitted sequence: what the target's next choice is made from, and what happens when a token is emitted."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .acceptance import Accepted


class Emission:
    """The sequence so far, its logits processors and stopping criteria, and the scores that the caller wants returned.

    The criteria are called once per emitted token, on exactly the ids emitted by then, as in plain decoding.

    Args:
        input_ids: [1, prompt] the prompt's ids; [1, 0] where the prompt came as embeddings.
        processors, criteria: as `generate` built them.
        config: says which scores to keep.
        padding: tokens of the prompt that are padding.

    Attributes:
        scores, raw_logits: per emitted token [1, vocab] float32, after and before the processors; None if not asked.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        padding: int = 0,
    ):
        self.processors, self.criteria = processors, criteria
        self.length, self.padding = input_ids.shape[1], padding
        self.max_length = config.max_length
        self.buffer = input_ids  # [1, capacity]; grows by doubling
        wants = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.raw_logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None

    @property
    def ids(self) -> torch.Tensor:
        """[1, length] the prompt and all tokens emitted so far."""
        return self.buffer[:, : self.length]

    @property
    def position(self) -> int:
        """Of the next token, padding not counted."""
        return self.length - self.padding

    @property
    def remaining(self) -> int:
        """Tokens that `max_length` leaves to emit."""
        return self.max_length - self.length

    def emit(self, token: int, logits: torch.Tensor, scores: torch.Tensor) -> bool:
        """Appends a token and says whether generation ends with it.

        Args:
            token: -1 where there was nothing to choose from.
            logits, scores: [1, vocab] what it was chosen from, before and after the processors.

        Raises:
            ValueError: there is no token.
        """
        if token < 0:
            raise ValueError(
                "The logits processors left no token to sample: all scores are -inf, or one is NaN. Relax the "
                "constraints, or look for NaN in the model's logits."
            )
        if self.raw_logits is not None:
            self.raw_logits.append(logits)
        if self.scores is not None:
            self.scores.append(scores)
        if self.length == self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, max(64, self.length)))
        self.buffer[:, self.length] = token
        self.length += 1
        kept = tuple(self.scores) if self.scores is not None else None
        return bool(self.criteria(self.ids, kept).all())

    def emit_path(self, path: list[int], tokens: list[int], logits: torch.Tensor, scores: torch.Tensor) -> Accepted:
        """Emits token after token until one ends generation.

        Args:
            path, tokens: as in `Accepted`, before any stop.
            logits, scores: [nodes, vocab] of the whole tree.
        """
        for count, (node, token) in enumerate(zip(path, tokens, strict=True), start=1):
            row = slice(node, node + 1)
            if self.emit(token, logits[row].clone(), scores[row].clone()):  # not views, which would hold whole rounds
                return Accepted(path[:count], tokens[:count], finished=True)
        return Accepted(path, tokens, finished=False)
