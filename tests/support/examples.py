"""Numbers of examples of property tests: few in `make test`, many in `make test-long`."""

import pytest
from hypothesis import settings

LONG_PROFILE = "long"
"""Hypothesis profile of `make test-long`; tests/conftest.py registers it."""


def num_examples(few: int, many: int) -> int:
    """Return the number of examples of a property test under the loaded Hypothesis profile.

    few: enough to find each kind of fault. many: in the long profile.
    """
    return many if settings.get_current_profile_name() == LONG_PROFILE else few


def further_runs(number: int) -> pytest.MarkDecorator:
    """Run a property test `number` more times in `make test-all`, each time with other examples.

    The test gets the parameter `run`: 0 in `make test`.
    """
    if settings.get_current_profile_name() == LONG_PROFILE:
        number = 0
    runs = [0, *(pytest.param(run, marks=pytest.mark.full) for run in range(1, number + 1))]
    return pytest.mark.parametrize("run", runs)
