"""Drafters: what proposes a round's trees."""

from .dflash import DDTreeCandidateGenerator
from .draft import Draft
from .drafter import Drafter, Request
from .make import make_drafter

__all__ = ["DDTreeCandidateGenerator", "Draft", "Drafter", "Request", "make_drafter"]
