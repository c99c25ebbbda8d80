"""Aladdin's fleets in the simulator, and the example of its figure."""

from gllm.experiments.aladdin_cases import FleetRunTask, FleetSearchTask, example_peaks, run_fleet
from gllm.plan.scaling.fleet_size import FleetOutcome


def attainment(policy: str, num_workers: int, without: str = "") -> FleetOutcome:
    search = FleetSearchTask("azure-conv", 2.0, policy, seconds=15.0)
    return run_fleet(FleetRunTask(search, num_workers, without))


def test_shortest_queue_overfills_a_worker_that_the_best_placement_does_not() -> None:
    assert example_peaks() == (10, 7)


def test_long_prompts_need_half_the_workers_of_the_shortest_queue() -> None:
    aladdin, queue = attainment("aladdin", 6), attainment("least-tokens", 12)
    assert aladdin.attainment >= queue.attainment
    assert aladdin.attainment >= 0.95


def test_prompts_without_regard_to_slack_lose_a_third_of_the_attainment() -> None:
    careful, careless = attainment("aladdin", 6), attainment("aladdin", 6, without="d")
    assert careless.attainment <= careful.attainment - 0.3
