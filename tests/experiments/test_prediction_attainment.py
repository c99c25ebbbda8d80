"""Attainments of predictions: limits of their own loads, and the sign of the error."""

import pytest

from experiments.claims import ExpectedLimit
from experiments.prediction_attainment import (
    LIMIT_PERCENT,
    attainment_claims,
    attainment_section,
    compare_attainment,
)
from gllm.config.engine import EngineConfig
from gllm.sim.compare import RunComparison
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import make_workload
from tests.support.sim.requests import to_scheduler_requests

JOBS = make_workload("uniform:16,400,8,60", 200, 12.0, "poisson", seed=5)


def serve(step_seconds: float) -> RunRecord:
    scheduler = EngineConfig.from_options("demo").scheduler.resolve(1, 1000, 1024)
    deployment = Deployment("simulated", [1], ConstantCostModel(step_seconds), scheduler)
    return simulate_scheduler_requests(deployment, to_scheduler_requests(JOBS))[0]


def test_a_right_prediction_has_no_error_and_a_share_between_its_limits() -> None:
    real = serve(0.01)
    attainment = compare_attainment(RunComparison(real, serve(0.008), 1.25, real))
    least = 1 - 2 * (1 - LIMIT_PERCENT / 100)
    assert least <= attainment.real <= LIMIT_PERCENT / 100 + 0.01
    assert attainment.real == attainment.at_speed
    assert attainment.error_points == 0
    assert attainment.predicted > attainment.at_speed  # a faster machine keeps more limits
    assert "| +0.0" in attainment_section({"a load": attainment})
    (claim,) = attainment_claims({"a load": attainment})
    assert claim.verdict.is_met


@pytest.mark.full
def test_a_prediction_that_is_too_fast_by_a_fifth_misses() -> None:
    predicted = serve(0.008)
    attainment = compare_attainment(RunComparison(serve(0.01), predicted, 1.0, predicted))
    assert attainment.error_points > 5
    (claim,) = attainment_claims({"a load": attainment})
    assert isinstance(claim.paper, ExpectedLimit)
    assert not claim.verdict.is_met
