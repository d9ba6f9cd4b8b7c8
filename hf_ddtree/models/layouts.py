"""Layouts of DFlash checkpoints: which one a config.json is in, and its translation to the fields of `DFlashConfig`.

Field names, their meaning and their defaults are facts about other projects; docs/interchange.md names the sources.
"""

import re
from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig

LAYOUTS = ("published", "assistant", "speculators")
ASSISTANT_TYPE = "muse_glimmer_assistant"
ARCHITECTURES = ("DFlashDraftModel", "DFlashSpeculator", "MuseGlimmerAssistantModel")
DRAFT_FIELDS = ("block_size", "mask_token_id", "target_layer_ids")

# Tensor names of every layout -> those of the published one, which `DFlashDraftModel` has.
TENSOR_NAMES = {r"^model\.": "", r"^encoder\.fc\.": "fc.", r"^encoder\.output_norm_enc\.": "hidden_norm."}
ASSISTANT_TENSOR_NAMES = {r"^fc\.": "encoder.fc.", r"^hidden_norm\.": "encoder.output_norm_enc."}
# Parts of the target that speculators saves with a drafter; frozen copies, where the draft vocabulary is the target's.
TARGET_COPIES = re.compile(r"(model\.)?(embed_tokens|lm_head|verifier_norm|verifier_lm_head)\.")

# Fields that change what a drafter computes -> the values that `DFlashDraftModel` honours, and what others mean.
HONOURED: dict[str, tuple[tuple[Any, ...], str]] = {
    "projector_type": ((None, "dflash"), "a head of its own, such as Domino's"),
    "markov_rank": ((None, 0), "DSpark's Markov head"),
    "selector_rank": ((None, 0), "DFlash2's candidate selector"),
    "conv_kernel_size": ((None, 0), "DFlash2's convolutions"),
    "sample_from_anchor": ((None, False), "slot 0 drafts too"),
    "shift_label": ((None, False), "slot k drafts token k + 1"),
    "attention_mode": ((None, "gqa", "mha"), "another attention"),
    "attention_modes": ((None, "gqa", "mha"), "another attention"),
    "attention_sink_bias": ((None, False), "attention sinks"),
    "add_swa_attention_sink_bias": ((None, False), "attention sinks"),
    "attention_value_scale": ((None, 1), "scaled values"),
    "use_swa": ((None, False), "sliding layers not listed in `layer_types`"),
    "fc_layernorm": ((None, False), "a norm before `fc`"),
    "output_multiplier": ((None, 1), "scaled logits"),
    "use_aux_hidden_state": ((None, True), "no context out of the target's layers"),
    "is_causal": ((None, False, True), "an unknown mask"),
    "causal": ((None, False, True), "an unknown mask"),
    "is_neox_style": ((None, True), "interleaved rotary positions"),
    "rope_is_neox_style": ((None, True), "interleaved rotary positions"),
    "has_embed_tokens": ((None, False), "an embedding of its own"),
    "has_lm_head": ((None, False), "a head of its own"),
}


def layout_of(config: dict[str, Any]) -> str:
    """The layout of a config.json, one of `LAYOUTS`.

    Raises:
        ValueError: it is not a DFlash drafter's.
    """
    kind, architectures = config.get("speculators_model_type"), config.get("architectures") or []
    if kind == "dflash":
        return "speculators"
    nested = _nested(config)
    missing = [name for name in DRAFT_FIELDS if name not in config and name not in nested]
    foreign = bool(architectures) and not set(ARCHITECTURES) & set(architectures)
    if kind is not None or foreign or len(missing) == len(DRAFT_FIELDS):
        what = {"speculators_model_type": kind, "model_type": config.get("model_type"), "architectures": architectures}
        said = ", ".join(f"`{name}` {value!r}" for name, value in what.items() if value)
        lacks = f" It lacks {', '.join(f'`{name}`' for name in missing)}." if missing and kind is None else ""
        raise ValueError(
            f"config.json is no DFlash drafter's: it says {said or 'nothing of a model'}.{lacks} Use a checkpoint of "
            f"{' or '.join(ARCHITECTURES)}, in one of the layouts of docs/interchange.md."
        )
    return "assistant" if config.get("model_type") == ASSISTANT_TYPE else "published"


def to_fields(config: dict[str, Any]) -> dict[str, Any]:
    """The fields of `DFlashConfig` out of a config.json in any layout.

    Raises:
        ValueError: it is no drafter's, or the drafter needs what `DFlashDraftModel` has not.
    """
    layout = layout_of(config)
    check_honoured(config)
    if layout == "assistant":
        layers = config.get("num_hidden_layers")
        if not isinstance(layers, int):
            raise ValueError(f"The drafter's config has `num_hidden_layers` {layers!r}; set it to how many it has.")
        types = config.get("layer_types") or ["sliding_attention"] * layers
        return {**config, "layer_types": types, "causal_layers": "none"}
    fields = _from_speculators(config) if layout == "speculators" else dict(config)
    if layout == "published":
        causal = fields.pop("is_causal", None)
        causal = _nested(fields).get("causal") if causal is None else causal
        # Unsaid, its sliding layers are causal and its full ones are not (z-lab's model, vLLM).
        fields["causal_layers"] = {None: "sliding", False: "none", True: "all"}[causal]
    return fields


def check_honoured(config: dict[str, Any]) -> None:
    """Raises ValueError, naming field and value, where a config asks for what `DFlashDraftModel` has not."""
    nested = _nested(config)
    for name, (values, meaning) in HONOURED.items():
        value = nested.get(name, config.get(name))
        if not all(one in values for one in (value if isinstance(value, list) else [value])):
            raise ValueError(
                f"The drafter's config has `{name}` {value!r}: {meaning}, which `DFlashDraftModel` has not. Its drafts "
                "would be wrong; use a plain DFlash drafter for this target."
            )
    shape = config.get("transformer_layer_config") or config
    for name, whole in (("draft_vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        value, wanted = config.get(name), shape.get(whole)
        if value is not None and wanted is not None and value != wanted:
            raise ValueError(
                f"The drafter's config has `{name}` {value} and `{whole}` {wanted}; `DFlashDraftModel` needs them "
                "equal, for it drafts through the target's own embedding and head. Use a drafter trained that way."
            )


def target_copies(names: Iterable[str]) -> list[str]:
    """Those of `names`, tensors that are not the drafter's, which copy parts of the target.

    Raises:
        ValueError: there are others.
    """
    copies = sorted(filter(TARGET_COPIES.match, names))
    if foreign := sorted(set(names) - set(copies)):
        raise ValueError(
            f"The checkpoint has the tensors {foreign}, which a plain DFlash drafter has not; drafts would be wrong "
            "without them. Use a checkpoint without such parts."
        )
    return copies


def _nested(config: dict[str, Any]) -> dict[str, Any]:
    nested = config.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"`dflash_config` is {nested!r}; it must be an object with {', '.join(DRAFT_FIELDS)}.")
    return nested


def _from_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """A config of the speculators library in the published layout.

    Its layer config leaves out the defaults of its model type. Its ids count the states: 0 is the embedding's output
    and k the output of layer k - 1.
    """
    given = dict(config.get("transformer_layer_config") or {})
    shape = AutoConfig.for_model(given.pop("model_type", "qwen3"), **given).to_dict()
    if shape.get("head_dim") is None:
        shape["head_dim"] = shape["hidden_size"] // shape["num_attention_heads"]
    check_honoured({**config, "transformer_layer_config": shape})
    ids = config.get("aux_hidden_state_layer_ids")
    if ids and min(ids) < 1:
        raise ValueError(
            f"`aux_hidden_state_layer_ids` is {ids}; 0 is the target's embedding output, and `DFlashDraftModel` taps "
            "outputs of layers only (1 = the first layer's). Use a drafter trained on those."
        )
    both_ways = config.get("sliding_window_non_causal", True)  # absent: trained before the field, both ways (vLLM)
    return {
        **shape,
        "architectures": ["DFlashDraftModel"],
        "dtype": config.get("dtype") or config.get("torch_dtype") or shape.get("dtype"),
        "block_size": config.get("block_size"),
        "mask_token_id": config.get("mask_token_id"),
        "target_layer_ids": None if ids is None else [i - 1 for i in ids],
        "num_target_layers": config.get("num_target_layers"),
        "depth_temperatures": config.get("depth_temperatures"),
        "causal_layers": "none" if both_ways else "sliding",
    }


# Fields of the layers that every layout has under the same name.
SHAPE_FIELDS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "hidden_act", "rms_norm_eps", "rope_parameters", "max_position_embeddings", "layer_types"),
    *("sliding_window", "attention_dropout", "vocab_size", "bos_token_id", "eos_token_id", "pad_token_id", "dtype"),
)


def from_published(config: dict[str, Any], layout: str, target_name: str | None = None) -> dict[str, Any]:
    """A config.json of the published layout, as `DFlashConfig` writes it, in another one.

    Args:
        layout: "assistant" or "speculators".
        target_name: the target's name or folder, which a speculators checkpoint carries; engines load it by that.

    Raises:
        ValueError: that layout has no place for something the drafter needs.
    """
    fields = {**config, **config["dflash_config"]}
    causal = fields["is_causal"] or (fields["is_causal"] is None and "sliding_attention" in fields["layer_types"])
    homeless = {
        "is_causal": fields["is_causal"] if layout == "speculators" else causal,
        "attention_bias": fields["attention_bias"] and layout == "assistant",
        "vocab_size": layout == "speculators" and fields["vocab_size"] is None,
    }
    if lost := {name: fields.get(name) for name, stops in homeless.items() if stops}:
        said = ", ".join(f"`{name}` {value}" for name, value in lost.items())
        raise ValueError(f"`layout` {layout!r} can't carry the drafter's {said}. Export it as 'published'.")
    shape = {name: fields[name] for name in SHAPE_FIELDS}
    carried = ("block_size", "mask_token_id", "num_target_layers", "depth_temperatures")
    draft = {name: fields[name] for name in carried if fields.get(name) is not None}
    if layout == "assistant":
        # Its window is a number, also where no layer slides.
        shape["sliding_window"] = shape["sliding_window"] or shape["max_position_embeddings"]
        names = {"architectures": ["MuseGlimmerAssistantModel"], "model_type": ASSISTANT_TYPE}
        return {**names, **shape, **draft, "target_layer_ids": fields["target_layer_ids"]}
    return {**_speculators_fields(fields, shape, target_name), **draft}


def _speculators_fields(fields: dict[str, Any], shape: dict[str, Any], target_name: str | None) -> dict[str, Any]:
    layers = {name: fields[name] for name in ("attention_bias", "use_sliding_window", "rope_theta", "rope_scaling")}
    proposal = {"proposal_type": "greedy", "speculative_tokens": fields["block_size"] - 1}
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target_name, "architectures": []},
        },
        "transformer_layer_config": {"model_type": "qwen3", "tie_word_embeddings": False, **shape, **layers},
        "draft_vocab_size": shape["vocab_size"],
        "aux_hidden_state_layer_ids": [i + 1 for i in fields["target_layer_ids"]],
        "sliding_window_non_causal": fields["is_causal"] is False,
        "sample_from_anchor": False,
        "dtype": shape["dtype"],
    }
