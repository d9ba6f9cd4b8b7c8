"""Drafter models."""

from .dflash import DFlashDraftModel
from .dflash_config import DFlashConfig

__all__ = ["DFlashConfig", "DFlashDraftModel"]
