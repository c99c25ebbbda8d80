"""Needs of a router's preset: the policy of its engines, and predicted output lengths."""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from gllm.messages.fleet import EngineReport
from gllm.router.dispatcher import Dispatcher, PairDispatcher
from gllm.router.engine_record import EngineRecord, preset_warning
from gllm.routing.disaggregation.policy import DecodeChoice, PairPolicy, PairRequest
from gllm.routing.disaggregation.policy_registry import PAIR_POLICIES
from gllm.routing.health import FleetHealth, HealthConfig
from gllm.routing.policy_registry import make_policy
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.config import LOCAL_PRESETS, SchedulerConfig
from gllm.scheduler.plan import SchedulerStats
from tests.router.test_fleet import GREEDY, Rig
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


def test_the_router_predicts_by_the_prompts_and_shows_its_accuracy() -> None:
    rig = Rig(length_predictor="nearest")
    link = rig.attach("a")
    assert rig.fleet.totals().length_predictor == "nearest"

    def submit(kind: int, number: int) -> None:
        # Prompts of equal length: only their tokens tell the kinds apart.
        prompt = [*range(kind, kind + 4), 30 + number, 31 + number]
        rig.fleet.client.submit(prompt, GREEDY, 40, [])

    kinds = {10: 3, 20: 24}
    for number in range(60):
        for kind, num_tokens in kinds.items():
            submit(kind, number)
            link.answer(link.requests[-1], *[9] * num_tokens, reason="length")
    for kind, num_tokens in kinds.items():
        submit(kind, 0)
        assert link.requests[-1].predicted_output_tokens == num_tokens
    rows = {row.bucket: row for row in rig.fleet.status().output_lengths}
    assert rows == {row.bucket: row for row in rig.fleet.totals().output_lengths}
    # Nothing was known of the first request.
    assert (rows["1-16"].num_outputs, rows["17-32"].num_outputs) == (59, 60)
    assert min(rows["1-16"].num_right, rows["17-32"].num_right) >= 30
    assert (rows["1-16"].mean_tokens, rows["17-32"].mean_tokens) == (3, 24)


def test_a_predictor_that_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="mean is none of by-max-tokens"):
        Rig(length_predictor="mean")


class SeenPairs(PairPolicy):
    """A pair policy that notes the predicted lengths, and leaves the choice to the router."""

    decode_choice = DecodeChoice.ARRIVAL

    def __init__(self) -> None:
        super().__init__(Random(0))
        self.seen: list[int] = []

    def choose(self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float) -> None:
        self.seen.append(request.num_output_tokens)

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> None:
        pass


def test_pairs_of_engines_are_chosen_by_the_likely_length() -> None:
    """TetriInfer's classes are told apart although all requests have one limit."""
    health = FleetHealth(HealthConfig())
    dispatcher = Dispatcher(make_policy("round-robin", Random(0)), health, lambda: 0.0, "nearest")
    report = EngineReport("ready", "", SchedulerStats())
    dispatcher.records[ANNOUNCE.name] = EngineRecord(ANNOUNCE, report, 0.0)
    policy, rig = SeenPairs(), Rig()
    pairs = PairDispatcher(policy, dispatcher, lambda: 0.0)
    for _ in range(40):
        for kind, num_tokens in ((10, 1), (20, 700)):
            stream = rig.submit(*range(kind, kind + 6))
            assert pairs.choose(stream, frozenset([ANNOUNCE.name])) is None
            dispatcher.on_output(stream.entry, num_tokens)
    # The limit of these requests is 8 tokens.
    assert policy.seen[-2:] == [1, 8]
