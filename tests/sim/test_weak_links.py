"""Simulated links hold the policies of gllm.pacing and tell them rate and slack."""

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import pytest

from experiments.link_policies.concurrent import TURN_BYTES
from experiments.link_policies.fixed_chunk import CHUNK_BYTES
from gllm.pacing.policies.molink import MIN_BYTES, MolinkPolicy
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import Chunk, LinkPolicy, LinkView, TrafficClass, WaitingMessage
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel, TransferCost
from gllm.sim.event_loop import EventLoop
from gllm.sim.link import SimulatedLink
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import PipelineLinks, SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY
from tests.support.sim.observers import CommitTimes, RecordedStages
from tests.support.sim.requests import to_scheduler_requests

STAGE_SECONDS = 0.010
RATE = 12.5e6
"""100 Mbit/s in bytes per second."""
DELAY_SECONDS = 0.030
TOKEN_BYTES = 14_336
PROMPT_TOKENS = 2048


class WeakLinkCost(ConstantCostModel):
    """Equal stages behind links of 100 Mbit/s and 30 ms."""

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the activations."""
        size = TOKEN_BYTES * work.num_tokens
        return TransferCost(size / RATE, DELAY_SECONDS, size)

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the delay of the sampled tokens."""
        return TransferCost(0.0, DELAY_SECONDS, 4)


class ObservedPolicy:
    """Policy that notes the views at its decisions."""

    def __init__(self, policy: LinkPolicy) -> None:
        self.uses_slack = policy.uses_slack
        self.sends_whole = False
        self.views: list[tuple[TrafficClass, LinkView]] = []
        self._policy = policy

    def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
        """Pass the decision on."""
        chunk = self._policy.select(waiting, view)
        self.views.append((waiting[chunk.position].traffic_class, view))
        return chunk


def run_beside_prefill(policy: LinkPolicy) -> tuple[ObservedPolicy, RecordedStages, list[float]]:
    """Run a stream of 200 tokens; a prompt of another engine takes 2.3 s on the same link.

    Returns:
        The policy of the link, the times of the stages, and the times of the stream's commits.
    """
    loop = EventLoop()
    observed = ObservedPolicy(policy)
    card = SimulatedLink(loop, observed)
    config = SchedulerConfig(policy="sarathi").resolve(2, 1000, 4096)
    stages, commits = RecordedStages(), CommitTimes()
    cost = WeakLinkCost(STAGE_SECONDS)
    observers: list[list[PipelineObserver]] = [[stages, commits], []]
    requests = (WorkloadRequest(0.0, 1, 200), WorkloadRequest(1.0, PROMPT_TOKENS, 1))
    for own, request in zip(observers, requests, strict=True):
        own_links = make_pipeline_links(loop, 2)
        links = PipelineLinks([card], own_links.plans, own_links.results)
        pipeline = SimulatedPipeline(config, cost, own, loop=loop, links=links)
        pipeline.submit_each(to_scheduler_requests([request]))
    loop.run()
    return observed, stages, commits.times


def test_link_tells_its_policy_rate_and_slack() -> None:
    """Beside a prefill on the link, the next decode is ready when the slack says."""
    observed, stages, _ = run_beside_prefill(MolinkPolicy())
    ends = sorted(end for (stage, _), (_, end) in stages.times.items() if stage == 0)
    views = [
        view for traffic_class, view in observed.views if traffic_class is TrafficClass.PREFILL
    ]
    assert len(views) > 50
    assert all(view.bytes_per_second == pytest.approx(RATE) for view in views)
    # The decode itself may wait for a smallest chunk on the link, which nobody knows beforehand.
    late = []
    for view in views:
        assert view.slack_seconds is not None
        next_end = min(end for end in ends if end > view.now - 1e-6)
        late.append(next_end - (view.now + view.slack_seconds))
    assert min(late) >= -1e-6
    assert max(late) <= MIN_BYTES / RATE + 1e-6
    assert median(late) < 1e-6


def test_decode_passes_a_prefill_without_waiting() -> None:
    """A token takes a round of two stages and two delays; a prefill adds a smallest chunk to it."""
    worst = {}
    for name in EVERY_LINK_POLICY:
        _, _, commits = run_beside_prefill(make_link_policy(EVERY_LINK_POLICY[name]))
        worst[name] = max(after - before for before, after in pairwise(commits))
    floor = 2 * STAGE_SECONDS + 2 * DELAY_SECONDS + TOKEN_BYTES / RATE
    assert worst["molink"] <= floor + MIN_BYTES / RATE + 1e-6
    assert worst["fixed-chunk"] <= floor + CHUNK_BYTES / RATE + 1e-6
    assert worst["concurrent"] <= floor + 2 * TURN_BYTES / RATE + 1e-6
    assert worst["serial"] > floor + 0.9 * PROMPT_TOKENS * TOKEN_BYTES / RATE


def test_policies_without_slack_are_not_told_any() -> None:
    observed, _, _ = run_beside_prefill(make_link_policy("serial"))
    assert {view.slack_seconds for _, view in observed.views} == {None}


@pytest.mark.parametrize("name", sorted(EVERY_LINK_POLICY))
def test_same_run_twice_is_identical(name: str) -> None:
    first, second = (
        run_beside_prefill(make_link_policy(EVERY_LINK_POLICY[name])) for _ in range(2)
    )
    assert first[0].views == second[0].views
    assert first[1].times == second[1].times
    assert first[2] == second[2]
