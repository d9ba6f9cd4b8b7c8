"""Drafters: what proposes a round's trees."""

from .dflash import DDTreeCandidateGenerator
from .draft import Draft
from .drafter import Drafter, Request
from .lookup import LookupDrafter
from .make import make_drafter
from .paths import tree_of_paths

__all__ = ["DDTreeCandidateGenerator", "Draft", "Drafter", "LookupDrafter", "Request", "make_drafter", "tree_of_paths"]
