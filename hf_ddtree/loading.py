"""Models by what the command line calls them."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from .models import DFlashDraftModel
from .models.smollm2 import smollm2_path

DEMO_DRAFTER = Path(__file__).parent.parent / "model_cards" / "smollm2-135m-instruct-dflash"


def model_name(model: str | Path) -> str | Path:
    """The folder or Hub name that `--model` means; `smollm2` is the demo's target."""
    return smollm2_path() if model == "smollm2" else model


def load_target(model: str, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The target that `--model` names, and its tokenizer.

    Args:
        options: as `from_pretrained` takes them.

    Raises:
        ValueError: it can't be loaded.
    """
    try:
        name = model_name(model)
        target = AutoModelForCausalLM.from_pretrained(name, **options)
        return target, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise ValueError(f"`--model {model}` can't be loaded; {_found(model)}: {_first_line(error)}") from error


def load_drafter(drafter: str | Path, target: PreTrainedModel) -> PreTrainedModel | None:
    """The drafter that `--drafter` names, in the target's dtype and on its device: a DFlash drafter, or any causal LM.

    Returns:
        None for "lookup", which needs no model.

    Raises:
        ValueError: it can't be loaded.
    """
    if drafter == "lookup":
        return None
    try:
        kind = AutoModelForCausalLM if _is_causal_lm(model_name(drafter)) else DFlashDraftModel
        return kind.from_pretrained(model_name(drafter), dtype=target.dtype).to(target.device)
    except (OSError, ValueError) as error:
        raise ValueError(f"`--drafter {drafter}` can't be loaded; {_found(drafter)}: {_first_line(error)}") from error


def load_dflash(drafter: str | Path, target: PreTrainedModel) -> DFlashDraftModel:
    """The same where nothing but a DFlash drafter will do; raises ValueError for others."""
    loaded = load_drafter(drafter, target)
    if not isinstance(loaded, DFlashDraftModel):
        raise ValueError(f"`--drafter {drafter}` is no DFlash drafter, and this measures those; name one.")
    return loaded


def load_assistant(assistant: str, target: PreTrainedModel) -> PreTrainedModel:
    """The causal LM that `--assistant` names, in the target's dtype and on its device; raises ValueError for others."""
    try:
        if not _is_causal_lm(model_name(assistant)):
            raise ValueError("it is no causal LM with a head of its own")
        loaded = AutoModelForCausalLM.from_pretrained(model_name(assistant), dtype=target.dtype)
        return loaded.to(target.device)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`--assistant {assistant}` can't be loaded; {_found(assistant)}: {_first_line(error)}"
        ) from error


def _is_causal_lm(name: str | Path) -> bool:
    config, _ = PreTrainedConfig.get_config_dict(name)
    is_drafter = {"dflash_config", "block_size", "speculators_config"} & set(config)
    return not is_drafter and any(each.endswith("ForCausalLM") for each in config.get("architectures") or [])


def _found(name: str | Path) -> str:
    return "the folder is there" if Path(name).is_dir() else "no such folder here, nor on the Hub as far as can be seen"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
