"""TetriInfer's workloads against colocated engines, and the dispatch of heavy decodes."""

import pytest

from experiments.tetri_cases import (
    CAP,
    HEAVY_OUTPUT,
    HEAVY_PROMPT,
    TetriCase,
    sample_jobs,
    scale_to_v100,
    simulate_case,
)
from experiments.tetri_dispatch import LENGTHS, NUM_INSTANCES, mean_most_heavy
from experiments.tetri_local import (
    AdmissionCase,
    admit_decodes,
    prompt_ttft,
    sample_prompts,
)
from gllm.sim.costs.distserve import read_coefficients


def change(workload: str, metric: str) -> float:
    """Return the relative change against one colocated engine with a cap."""
    ours = simulate_case(TetriCase(workload, "uniform", "tetri"))
    base = simulate_case(TetriCase(workload, "uniform", "colocated", CAP, num_colocated=1))
    return getattr(ours, metric) / getattr(base, metric) - 1


@pytest.mark.full
@pytest.mark.parametrize(
    ("workload", "metric", "limit"),
    [("LPHD", "ttft", -0.9), ("Mixed", "ttft", -0.7), ("Mixed", "jct", -0.4)],
)
def test_prompts_and_jobs_are_faster_than_on_a_capped_engine(
    workload: str, metric: str, limit: float
) -> None:
    assert change(workload, metric) <= limit


@pytest.mark.parametrize("num_engines", NUM_INSTANCES)
def test_heavy_decodes_are_spread(num_engines: int) -> None:
    most = mean_most_heavy("po2", num_engines, 20)
    assert most <= 18
    assert most < mean_most_heavy("random", num_engines, 20)


@pytest.mark.full
@pytest.mark.parametrize("lengths", LENGTHS)
def test_heavy_decodes_are_spread_better_than_at_random(lengths: str) -> None:
    for num_engines in (2, 8):
        po2, even, random, worst = (
            mean_most_heavy(name, num_engines, 20, lengths)
            for name in ("po2", "even", "random", "imbalance")
        )
        assert even <= po2 < random < worst
        assert po2 - even <= (random - even) / 2
        assert worst >= (30 if lengths == "half heavy" else 1.3 * random)


@pytest.mark.parametrize("seed", range(3))
def test_short_prompts_first_lower_the_mean_ttft(seed: int) -> None:
    prompts = sample_prompts("lognormal", seed)
    ttfts = {order: prompt_ttft(order, prompts) for order in ("fcfs", "sjf", "sjf, 128")}
    assert ttfts["sjf"] <= 0.97 * ttfts["fcfs"]
    assert ttfts["sjf, 128"] <= 0.6 * ttfts["sjf"]


@pytest.mark.full
@pytest.mark.parametrize("lengths", ["mixed", "sharegpt"])
def test_dynamic_reservation_avoids_preemptions(lengths: str) -> None:
    greedy = admit_decodes(AdmissionCase(lengths, 16384, "greedy"))
    dynamic = admit_decodes(AdmissionCase(lengths, 16384, "reserve-dynamic"))
    assert dynamic.num_preemptions <= greedy.num_preemptions / 2
    assert dynamic.jct <= 0.95 * greedy.jct


@pytest.mark.full
@pytest.mark.parametrize(
    ("lengths", "capacity"),
    [
        ("sharegpt", 8192),
        *(
            pytest.param(lengths, capacity, marks=pytest.mark.long)
            for lengths, capacity in (("mixed", 8192), ("mixed", 4096), ("sharegpt", 4096))
        ),
    ],
)
def test_dynamic_reservation_halves_preemptions_of_small_caches(
    lengths: str, capacity: int
) -> None:
    """The mean JCT is at most 5 % higher; that it is 5 % lower holds for large caches only."""
    greedy = admit_decodes(AdmissionCase(lengths, capacity, "greedy"))
    dynamic = admit_decodes(AdmissionCase(lengths, capacity, "reserve-dynamic"))
    assert dynamic.num_preemptions <= greedy.num_preemptions / 2
    assert dynamic.jct <= 1.05 * greedy.jct


def test_sharegpt_requests_belong_to_their_class() -> None:
    jobs = sample_jobs("HPLD", "sharegpt", 3, 40)
    assert len(jobs) == 40
    assert all(job.num_prompt_tokens > HEAVY_PROMPT for job in jobs)
    assert all(job.num_output_tokens <= HEAVY_OUTPUT for job in jobs)
    assert jobs != sample_jobs("HPLD", "sharegpt", 4, 40)


def test_a_v100_is_slower_by_its_data_sheet() -> None:
    a100 = read_coefficients("distserve", "opt-13b", 2)
    v100 = scale_to_v100(a100)
    assert v100.prefill.per_token / a100.prefill.per_token == pytest.approx(312 / 125)
    assert v100.small_decode.third / a100.small_decode.third == pytest.approx(2039 / 900)
    assert not v100.ranges
