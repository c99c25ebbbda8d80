"""Needs of a router's preset: the policy of its engines, and predicted output lengths."""

from typing import Any

import pytest

from gllm.router.engine_record import preset_warning
from gllm.routing.disaggregation.policy_registry import PAIR_POLICIES
from gllm.scheduler.config import LOCAL_PRESETS, SchedulerConfig
from tests.router.test_fleet import Rig
from tests.support.routing.scripted_links import ANNOUNCE


def test_the_router_and_its_engines_have_the_same_presets() -> None:
    assert set(LOCAL_PRESETS) == set(PAIR_POLICIES)


def test_an_engine_that_schedules_otherwise_is_named_with_the_fix(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = Rig(preset="tetri")
    rig.attach("fits", policy=SchedulerConfig(preset="tetri").policy)
    rig.attach("old")  # a version that announces no policy
    assert not caplog.records
    rig.attach("other", policy="sarathi")
    assert "engine other has policy sarathi" in caplog.text
    assert "start the engine with --preset tetri" in caplog.text
    assert preset_warning(ANNOUNCE, None) == ""


@pytest.mark.parametrize("options", [{}, {"preset": "distserve"}])
def test_requests_carry_a_prediction_once_outputs_have_ended(options: dict[str, Any]) -> None:
    rig = Rig(**options)
    link = rig.attach("a")
    for length in (2, 4):
        rig.submit()
        request = link.requests[-1]
        # An engine predicts as well as a router that has seen nothing.
        assert request.predicted_output_tokens == (0 if length == 2 else 2)
        link.answer(request, *range(10, 10 + length), reason="length")
    stream = rig.submit()
    assert link.requests[-1].predicted_output_tokens == 3
    link.answer(link.requests[-1], 10, 11, 12)
    # A request that goes on elsewhere is longer than most.
    other = rig.attach("b")
    link.leave()
    assert stream.entry.num_output_tokens == 3
    assert other.requests[-1].predicted_output_tokens == 4
