"""Virtual engines: schedulers that share the stages and links of one pipeline."""

from itertools import pairwise

import pytest

from experiments.virtual_engines import VirtualEngines
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY
from tests.support.sim.observers import CommitTimes, TokenCounts
from tests.support.sim.requests import to_scheduler_requests

RATE = 12.5e6
"""100 Mbit/s in bytes per second."""
TOKEN_BYTES = 28_672


class WeakLinkCost(ConstantCostModel):
    """Stages of 10 ms and links of 100 Mbit/s and 30 ms."""

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the activations."""
        size = TOKEN_BYTES * work.num_tokens
        return TransferCost(size / RATE, 0.03, size)


def make_config(**options: int) -> SchedulerConfig:
    config = SchedulerConfig(policy="vllm", prefix_cache=False, **options)  # type: ignore[arg-type]
    return config.resolve(3, 1000, 4096)


def test_each_engine_has_one_micro_batch_in_flight() -> None:
    """Two tokens of a sequence are a round of stages and delays apart, however many engines."""
    for num_engines in (1, 3, 8):
        commits = CommitTimes()
        engines = VirtualEngines(
            num_engines, make_config(max_in_flight=1), WeakLinkCost(0.01), [commits]
        )
        jobs = [WorkloadRequest(0.0, 1, 50)] * num_engines
        engines.submit_each(to_scheduler_requests(jobs))
        engines.loop.run()
        assert len(commits.times) == 50 * num_engines
        round_seconds = 3 * 0.01 + 2 * (0.03 + TOKEN_BYTES / RATE)
        per_token = [after - before for before, after in pairwise(commits.times[::num_engines])]
        assert per_token == pytest.approx([round_seconds] * len(per_token), abs=0.02)
        assert sum(per_token) / len(per_token) == pytest.approx(round_seconds, rel=0.02)


def test_requests_go_to_the_engine_with_the_fewest() -> None:
    counts = TokenCounts()
    engines = VirtualEngines(3, make_config(max_in_flight=1), WeakLinkCost(0.01), [counts])
    jobs = [WorkloadRequest(0.0, 1, 10)] * 7
    engines.submit_each(to_scheduler_requests(jobs))
    engines.loop.run(until=0.01)
    assert [each.scheduler.stats().unfinished for each in engines.pipelines] == [3, 2, 2]
    engines.loop.run()
    assert set(counts.counts.values()) == {10}
    assert len(counts.counts) == 7


def test_decode_passes_another_engines_prefill() -> None:
    """A prompt of 2,000 tokens takes 4.6 s on each link; decodes wait for whole ones or chunks."""
    gaps = {}
    for policy in EVERY_LINK_POLICY:
        commits = CommitTimes()
        engines = VirtualEngines(
            2,
            make_config(max_in_flight=1),
            WeakLinkCost(0.01),
            [commits],
            EVERY_LINK_POLICY[policy],
        )
        jobs = [WorkloadRequest(0.0, 1, 200), WorkloadRequest(1.0, 2000, 1)]
        engines.submit_each(to_scheduler_requests(jobs))
        engines.loop.run()
        gaps[policy] = max(after - before for before, after in pairwise(commits.times))
    assert gaps["molink"] <= gaps["fixed-chunk"] <= gaps["concurrent"] < 0.2
    assert gaps["serial"] > 4.5


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="num_engines is 0: give at least 1"):
        VirtualEngines(0, make_config(max_in_flight=1), WeakLinkCost(0.01))
    with pytest.raises(ValueError, match="max_in_flight is 3, but a virtual engine has one"):
        VirtualEngines(2, make_config(), WeakLinkCost(0.01))
