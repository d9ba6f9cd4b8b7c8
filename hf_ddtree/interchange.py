"""Drafter checkpoints as files: written in another project's layout, and described without loading the weights."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .configuration import DDTreeConfig
from .drafting.dflash import check_drafter
from .models.dflash import DFlashDraftModel
from .models.dflash_config import CAUSAL_LAYER_TYPES, DFlashConfig
from .models.layouts import ASSISTANT_TENSOR_NAMES, LAYOUTS, TENSOR_NAMES, from_published, layout_of, target_copies

READERS = {
    "published": "z-lab, SGLang, vLLM, SpecForge",
    "assistant": "transformers' own assistant",
    "speculators": "vLLM's speculators",
}
INDEX = "model.safetensors.index.json"
BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # other dtypes of weights, quantised ones, take one


def export_drafter(
    source: str | os.PathLike, out: str | os.PathLike, layout: str, target_name: str | None = None
) -> Path:
    """Writes a drafter, read in any layout, to the folder `out` in `layout`, for other engines; weights are unchanged.

    A transition, and the calibration fitted with it, is left out: other engines do not know it, and the drafter's own
    distributions do without.

    Args:
        source: folder, or name on the Hub.
        out: a folder that is empty or does not exist.
        layout: "published", "assistant" or "speculators" (docs/interchange.md).
        target_name: the target's name or folder; a speculators checkpoint carries it.

    Returns:
        `out`.

    Raises:
        ValueError: `source` is no drafter, `out` is not empty, or `layout` is unknown or has no place for something
            that the drafter needs.
    """
    out = Path(out)
    if layout not in LAYOUTS:
        raise ValueError(f"`layout` is {layout!r}; it is one of {', '.join(LAYOUTS)}.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"`out` is {str(out)!r}, which holds something already; give a new or an empty folder.")
    config = read_config(source)
    if config.transition_rank:
        config.transition_rank, config.depth_temperatures = 0, None
    fields = config.to_dict()
    written = fields if layout == "published" else from_published(fields, layout, target_name)

    drafter = DFlashDraftModel.from_pretrained(source, dtype="auto")
    drafter.config, drafter.transition = config, None
    if layout == "published":
        drafter.save_pretrained(out)
        return out
    names = ASSISTANT_TENSOR_NAMES if layout == "assistant" else {}
    tensors = {_renamed(name, names): tensor.contiguous() for name, tensor in drafter.state_dict().items()}
    out.mkdir(parents=True, exist_ok=True)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    written["dtype"] = str(drafter.dtype).removeprefix("torch.")
    (out / "config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    return out


def describe(folder: str | os.PathLike, target_config: Any = None) -> str:
    """What a drafter's folder holds, as text; reads config.json and the headers of the safetensors files.

    Args:
        folder: or a name on the Hub, whose files are fetched.
        target_config: config of a target; adds whether the drafter fits it.

    Raises:
        ValueError: the folder holds no drafter, or one that `DFlashDraftModel` can't be; says what it holds instead.
    """
    folder = _local(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"`folder` is {str(folder)!r}, which has no config.json; give the folder of a drafter.")
    raw = _read_object(folder / "config.json")
    layout = layout_of(raw)
    config = read_config(folder)
    with torch.device("meta"):
        drafter = DFlashDraftModel(config)
    rows = [
        ("layout", f"{layout} ({READERS[layout]})"),
        *_config_rows(config),
        *_weight_rows(folder, drafter),
        ("made for", _target_line(config, raw)),
    ]
    if target_config is not None:
        rows.append(("fits", _fits(drafter, target_config)))
    return "\n".join(f"{name:<12} {text}" for name, text in rows)


def read_config(folder: str | os.PathLike) -> DFlashConfig:
    """The config of a drafter in any layout.

    Raises:
        OSError: there is none.
        ValueError: it is not a drafter's, or lacks something, or has something of the wrong type.
    """
    try:
        return DFlashConfig.from_pretrained(folder)
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:  # for what no check foresees
        raise ValueError(
            f"The config.json of {str(folder)!r} is not understood ({type(error).__name__}: {error}); mend it, or get "
            "the checkpoint again."
        ) from error


def _local(name: str | os.PathLike) -> Path:
    """The folder, or a copy of what the Hub has under that name."""
    if Path(name).is_dir():
        return Path(name)
    try:
        return Path(snapshot_download(str(name), allow_patterns=["config.json", "model*.safetensors", INDEX]))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{str(name)!r} is no folder here, and nothing that the Hub gave ({error}); give the folder of a drafter, "
            "or its name on the Hub."
        ) from error


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is torn ({error}); get the checkpoint again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}, not an object; get the checkpoint again.")
    return content


def _config_rows(config: DFlashConfig) -> list[tuple[str, str]]:
    assert config.layer_types is not None and config.block_size is not None and config.target_layer_ids is not None
    kinds = {kind: config.layer_types.count(kind) for kind in dict.fromkeys(config.layer_types)}
    causal = CAUSAL_LAYER_TYPES[config.causal_layers]
    window = {"sliding_attention": f", window {config.sliding_window}"}
    layers = ", ".join(
        f"{n} {kind}{window.get(kind, '')}{', causal' if kind in causal else ''}" for kind, n in kinds.items()
    )
    rank, temperatures = config.transition_rank, config.depth_temperatures
    return [
        ("block", f"{config.block_size} slots, the anchor one of them: drafts {config.block_size - 1} tokens deep"),
        ("layers", f"{config.num_hidden_layers} ({layers}), hidden size {config.hidden_size}"),
        ("taps", f"outputs of the target's layers {', '.join(map(str, config.target_layer_ids))} (the first is 0)"),
        ("mask token", str(config.mask_token_id)),
        ("transition", f"path-conditional, rank {rank}" if rank else "none"),
        ("calibration", ", ".join(f"{t:.3g}" for t in temperatures) + " by depth" if temperatures else "none"),
    ]


def _weight_rows(folder: Path, drafter: DFlashDraftModel) -> list[tuple[str, str]]:
    """Sizes out of the safetensors headers, and what is missing or not used."""
    found = _headers(folder)
    if not found:
        return [("weights", "none in safetensors files here")]
    wanted = {name: tuple(tensor.shape) for name, tensor in drafter.state_dict().items()}
    copies = target_copies(set(found) - set(wanted))
    ours = [found[name] for name in wanted if name in found]
    count = sum(torch.Size(shape).numel() for shape, _ in ours)
    size = sum(torch.Size(shape).numel() * BYTES.get(dtype, 1) for shape, dtype in ours)
    dtypes = ", ".join(sorted({dtype for _, dtype in ours}))
    rows = [("weights", f"{count:,} parameters, {size / 1e6:,.1f} MB, {dtypes}")]
    if bad := sorted(name for name, shape in wanted.items() if name not in found or found[name][0] != shape):
        rows.append(("incomplete", f"lacks {', '.join(bad)}, or has them in another shape: does not load"))
    if copies:
        rows.append(("not used", f"{', '.join(copies)}: drafts go through the target's own embedding and head"))
    return rows


def _headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each tensor in the model's safetensors files, by its published name."""
    found = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    part = tensors.get_slice(name)
                    found[_renamed(name, TENSOR_NAMES)] = (tuple(part.get_shape()), part.get_dtype())
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{path} can't be read ({error}); get the checkpoint again.") from error
    return found


def _weight_files(folder: Path) -> list[Path]:
    """The files that the index lists, or all of the model's where there is no index; other tables are left alone."""
    if not (folder / INDEX).is_file():
        return sorted(folder.glob("model*.safetensors"))
    listed = _read_object(folder / INDEX).get("weight_map")
    if not isinstance(listed, dict):
        raise ValueError(f"{folder / INDEX} has no `weight_map`; get the checkpoint again.")
    return [folder / name for name in sorted(set(map(str, listed.values())))]


def _renamed(name: str, names: dict[str, str]) -> str:
    for pattern, new in names.items():
        name = re.sub(pattern, new, name)
    return name


def _target_line(config: DFlashConfig, raw: dict[str, Any]) -> str:
    """The target it was trained for, as far as the checkpoint says."""
    about = raw.get("speculators_config")
    verifier = about.get("verifier") if isinstance(about, dict) else None
    said = {"layers": config.num_target_layers, "vocabulary": config.vocab_size, "hidden size": config.hidden_size}
    facts = ", ".join(f"{name} {'not said' if value is None else format(value, ',')}" for name, value in said.items())
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    return f"{name}: {facts}" if name else facts


def _fits(drafter: DFlashDraftModel, target_config: Any) -> str:
    try:
        check_drafter(drafter, SimpleNamespace(config=target_config), DDTreeConfig())
    except ValueError as error:
        return f"no. {error}"
    return f"yes, {target_config.model_type}"
