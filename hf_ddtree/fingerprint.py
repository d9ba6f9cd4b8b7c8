"""Whether weights are still those that something was made of."""

from collections.abc import Iterable

import torch


def fingerprint(weights: Iterable[torch.Tensor]) -> tuple[tuple[int, int], ...]:
    """Address and version of each: others where a weight was replaced or written to.

    Tensors made in inference mode have no version; writing to those is not noticed.
    """
    return tuple((each.data_ptr(), 0 if each.is_inference() else each._version) for each in weights)
