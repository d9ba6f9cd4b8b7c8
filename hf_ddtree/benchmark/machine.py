"""What a measurement was made on and with: hardware, versions, commit."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

from ..version import __version__

CHECKOUT = Path(__file__).parents[2]


def hardware(device: torch.device) -> dict[str, Any]:
    """Processor, cores and threads; the accelerator too if `device` is one."""
    found: dict[str, Any] = {"cpu": _cpu_model(), "cores": _usable_cores(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        found["accelerator"] = torch.cuda.get_device_name(device)
    elif device.type != "cpu":
        found["accelerator"] = device.type
    return found


def versions() -> dict[str, str | None]:
    """Of Python, torch, transformers and this package; its commit where it runs from a checkout."""
    return {
        "hf_ddtree": __version__,
        "commit": commit(CHECKOUT),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def commit(folder: Path) -> str | None:
    """The commit checked out in `folder`, with a + if files differ from it; None where there is none."""
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
