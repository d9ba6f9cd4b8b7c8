"""The matrix of docs/support.md, cell by cell."""

import functools

import pytest
import transformers
from families import FAMILIES
from packaging.version import Version
from stubs import make_target
from support import FEATURES, MISSING, OLD_FAULTS, PAGE, page

CELLS = [(family, feature) for family in FAMILIES for feature in FEATURES if (family, feature) not in MISSING]
target_of = functools.cache(make_target)


@pytest.mark.parametrize("family, feature", CELLS, ids=[f"{family}-{feature}" for family, feature in CELLS])
def test_cell(family, feature):
    if (family, feature) in OLD_FAULTS and Version(transformers.__version__) < Version("5.24"):
        pytest.skip("plain `generate` fails at it")
    FEATURES[feature](target_of(family))


def test_the_page_is_what_the_matrix_says():
    assert PAGE.read_text() == page(), "run `python tests/support.py`"
