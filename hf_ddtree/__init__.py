"""Lossless tree decoding for Hugging Face Transformers, switched on with one argument.

    model.generate(**inputs, assistant_model=drafter, generation_config=DDTreeConfig(tree_budget=32))

Importing the package registers the strategy with transformers.
"""

import transformers
from packaging.version import Version

OLDEST, NEWEST = Version("5.17"), Version("5.25")
if not OLDEST <= Version(transformers.__version__) < NEWEST:
    raise ImportError(
        f"hf_ddtree works with transformers {OLDEST} to 5.24, found {transformers.__version__}: "
        'pip install "transformers>=5.17,<5.25"'
    )

from .configuration import DDTreeConfig  # noqa: E402 - after the version check
from .drafting import DDTreeCandidateGenerator, Draft, Drafter, LookupDrafter, Request, tree_of_paths  # noqa: E402
from .models import DFlashConfig, DFlashDraftModel  # noqa: E402
from .processors import KeyedNoiseLogitsProcessor, plain_sampling_processors  # noqa: E402
from .strategy import DDTreeOutput, register  # noqa: E402
from .tree import Tree  # noqa: E402
from .version import __version__  # noqa: E402

__all__ = [
    "DDTreeCandidateGenerator",
    "DDTreeConfig",
    "DDTreeOutput",
    "DFlashConfig",
    "DFlashDraftModel",
    "Draft",
    "Drafter",
    "KeyedNoiseLogitsProcessor",
    "LookupDrafter",
    "Request",
    "Tree",
    "__version__",
    "plain_sampling_processors",
    "tree_of_paths",
]

register()
