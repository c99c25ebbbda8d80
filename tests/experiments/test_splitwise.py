"""Splitwise's mixed pool in simulation: a cluster sized for code serves conversations (S12)."""

import pytest

from experiments.splitwise_full import FullRow, full_size_claims
from experiments.splitwise_mixed import serves_point
from experiments.splitwise_phases import next_turn_table
from gllm.plan.pools.clusters import ClusterPoint, SampleSize
from gllm.sim.hardware.machines import ClusterDesign, machine_pair, read_machine_types

SIZE = SampleSize(150, seconds=0)


def are_slos_met(num_token: int, rate: float, seed: int, has_mixed_pool: bool = True) -> bool:
    """Return True if eight DGX-H100s serve conversations at a rate within all nine SLOs."""
    design = ClusterDesign(*machine_pair("HH"), 8 - num_token, num_token)
    point = ClusterPoint(design, "conversation", rate, SIZE, seed=seed)
    return serves_point(point, has_mixed_pool)


@pytest.mark.full
@pytest.mark.parametrize(
    ("seed", "rate", "share"),
    [
        pytest.param(0, 35.75, 0.942, marks=pytest.mark.long),
        (1, 39.83, 0.95),
        pytest.param(2, 39.83, 0.95, marks=pytest.mark.long),
    ],
)
def test_a_cluster_sized_for_code_serves_conversations(
    seed: int, rate: float, share: float
) -> None:
    """Eight machines serve a share of a rate that is too high for every better split of them.

    So the mixed pool loses at most 5 % for two of three seeds, and 5.8 % for the other one, where
    the limit is the second slowest of 150 requests. Without it, half the rate is too high.
    """
    for num_token in (2, 3, 4):
        assert not are_slos_met(num_token, rate, seed)
    assert are_slos_met(1, share * rate, seed)
    assert not are_slos_met(1, 0.45 * rate, seed, has_mixed_pool=False)


def test_a_cache_that_is_sent_back_saves_the_prompt() -> None:
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in next_turn_table().splitlines()[2:]
    ]
    gains = {
        (machine, tokens): float(gain.removesuffix(" x")) for machine, tokens, *_, gain in rows
    }
    assert min(gains.values()) > 1
    for machine in {machine for machine, _ in gains}:
        by_length = [gains[machine, tokens] for tokens in ("512", "1,500", "4,096")]
        assert by_length == sorted(by_length)


def test_claims_at_full_size_are_changes_beside_the_baselines() -> None:
    def row(constraint: str, name: str, num_prompt: int, num_token: int, rate: float) -> FullRow:
        machine = read_machine_types()[f"DGX-{name[-4:]}"] if num_token == 0 else None
        pair = (machine, machine) if machine else machine_pair(name)
        return FullRow(constraint, name, ClusterDesign(*pair, num_prompt, num_token), rate, 1, 1)

    claims = full_size_claims(
        [
            row("power", "Baseline-A100", 70, 0, 40.0),
            row("power", "Baseline-H100", 40, 0, 50.0),
            row("power", "AA", 35, 35, 80.0),
            row("cost", "AA", 40, 46, 70.0),
            row("rate", "AA", 30, 35, 50.0),
        ]
    )
    # Changes of throughput, power, space and cost: 40 DGX-H100 cost 86.4 and take the power of 70.
    expected = {
        "power: throughput of AA beside Baseline-A100": 80 / 40 - 1,
        "cost: throughput of AA beside Baseline-H100": 70 / 50 - 1,
        "cost: power of AA": 86 / 70 - 1,
        "cost: space of AA": 86 / 40 - 1,
        "rate of Baseline-H100: cost of AA": 65 / 86.4 - 1,
    }
    assert {each.quantity.removeprefix("conversation, "): each.ours for each in claims} == {
        text: pytest.approx(change) for text, change in expected.items()
    }
