"""Candidate generators: what proposes a round's tree."""

from .dflash import DDTreeCandidateGenerator

__all__ = ["DDTreeCandidateGenerator"]
