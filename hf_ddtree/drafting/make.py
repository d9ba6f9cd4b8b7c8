"""Which drafter an `assistant_model` means."""

from typing import Any

from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from .dflash import DDTreeCandidateGenerator
from .drafter import Drafter


def make_drafter(assistant: Any, target: PreTrainedModel, config: DDTreeConfig, rows: int) -> Drafter:
    """The drafter of a call.

    Args:
        assistant: `assistant_model` of `generate`.
        rows: of the batch.

    Raises:
        ValueError: it is none, or does not fit the target or the config.
    """
    if isinstance(assistant, Drafter):
        return assistant
    return DDTreeCandidateGenerator(assistant, target, config, rows)
