"""Cases of a parametrized test of which only some run in `make test`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def full_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values as cases; those that are not in `quick` run in `make test-all` only.

    Args:
        quick: Values that cover what the test is about.
        values: All values; a tuple has one for each parameter.
    """
    cases = []
    for value in values:
        each = value if isinstance(value, tuple) else (value,)
        cases.append(value if value in quick else pytest.param(*each, marks=pytest.mark.full))
    return cases
