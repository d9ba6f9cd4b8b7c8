"""The target's choice of one token, made as plain `generate` makes it: processors, sampling, stopping criteria."""

import torch
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from .acceptance import greedy_token, sampled_token


class TargetChoice:
    """Chooses token after token from a round's logits and keeps the sequence so far.

    The processors and the criteria are called once per emitted token, on 2D scores and on exactly the ids emitted
    before it, so that all of them, users' own and stateful ones included, see what plain decoding shows them.

    Args:
        input_ids: [1, prompt] the prompt's ids; [1, 0] where the prompt came as embeddings.
        processors, criteria: as `generate` built them.
        config: says whether to sample and which scores to keep.

    Attributes:
        scores, raw_logits: per emitted token [1, vocab] float32, after and before the processors; None if not asked.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ):
        self.processors, self.criteria = processors, criteria
        self.select = sampled_token if config.do_sample else greedy_token
        self.length = input_ids.shape[1]
        self.max_length = config.max_length
        self.buffer = input_ids  # [1, capacity]; grows by doubling
        wants = config.return_dict_in_generate
        self.scores: list[torch.Tensor] | None = [] if wants and config.output_scores else None
        self.raw_logits: list[torch.Tensor] | None = [] if wants and config.output_logits else None
        self.logits: torch.Tensor | None = None

    @property
    def ids(self) -> torch.Tensor:
        """[1, length] the prompt and all tokens emitted so far."""
        return self.buffer[:, : self.length]

    @property
    def remaining(self) -> int:
        """Tokens that `max_length` leaves to emit."""
        return self.max_length - self.length

    def over(self, logits: torch.Tensor) -> "TargetChoice":
        """Sets the logits [1, nodes, vocab] that the next choices are made from."""
        self.logits = logits
        return self

    def __call__(self, node: int) -> tuple[int, bool]:
        """The token that follows the sequence so far, by the logits of `node`, and whether generation ends with it."""
        assert self.logits is not None, "set the round's logits with `over` first"
        logits = self.logits[:, node].to(copy=True, dtype=torch.float32, device=self.buffer.device)
        if self.raw_logits is not None:
            self.raw_logits.append(logits.clone())
        scores = self.processors(self.ids, logits)
        if self.scores is not None:
            self.scores.append(scores)
        token = self.select(scores)
        self._append(token)
        kept = tuple(self.scores) if self.scores is not None else None
        return token, bool(self.criteria(self.ids, kept).all())

    def _append(self, token: int) -> None:
        if self.length == self.buffer.shape[1]:
            self.buffer = torch.nn.functional.pad(self.buffer, (0, max(64, self.length)))
        self.buffer[:, self.length] = token
        self.length += 1
