"""Aladdin's fleets in the simulator, and the example of its figure."""

import pytest

from experiments.aladdin import saving_claim
from experiments.aladdin_cases import FleetRunTask, FleetSearchTask, example_peaks, run_fleet
from experiments.aladdin_misses import MissTask, find_misses, is_delayed_by_earlier
from experiments.aladdin_rebalancing import RebalancingTask, compare_fleet, run_rebalanced
from experiments.claims import ClaimVerdict
from gllm.observability.latency import RequestTimeline
from gllm.plan.scale.fleet_size import FleetOutcome
from gllm.sim.metrics.run_record import ServedRequest


def attainment(policy: str, num_workers: int, without: str = "") -> FleetOutcome:
    search = FleetSearchTask("azure-conv", 2.0, policy, seconds=15.0)
    return run_fleet(FleetRunTask(search, num_workers, without))


def test_shortest_queue_overfills_a_worker_that_the_best_placement_does_not() -> None:
    assert example_peaks() == (10, 7)


@pytest.mark.full
def test_long_prompts_need_half_the_workers_of_the_shortest_queue() -> None:
    aladdin, queue = attainment("aladdin", 6), attainment("least-tokens", 12)
    assert aladdin.attainment >= queue.attainment
    assert aladdin.attainment >= 0.95


@pytest.mark.full
def test_prompts_without_regard_to_slack_lose_a_third_of_the_attainment() -> None:
    careful, careless = attainment("aladdin", 6), attainment("aladdin", 6, without="d")
    assert careless.attainment <= careful.attainment - 0.3


def served(arrival: float, *times: float) -> ServedRequest:
    line = RequestTimeline(arrival)
    for time in times:
        line.record_output(time)
    return ServedRequest(100, len(times), line)


def test_a_prompt_delays_the_second_token_of_one_that_was_placed_before_it() -> None:
    request = served(0.0, 1.0, 1.6, 1.65)
    assert is_delayed_by_earlier(request, [request, served(0.9, 1.6)])
    # Placed later, computed at another time, or no delay.
    assert not is_delayed_by_earlier(request, [request, served(1.1, 1.6)])
    assert not is_delayed_by_earlier(request, [request, served(0.9, 1.0)])
    assert not is_delayed_by_earlier(request, [request, served(0.9, 1.65)])


@pytest.mark.full
def test_requests_that_miss_are_short_and_delayed_by_prompts_placed_before() -> None:
    search = FleetSearchTask("sharegpt", 4.0, "aladdin", seconds=40.0)
    few, many = (find_misses(MissTask(search, count)) for count in (8, 16))
    assert few.num_requests == many.num_requests == 160
    # More workers do not help.
    assert few.num_missed >= many.num_missed >= 2
    assert many.longest_output < 60
    assert many.num_delayed_by_earlier == many.num_missed
    assert not many.num_late_first


@pytest.mark.full
def test_rebalancing_of_a_fleet_moves_unstarted_requests_only() -> None:
    search = FleetSearchTask("sharegpt-like", 8.0, "aladdin", seconds=40.0)
    task = RebalancingTask(search, 5)
    outcome = compare_fleet(task)
    assert outcome.num_moves >= 3
    assert outcome.num_chances > outcome.num_moves
    assert not outcome.num_started
    assert not outcome.num_useless
    assert abs(outcome.with_moves - outcome.without) < 0.03
    run = run_rebalanced(task).cluster
    assert len(run.requests) == 320
    assert all(each.line.num_tokens == each.max_tokens for each in run.requests.values())


def test_a_policy_that_fails_loses() -> None:
    """More than 64 workers are no blank: not for Aladdin, nor for its baseline."""
    lost = saving_claim("GPUs", -0.4, [None], [43])
    assert lost.verdict == ClaimVerdict(False, False, False)
    assert lost.shown == "+49 % at least, > 64 workers"
    assert saving_claim("GPUs", -0.4, [6, 6, 6], [7, 8, 8]).verdict.is_met
    assert saving_claim("GPUs", -0.4, [32], [None]).verdict.is_met
    assert saving_claim("GPUs", -0.4, [None], [None]).verdict == ClaimVerdict()
    assert saving_claim("GPUs", -0.4, [], [43]).verdict == ClaimVerdict()
