"""Stopping criteria, called after every token; those that need no tensor are judged without one."""

import time

import torch
from transformers import StoppingCriteriaList
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

KNOWN = {EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria}  # exact types: subclasses may do anything


class Stops:
    """A batch's criteria.

    A criterion's answer is a tensor, and an accelerator is waited for to read it: once per token. What is known of
    length, time and end tokens is known on the host.

    Args:
        criteria: as `generate` built them.
    """

    def __init__(self, criteria: StoppingCriteriaList):
        self.criteria = criteria
        self.known = {type(each) for each in criteria} <= KNOWN
        self.end_tokens: set[int] = set()
        self.max_length = self.reminder = float("inf")
        self.deadline = float("inf")
        if not self.known:
            return
        for each in criteria:
            if isinstance(each, EosTokenCriteria):
                self.end_tokens |= set(each.eos_token_id.tolist())
            elif isinstance(each, MaxLengthCriteria):
                self.max_length = min(self.max_length, each.max_length)
                self.reminder = min(self.reminder, each.max_position_embeddings or float("inf"))
            elif isinstance(each, MaxTimeCriteria):
                self.deadline = min(self.deadline, each.initial_timestamp + each.max_time)

    def __call__(self, ids: torch.Tensor, tokens: list[int], scores: tuple[torch.Tensor, ...] | None) -> list[bool]:
        """Which rows may end with their last token.

        Args:
            ids: [rows, length] all tokens. tokens: the last of each row. scores: as criteria get them.
        """
        length = ids.shape[1]
        if not self.known or length > self.reminder:  # the library reminds once of a model's greatest length
            self.reminder = float("inf")
            return self.criteria(ids, scores).tolist()
        all_end = length >= self.max_length or time.time() > self.deadline
        return [all_end or token in self.end_tokens for token in tokens]
