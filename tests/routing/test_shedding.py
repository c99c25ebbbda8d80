"""Refusal of requests whose objective no engine meets."""

import pytest

from gllm.options.slo import Slo
from gllm.routing.policies.predict import Prediction
from gllm.routing.shedding import MAX_RETRY_SECONDS, SATURATED, retry_after_seconds, shedding_reason
from gllm.routing.state import RoutingRequest

PREDICTIONS = {"fast-start": Prediction(1.0, 0.2), "fast-tokens": Prediction(4.0, 0.05)}


def request(ttft: float | None, tpot: float | None, priority: int = 0) -> RoutingRequest:
    return RoutingRequest(100, num_output_tokens=10, priority=priority, slo=Slo(ttft, tpot))


@pytest.mark.parametrize(
    ("ttft", "tpot", "priority", "reason"),
    [
        (None, None, 0, None),
        (1.0, None, 0, None),
        (0.9, None, 0, SATURATED),
        (None, 0.05, 0, None),
        (None, 0.04, 0, SATURATED),
        # One engine meets each of the limits, but none meets both.
        (2.0, 0.1, 0, SATURATED),
        (4.0, 0.1, 0, None),
        # More important requests pass the queue; less important ones leave half of the limit.
        (0.1, None, -1, None),
        (1.9, None, 1, SATURATED),
        (2.0, None, 1, None),
    ],
)
def test_request_is_shed_if_no_engine_meets_its_objective(
    ttft: float | None, tpot: float | None, priority: int, reason: str | None
) -> None:
    assert shedding_reason(request(ttft, tpot, priority), PREDICTIONS) == reason


def test_request_without_objective_or_without_engines_is_admitted() -> None:
    assert shedding_reason(RoutingRequest(100), PREDICTIONS) is None
    assert shedding_reason(request(1e-9, 1e-9), {}) is None


def test_refused_request_may_come_back_once_the_excess_is_over() -> None:
    assert retry_after_seconds(request(0.5, None), PREDICTIONS.values()) == 1
    predictions = [Prediction(7.5, 0.1), Prediction(9.0, 0.1)]
    assert retry_after_seconds(request(1.0, None), predictions) == 7
    assert retry_after_seconds(request(None, 0.01), [Prediction(0.0, 0.5)]) == 5
    assert retry_after_seconds(request(1.0, None), [Prediction(1e9, 1)]) == MAX_RETRY_SECONDS
    assert retry_after_seconds(request(1.0, None), []) == 1
