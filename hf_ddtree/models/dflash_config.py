"""Configuration of a DFlash block-diffusion drafter (https://arxiv.org/abs/2602.06036)."""

from math import inf
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import AutoConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .layouts import to_fields

# Fields that the published layout nests in `dflash_config` and the library's own assistant layout keeps at top level.
DRAFT_FIELDS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
# Fields of this package, nested too, so that engines that do not know them pass over them.
OWN_FIELDS = ("transition_rank", "depth_temperatures")
# `causal_layers` -> layer types in which a slot sees no later slot of its block.
CAUSAL_LAYER_TYPES: dict[str, tuple[str, ...]] = {
    "none": (),
    "sliding": ("sliding_attention",),
    "all": ("sliding_attention", "full_attention"),
}


@strict
class DFlashConfig(Qwen3Config):
    """Shape of a DFlash drafter: a stack of Qwen3 layers plus what ties it to its target.

    Reads the published layout (`model_type` "qwen3", a nested `dflash_config`), the library's assistant layout (the
    same fields at top level) and that of speculators, and writes the published one, which SGLang and vLLM read. The
    layouts: docs/interchange.md.

    Args:
        block_size: tokens in a noise block, the anchor (slot 0) included; a block drafts `block_size - 1` tokens.
        mask_token_id: id whose *target* embedding fills slots 1.. of the noise block.
        target_layer_ids: 0-based target layers whose outputs, concatenated in this order, are the drafter's context.
            The last target layer's output is taken after the target's final norm.
        num_target_layers: layers of the target it was trained for, where the checkpoint says so.
        causal_layers: layers in which a slot sees no later slot of its block: "none", "sliding" or "all". On disk it is
            `is_causal` false, null or true.
        transition_rank: width of the path-conditional transition (models/transition.py); 0 = the checkpoint has none.
        depth_temperatures: calibrated temperature of the logits of each depth, `block_size - 1` of them; None = 1.

    `vocab_size` and the special ids are the target's; `vocab_size` is None where the checkpoint does not say, as in the
    assistant layout. `rope_parameters["attention_factor"]` overrides YaRN's amplitude.

    Raises:
        ValueError: a field is missing, out of range, or given twice with different values.
    """

    model_type = "dflash"
    has_no_defaults_at_init = True

    vocab_size: int | None = None
    block_size: int | None = None
    mask_token_id: int | None = None
    target_layer_ids: list[int] | None = None
    num_target_layers: int | None = None
    causal_layers: str = "none"
    transition_rank: int | None = None
    depth_temperatures: list[float] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._merge_nested(kwargs.pop("dflash_config", None) or {})
        if self.layer_types and "sliding_attention" in self.layer_types:
            self.use_sliding_window = True
        super().__post_init__(**kwargs)
        self._check()

    def _merge_nested(self, nested: dict[str, Any]) -> None:
        """Takes the fields of a nested `dflash_config`; a field given in both places must agree."""
        if not isinstance(nested, dict):
            raise ValueError(f"`dflash_config` is {nested!r}; it must be an object with {', '.join(DRAFT_FIELDS)}.")
        for name in (*DRAFT_FIELDS, *OWN_FIELDS):
            top, inner = getattr(self, name), nested.get(name)
            if top is not None and inner is not None and top != inner:
                raise ValueError(
                    f"`{name}` is {top} at the top of the drafter's config and {inner} in its `dflash_config`. "
                    "Remove the wrong one from config.json."
                )
            setattr(self, name, inner if top is None else top)
        self.transition_rank = self.transition_rank or 0

    def _check(self) -> None:
        for name in DRAFT_FIELDS[:3]:
            if getattr(self, name) is None:
                raise ValueError(
                    f"The drafter's config has no `{name}`. Set it (top level or in `dflash_config`) to the value the "
                    "drafter was trained with; it can't be derived. Is this checkpoint a DFlash drafter?"
                )
        assert self.block_size is not None and self.mask_token_id is not None and self.target_layer_ids is not None
        if self.block_size < 1:
            raise ValueError(f"`block_size` is {self.block_size}; it counts the anchor token too, so it is at least 1.")
        self.check_mask_token(self.vocab_size)
        self._check_own()
        taps = self.target_layer_ids
        last = self.num_target_layers - 1 if self.num_target_layers else None
        if not taps or min(taps) < 0 or len(set(taps)) < len(taps) or (last is not None and max(taps) > last):
            upper = f"0..{last}" if last is not None else "0 and up"
            raise ValueError(f"`target_layer_ids` is {taps}; it must list distinct target layers out of {upper}.")
        if self.num_key_value_heads < 1 or self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"`num_attention_heads` is {self.num_attention_heads}, not a multiple of `num_key_value_heads` "
                f"{self.num_key_value_heads}; correct config.json."
            )
        if self.causal_layers not in CAUSAL_LAYER_TYPES:
            raise ValueError(f"`causal_layers` is {self.causal_layers!r}; it is one of {sorted(CAUSAL_LAYER_TYPES)}.")
        if set(self.layer_types or []) - {"full_attention", "sliding_attention"}:
            raise ValueError(f"`layer_types` is {self.layer_types}; a drafter's layers are full or sliding attention.")
        sliding = "sliding_attention" in (self.layer_types or [])
        if sliding and not self.sliding_window:
            raise ValueError(f"`layer_types` has sliding layers but `sliding_window` is {self.sliding_window}; set it.")

    def _check_own(self) -> None:
        assert self.block_size is not None and self.transition_rank is not None
        if self.transition_rank < 0:
            raise ValueError(f"`transition_rank` is {self.transition_rank}; it is a width, or 0 for no transition.")
        temperatures, depth = self.depth_temperatures, self.block_size - 1
        if temperatures is not None and (len(temperatures) != depth or not all(0 < t < inf for t in temperatures)):
            raise ValueError(
                f"`depth_temperatures` is {temperatures}; it must hold {depth} positive numbers, `block_size` - 1. "
                "Remove it from config.json, or calibrate again."
            )

    def check_mask_token(self, vocab_size: int | None) -> None:
        """Raises ValueError unless `mask_token_id` has a row in an embedding of `vocab_size` (None: unknown) rows."""
        mask = self.mask_token_id
        if mask is None or mask < 0 or (vocab_size is not None and mask >= vocab_size):
            raise ValueError(
                f"`mask_token_id` is {mask}, outside the target's vocabulary of `vocab_size` {vocab_size}. It needs "
                "a row in the target's embedding: use the id the drafter was trained with."
            )

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads config.json in any layout and gives it this class's `model_type`.

        Raises:
            ValueError: it is no drafter's, or asks for what `DFlashDraftModel` has not.
        """
        config_dict, kwargs = super().get_config_dict(*args, **kwargs)
        if config_dict:
            config_dict = {**to_fields(config_dict), "model_type": cls.model_type}
        return config_dict, kwargs

    def to_dict(self) -> dict[str, Any]:
        """The published layout: what `save_pretrained` writes and other engines read."""
        output = super().to_dict()
        nested = {name: output.pop(name) for name in ("mask_token_id", "target_layer_ids")}
        nested.update({name: value for name in OWN_FIELDS if (value := output.pop(name, None))})
        rope = dict(output.get("rope_parameters") or {})
        output.update(model_type="qwen3", architectures=["DFlashDraftModel"], dflash_config=nested)
        output["is_causal"] = {"none": False, "sliding": None, "all": True}[output.pop("causal_layers")]
        # Engines on transformers 4 read these two; version 5 reads `rope_parameters`.
        output["rope_theta"] = rope.pop("rope_theta", None)
        output["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
        return output


AutoConfig.register("dflash", DFlashConfig, exist_ok=True)
