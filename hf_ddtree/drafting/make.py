"""Which drafter an `assistant_model` means."""

from typing import Any

from transformers import PreTrainedModel

from ..configuration import DDTreeConfig
from ..models.dflash import DFlashDraftModel
from .assistant import AssistantDrafter
from .dflash import DDTreeCandidateGenerator
from .drafter import Drafter
from .lookup import LookupDrafter


def make_drafter(
    assistant: Any, target: PreTrainedModel, config: DDTreeConfig, rows: int, tokenizers: tuple[Any, Any] = (None, None)
) -> Drafter:
    """The drafter of a call.

    Args:
        assistant: `assistant_model` of `generate`: a DFlash drafter, any causal LM, a `Drafter`; None with
            `config.drafter`.
        rows: of the batch.
        tokenizers: the target's and the assistant's, as far as they were given.

    Raises:
        ValueError: it is none of these, or does not fit the target or the config.
    """
    if (assistant is None) == (config.drafter is None):
        raise ValueError(
            f"`assistant_model` is {type(assistant).__name__} and `drafter` is {config.drafter!r}: give one of them, a "
            "drafter model (`hf_ddtree.DFlashDraftModel.from_pretrained(...)`, or any causal LM with the target's "
            'tokenizer), or `DDTreeConfig(drafter="lookup")`, which needs no model.'
        )
    check_tokenizers(*tokenizers)
    if assistant is None:
        drafter: Drafter = LookupDrafter()
    elif isinstance(assistant, Drafter):
        drafter = assistant
    elif isinstance(assistant, PreTrainedModel) and is_causal_lm(assistant):
        drafter = AssistantDrafter(assistant, target, config, rows)
    else:
        drafter = DDTreeCandidateGenerator(assistant, target, config, rows)
    if config.acceptance != "walk" and not drafter.gives_logits:
        raise ValueError(
            f'`acceptance="{config.acceptance}"` draws its drafts from distributions, which '
            f'{type(drafter).__name__} does not give; leave `acceptance` at "walk", or use a DFlash drafter.'
        )
    return drafter


def is_causal_lm(model: PreTrainedModel) -> bool:
    """Whether an assistant is to be asked for its own distributions; a DFlash drafter has no head."""
    is_drafter = isinstance(model, DFlashDraftModel) or getattr(model.config, "dflash_config", None)
    return not is_drafter and model.get_output_embeddings() is not None


def check_tokenizers(target: Any, assistant: Any) -> None:
    """Raises ValueError where both are known and do not have the same tokens."""
    if target is None or assistant is None:
        return
    if target.get_vocab() != assistant.get_vocab():
        raise ValueError(
            f"`assistant_tokenizer` ({len(assistant)} tokens) and `tokenizer` ({len(target)} tokens) differ, so the "
            "assistant's tokens mean something else to the target. Use an assistant with the target's tokenizer."
        )
