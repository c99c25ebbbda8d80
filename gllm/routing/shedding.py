"""Load shedding: refuse a request that no engine can serve within its objective."""

import math
from collections.abc import Iterable, Mapping

from gllm.routing.policies.predict import Prediction
from gllm.routing.state import RoutingRequest

SATURATED = "rejected-saturated"
"""Value of x-llm-d-request-dropped-reason for a request that is refused under load."""
LOW_PRIORITY_SHARE = 0.5
"""Share of its limits that a request of low priority (above 0) may use: the rest of the capacity is
kept for others."""
MAX_RETRY_SECONDS = 60


def shedding_reason(request: RoutingRequest, predictions: Mapping[str, Prediction]) -> str | None:
    """Return the reason to refuse a request because no engine can meet its SLO; None to accept it.

    A request is refused if no engine is predicted to meet its limits of latency. Requests without
    an SLO and those of high priority (below 0), which pass the queue that the prediction counts,
    are admitted. So are all requests while there is no engine: they wait for one.

    Args:
        request: priority, expected output and SLO of the request.
        predictions: predicted latencies by engine.

    Returns:
        The value of the header x-llm-d-request-dropped-reason, or None.
    """
    if request.slo is None or request.priority < 0 or not predictions:
        return None
    if any(_excess_seconds(request, prediction) <= 0 for prediction in predictions.values()):
        return None
    return SATURATED


def retry_after_seconds(request: RoutingRequest, predictions: Iterable[Prediction]) -> int:
    """Return the seconds after which a refused request is likely to be accepted (Retry-After).

    Args:
        request: the refused request, with its SLO.
        predictions: its predicted latency on each engine.
    """
    excess = min((_excess_seconds(request, prediction) for prediction in predictions), default=0.0)
    return max(1, min(MAX_RETRY_SECONDS, math.ceil(excess)))


def _excess_seconds(request: RoutingRequest, prediction: Prediction) -> float:
    """Return the time by which a prediction is above the limits; 0 or less if it meets them."""
    assert request.slo is not None
    share = LOW_PRIORITY_SHARE if request.priority > 0 else 1.0
    ttft, tpot = request.slo.ttft_seconds, request.slo.tpot_seconds
    excess = [0.0]
    if ttft is not None:
        excess.append(prediction.ttft_seconds - share * ttft)
    if tpot is not None:
        # Other requests have to end until tokens come faster: a whole output at this pace.
        is_slow = prediction.tpot_seconds > share * tpot
        excess.append(is_slow * prediction.tpot_seconds * request.num_output_tokens)
    return max(excess)
