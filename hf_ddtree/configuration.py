"""`DDTreeConfig`: the one argument that switches the strategy on."""

from difflib import get_close_matches
from typing import Any

from transformers import GenerationConfig
from transformers.utils import ExplicitEnum

OWN_FIELDS = ("tree_budget", "tree_top_k", "draft_block_size", "synchronize_stages")


class DDTreeMode(ExplicitEnum):
    """The generation mode that `import hf_ddtree` registers with transformers."""

    DDTREE = "ddtree"


class DDTreeConfig(GenerationConfig):
    """A `GenerationConfig` whose generation mode is DDTree.

    Passed as `generation_config=` together with `assistant_model=`. Takes and keeps every field of `GenerationConfig`;
    saved and loaded like one, also through the base class, which keeps the fields but not the mode.

    Args:
        tree_budget: nodes drafted per round, the root left out. 0 drafts nothing: plain decoding by the same loop.
        tree_top_k: candidate tokens per depth, at most; None = `tree_budget`, which makes the tree exact.
        draft_block_size: noise block of the drafter, its anchor included, so that `draft_block_size - 1` is the
            greatest depth of a tree; None = the block size the drafter was trained with.
        synchronize_stages: wait for the device at the end of each stage, so that `stage_seconds` are exact on an
            accelerator; costs speed.

    Raises:
        ValueError: a field is out of range, on construction and whenever fields are updated, which `generate` does
            with its keyword arguments.
    """

    def __init__(self, **kwargs: Any):
        self.tree_budget = kwargs.pop("tree_budget", 32)
        self.tree_top_k = kwargs.pop("tree_top_k", None)
        self.draft_block_size = kwargs.pop("draft_block_size", None)
        self.synchronize_stages = kwargs.pop("synchronize_stages", False)
        # Skips the library's check that the assistant has a tokenizer's worth of its own; reloaded through the base
        # class, the config runs the library's DFlash chain with the same drafter.
        kwargs.setdefault("speculation_type", "dflash")
        known = vars(GenerationConfig())
        for name in kwargs:  # the base class takes any name
            if name not in known and (meant := get_close_matches(name, OWN_FIELDS, n=1, cutoff=0.7)):
                raise ValueError(f"`{name}` is no field of DDTreeConfig; did you mean `{meant[0]}`?")
        super().__init__(**kwargs)

    @classmethod
    def from_model_config(cls, model_config: Any) -> "DDTreeConfig":
        """As the base class's, with the tree's fields at their defaults."""
        return cls(**GenerationConfig.from_model_config(model_config).to_diff_dict())

    def get_generation_mode(self, assistant_model: Any = None) -> ExplicitEnum:
        """Always DDTree; transformers looks the decoding method up by it."""
        return DDTreeMode.DDTREE

    def validate(self, *args: Any, **kwargs: Any) -> None:
        """Checks the base class's fields, then the tree's, then what the strategy cannot do."""
        super().validate(*args, **kwargs)
        _check_int("tree_budget", self.tree_budget, minimum=0, optional=False)
        _check_int("tree_top_k", self.tree_top_k, minimum=1, optional=True)
        _check_int("draft_block_size", self.draft_block_size, minimum=1, optional=True)
        if not isinstance(self.synchronize_stages, bool):
            raise ValueError(f"`synchronize_stages` is {self.synchronize_stages!r}; it must be True or False.")
        for name, (accepted, remedy) in UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value not in accepted:
                raise ValueError(f"`{name}={value!r}` does not go with DDTree decoding: {remedy}")


# field -> (values that mean "off", what to do instead)
UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "leave it at 1, or use a plain `GenerationConfig` for beam search."),
    "num_return_sequences": ((None, 1), "leave it at 1 and call `generate` once per sequence."),
    "use_cache": ((None, True), "the strategy needs the cache; leave it on."),
    "cache_implementation": (
        (None, "dynamic", "hybrid"),
        'set it to "dynamic"; only the dynamic cache can be compacted.',
    ),
    "prefill_chunk_size": ((None,), "leave it unset; the drafter needs the whole prompt's hidden states."),
    "prompt_lookup_num_tokens": ((None,), "leave it unset; the tree comes from `assistant_model`."),
    "assistant_early_exit": ((None,), "leave it unset; the tree comes from `assistant_model`."),
    "use_mtp": ((None, False), "leave it unset; the tree comes from `assistant_model`."),
    "num_beam_groups": ((None, 1), "leave it unset, or use a plain `GenerationConfig` for beam search."),
    "force_words_ids": ((None,), "leave it unset, or use a plain `GenerationConfig` for constrained beam search."),
    "constraints": ((None,), "leave it unset, or use a plain `GenerationConfig` for constrained beam search."),
    "penalty_alpha": ((None, 0), "leave it unset; contrastive search is another strategy."),
    "dola_layers": ((None,), "leave it unset; DoLa is another strategy."),
}


def _check_int(name: str, value: Any, minimum: int, optional: bool) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        none = " or None" if optional else ""
        raise ValueError(f"`{name}` is {value!r}; it must be an integer of at least {minimum}{none}.")
