"""Property tests under every profile: none fails because the machine is slow."""

import pytest
from hypothesis import HealthCheck, settings

from tests.support.examples import LONG_PROFILE


@pytest.mark.parametrize("profile", ["default", LONG_PROFILE, "ci"])
def test_no_profile_has_a_time_limit(profile: str) -> None:
    chosen = settings.get_profile(profile)
    assert chosen.deadline is None
    assert HealthCheck.too_slow in chosen.suppress_health_check


def test_the_profile_in_use_has_no_time_limit() -> None:
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check
