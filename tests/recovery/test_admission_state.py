"""Which requests an engine takes follows from facts that change independently."""

from itertools import product

import pytest

from gllm.recovery.admission_state import AdmissionState


@pytest.mark.parametrize(
    ("phase", "is_sleeping", "is_draining", "is_overdue", "name", "reason"),
    [
        ("loading", False, False, False, "loading", "loading"),
        ("loading", True, True, False, "loading", "loading"),
        ("ready", False, False, False, "ready", ""),
        ("ready", True, False, False, "sleeping", "sleeping"),
        ("ready", False, True, False, "draining", "draining"),
        ("ready", True, True, False, "draining", "draining"),
        ("recovering", False, False, False, "recovering", ""),
        ("recovering", False, False, True, "recovering", "recovering"),
        ("recovering", True, False, False, "recovering", "sleeping"),
        ("recovering", True, False, True, "recovering", "sleeping"),
        ("recovering", False, True, False, "draining", "draining"),
        ("recovering", True, True, True, "draining", "draining"),
        ("dead", False, False, False, "dead", "dead"),
        ("dead", True, True, True, "dead", "dead"),
    ],
)
def test_name_and_reason(
    phase: str, is_sleeping: bool, is_draining: bool, is_overdue: bool, name: str, reason: str
) -> None:
    state = AdmissionState(phase, is_sleeping, is_draining, is_overdue)
    assert (state.name, state.reason_to_refuse) == (name, reason)


def test_only_an_engine_that_is_awake_and_stays_takes_requests() -> None:
    flags = (False, True)
    for phase, *facts in product(("loading", "ready", "recovering", "dead"), flags, flags, flags):
        state = AdmissionState(phase, *facts)
        is_serving = phase == "ready" or (phase == "recovering" and not state.is_recovery_overdue)
        takes = is_serving and not (state.is_sleeping or state.is_draining)
        assert takes == (state.reason_to_refuse == ""), state
