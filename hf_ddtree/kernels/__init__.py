"""Attention over draft trees. `reference` is the specification that fused kernels are tested against."""
