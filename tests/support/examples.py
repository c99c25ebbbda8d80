"""Numbers of examples of property tests: few in `make test`, many in `make test-long`."""

from hypothesis import settings

LONG_PROFILE = "long"
"""Hypothesis profile of `make test-long`; tests/conftest.py registers it."""


def num_examples(few: int, many: int) -> int:
    """Return the number of examples of a property test under the loaded Hypothesis profile.

    few: enough to find each kind of fault. many: in the long profile.
    """
    return many if settings.get_current_profile_name() == LONG_PROFILE else few
