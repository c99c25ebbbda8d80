"""Links in simulated time: occupancy and propagation, policies, and pipelines between them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.traffic import Chunk, LinkView, TrafficClass, WaitingMessage
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, ConstantCostModel, CostModel, TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop
from gllm.sim.joint_link import KV_CHUNK_BYTES, ActivationsFirstPolicy, JointLink, LinkShare
from gllm.sim.link import SimulatedLink, make_link
from gllm.sim.pipeline import PipelineLinks, SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY
from tests.support.sim.observers import CommitTimes, RecordedStages, TokenCounts
from tests.support.sim.requests import to_scheduler_requests

T = TypeVar("T")

STAGE_SECONDS = 0.005
DELAY = TransferCost(0.0, 0.030)


class DelayedCost(ConstantCostModel):
    """Constant stages between links that only delay."""

    def __init__(self, back: TransferCost) -> None:
        super().__init__(STAGE_SECONDS)
        self._back = back

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the delay."""
        return DELAY

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of the way back."""
        return self._back


@pytest.mark.parametrize(
    ("back", "round_trip_seconds"),
    [(NO_TRANSFER, 0.110), (DELAY, 0.140)],
    ids=["free way back", "30 ms back"],
)
def test_depth_hides_propagation(back: TransferCost, round_trip_seconds: float) -> None:
    """Micro-batches per second of 4 stages of 5 ms, 30 ms apart, by the number in flight.

    Depths 4, 8, 16 and 32 give 36, 73, 145 and 200 with a free way back, and 29, 57, 114 and 200
    with 30 ms back; a stage permits 200.
    """
    for depth in (4, 8, 16, 32):
        config = SchedulerConfig(
            policy="sarathi", max_in_flight=depth, max_num_batched_tokens=1, prefix_cache=False
        ).resolve(4, 10_000, 200)
        commits = CommitTimes()
        pipeline = SimulatedPipeline(config, DelayedCost(back), [commits])
        jobs = [WorkloadRequest(0.0, 1, 20)] * 64
        pipeline.submit_each(to_scheduler_requests(jobs))
        pipeline.loop.run()
        begin, end = 4 * depth, 24 * depth
        rate = (end - begin) / (commits.times[end] - commits.times[begin])
        assert rate == pytest.approx(min(depth / round_trip_seconds, 1 / STAGE_SECONDS), rel=0.01)


# Links alone.


class Wire:
    """A link with a policy, and what it delivers."""

    def __init__(self, policy: str = "serial") -> None:
        self.loop = EventLoop()
        self.link = make_link(self.loop, EVERY_LINK_POLICY.get(policy, policy))
        self.arrivals: list[tuple[str, float]] = []

    def send_at(
        self,
        time: float,
        name: str,
        traffic_class: TrafficClass,
        cost: TransferCost,
        owner: object = None,
    ) -> None:
        """Send a message at a time."""
        message = name, traffic_class, cost, owner
        self.loop.push(time, PIPELINE, self._send, message)

    def _send(self, now: float, message: tuple[str, TrafficClass, TransferCost, object]) -> None:
        name, traffic_class, cost, owner = message
        self.link.send(traffic_class, cost, self._deliver, name, owner)

    def _deliver(self, now: float, name: str) -> None:
        self.arrivals.append((name, now))

    def run(self) -> list[tuple[str, float]]:
        """Run all events and return the deliveries in their order."""
        self.loop.run()
        assert self.link.num_waiting == 0
        return self.arrivals


def test_propagation_leaves_the_link_free() -> None:
    wire = Wire()
    for number in range(3):
        wire.send_at(0.0, str(number), TrafficClass.PREFILL, TransferCost(0.25, 2.0))
    wire.send_at(0.5, "late", TrafficClass.DECODE, TransferCost(0.125, 2.0))
    assert wire.run() == [("0", 2.25), ("1", 2.5), ("2", 2.75), ("late", 2.875)]


def test_decode_first_interrupts_at_the_end_of_a_chunk() -> None:
    """Chunks take 10 ms: decode overtakes prefill and prefill the KV cache, after a chunk each."""
    wire = Wire("fixed-chunk")
    wire.send_at(0.0, "kv", TrafficClass.KV_CACHE, TransferCost(10.0))
    wire.send_at(1.005, "prefill", TrafficClass.PREFILL, TransferCost(2.0))
    wire.send_at(2.015, "decode 0", TrafficClass.DECODE, TransferCost(0.1))
    wire.send_at(2.016, "decode 1", TrafficClass.DECODE, TransferCost(0.1))
    arrivals = dict(wire.run())
    assert list(arrivals) == ["decode 0", "decode 1", "prefill", "kv"]
    # Chunks end at 1.01 s, and at 2.02 s in the prefill, in which KV blocks have 6 turns of 30.
    assert arrivals == pytest.approx(
        {"decode 0": 2.12, "decode 1": 2.22, "prefill": 3.27, "kv": 12.2}, abs=1e-6
    )


def test_concurrent_gives_equal_shares() -> None:
    """A message among n has an n-th of the link, as under processor sharing."""
    wire = Wire("concurrent")
    wire.send_at(0.0, "long", TrafficClass.PREFILL, TransferCost(10.0))
    wire.send_at(1.0, "short", TrafficClass.DECODE, TransferCost(1.0))
    wire.send_at(1.0, "middle", TrafficClass.KV_CACHE, TransferCost(3.0))
    arrivals = dict(wire.run())
    # Three shares until the short one ends at 4 s, two until the middle one at 8 s.
    assert arrivals == pytest.approx({"short": 4.0, "middle": 8.0, "long": 14.0}, abs=4e-2)


@settings(max_examples=num_examples(60, 400), deadline=None, database=None)
@given(
    policy=st.sampled_from(sorted(EVERY_LINK_POLICY)),
    messages=st.lists(
        st.tuples(
            st.floats(0, 0.05),
            st.sampled_from(TrafficClass),
            st.floats(0, 0.02),
            st.sampled_from([0.0, 0.03]),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_every_policy_delivers_each_message_once_and_never_idles(
    policy: str, messages: list[tuple[float, TrafficClass, float, float]]
) -> None:
    """The last message leaves a link when any work-conserving link would send it."""
    wire = Wire(policy)
    for number, (time, traffic_class, occupancy, delay) in enumerate(messages):
        wire.send_at(time, str(number), traffic_class, TransferCost(occupancy, delay))
    arrivals = dict(wire.run())
    assert len(arrivals) == len(wire.arrivals) == len(messages)
    free_time = 0.0
    for time, _, occupancy, _ in sorted(messages):
        free_time = max(free_time, time) + occupancy
    sent = {name: time - messages[int(name)][3] for name, time in arrivals.items()}
    assert max(sent.values()) == pytest.approx(free_time, abs=1e-6)
    for name, time in sent.items():
        assert time >= messages[int(name)][0] + messages[int(name)][2] - 1e-6


def test_a_sender_that_ends_frees_the_link() -> None:
    wire = Wire()
    dead, alive = object(), object()
    wire.send_at(0.0, "sent", TrafficClass.PREFILL, TransferCost(0.5, 1.0), dead)
    wire.send_at(0.0, "under way", TrafficClass.PREFILL, TransferCost(10.0), dead)
    wire.send_at(0.0, "waits", TrafficClass.PREFILL, TransferCost(10.0), dead)
    wire.send_at(0.0, "other", TrafficClass.PREFILL, TransferCost(0.25), alive)
    wire.loop.push(0.75, PIPELINE, lambda now, owner: wire.link.drop(owner), dead)
    assert wire.run() == [("other", 1.0), ("sent", 1.5)]


def test_an_unknown_policy_and_a_chunk_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match="link policy 'lifo' is none of serial, molink"):
        make_link(EventLoop(), "lifo")

    class Wrong:
        uses_slack = False
        sends_whole = False

        def __init__(self, num_bytes: int) -> None:
            self._num_bytes = num_bytes

        def select(self, waiting: Sequence[WaitingMessage], view: LinkView) -> Chunk:
            return Chunk(0, self._num_bytes)

    for num_bytes in (0, 101):
        link = SimulatedLink(EventLoop(), Wrong(num_bytes))
        cost = TransferCost(1.0, num_bytes=100)
        with pytest.raises(ValueError, match=f"selected {num_bytes} bytes .* select 1 to 100"):
            link.send(TrafficClass.DECODE, cost, lambda now, argument: None, None)


# Pipelines between links.


class PlanCost(ConstantCostModel):
    """Constant stages that wait for their plans and return results over a link."""

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return a delay that grows with the stage; the first one is beside the driver."""
        return TransferCost(0.0, 1.0 * stage)

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of a slow link."""
        return TransferCost(0.5, 0.25)


def run_jobs(
    cost: CostModel, stages: int, jobs: list[WorkloadRequest], **options: Any
) -> tuple[list[float], RecordedStages]:
    """Simulate; return the commit times and the stages' times."""
    links = options.pop("links", None)
    config = SchedulerConfig(policy="sarathi", prefix_cache=False, **options)
    commits, stage_times = CommitTimes(), RecordedStages()
    pipeline = SimulatedPipeline(
        config.resolve(stages, 1000, 200), cost, [commits, stage_times], links=links
    )
    pipeline.submit_each(to_scheduler_requests(jobs))
    pipeline.loop.run()
    return commits.times, stage_times


def test_a_stage_waits_for_activations_and_plan() -> None:
    commits, stages = run_jobs(PlanCost(0.25), 3, [WorkloadRequest(0.0, 4, 1)])
    # The plan is later than the activations on the second stage and on the third.
    assert stages.times == {(0, 0): (0.0, 0.25), (1, 0): (1.0, 1.25), (2, 0): (2.0, 2.25)}
    assert commits == [2.25 + 0.5 + 0.25]
    _, stages = run_jobs(PlanCost(4.0), 3, [WorkloadRequest(0.0, 4, 1)])
    assert [start for start, _ in stages.times.values()] == [0.0, 4.0, 8.0]


def test_results_occupy_their_link_one_after_another() -> None:
    jobs = [WorkloadRequest(0.0, 64, 1)]
    commits, stages = run_jobs(
        PlanCost(0.125), 1, jobs, max_num_batched_tokens=16, max_in_flight=4, async_scheduling=False
    )
    assert [end for _, end in stages.times.values()] == [0.125, 0.25, 0.375, 0.5]
    assert commits == [0.125 + 0.5 * (number + 1) + 0.25 for number in range(4)]


class MixedCost(ConstantCostModel):
    """Prefill chunks that occupy a link for long, and decodes that do not."""

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return a cost in proportion to the tokens."""
        return TransferCost(0.01 * work.num_tokens)


@pytest.mark.parametrize("policy", sorted(EVERY_LINK_POLICY))
def test_steps_stay_in_order_on_a_shared_link_under_every_policy(policy: str) -> None:
    """One network card carries all edges: messages overtake each other, steps do not."""
    loop = EventLoop()
    card = make_link(loop, EVERY_LINK_POLICY[policy])
    config = SchedulerConfig(
        policy="sarathi", max_num_batched_tokens=32, max_in_flight=6, phase_pure=True
    ).resolve(3, 1000, 200)
    stages = RecordedStages()
    commits = CommitTimes()
    jobs = [WorkloadRequest(0.1 * number, 60, 12) for number in range(8)]
    links = PipelineLinks([card, card], [card] * 3, card)
    pipeline = SimulatedPipeline(config, MixedCost(0.05), [stages, commits], loop=loop, links=links)
    pipeline.submit_each(to_scheduler_requests(jobs))
    loop.run()
    assert pipeline.scheduler.stats().unfinished == 0
    for stage in range(3):
        steps = [step for each, step in stages.times if each == stage]
        assert steps == list(range(len(commits.times)))
    assert commits.times == sorted(commits.times)


class CountingLoop(EventLoop):
    """Event loop that counts its events."""

    def __init__(self) -> None:
        super().__init__()
        self.num_events = 0

    def push(self, time: float, rank: int, handle: Callable[[float, T], None], argument: T) -> None:
        """Count an event and add it."""
        self.num_events += 1
        super().push(time, rank, handle, argument)


def test_events_of_a_micro_batch() -> None:
    """One per message and stage, and the driver's turn: their cost is that of short steps."""
    loop = CountingLoop()
    config = SchedulerConfig(policy="sarathi").resolve(3, 1000, 200)
    commits = CommitTimes()
    pipeline = SimulatedPipeline(config, PlanCost(0.25), [commits], loop=loop)
    pipeline.submit_each(to_scheduler_requests([WorkloadRequest(0.0, 4, 100)]))
    loop.run()
    assert len(commits.times) == 100
    # Two plans, three stages, a result and a turn; the activations cost nothing here.
    assert loop.num_events == pytest.approx(7 * 100, abs=5)


# The end of an epoch.


def test_stop_returns_the_unfinished_requests_and_drops_what_follows() -> None:
    """A second pipeline continues the requests; each token is generated once."""
    loop = EventLoop()
    config = SchedulerConfig(block_size=4).resolve(2, 60, 100)
    card = make_link(loop)
    jobs = [WorkloadRequest(0.25 * number, 20, 10 + number) for number in range(8)]
    outputs, after = TokenCounts(), TokenCounts()
    commits = CommitTimes()
    links = PipelineLinks([card], [card, card], card)
    first = SimulatedPipeline(config, MixedCost(0.125), [outputs, commits], loop=loop, links=links)
    first.submit_each(to_scheduler_requests(jobs))
    loop.run(until=4.0)
    assert card.num_waiting or any(outputs.counts.values())
    resumed = first.stop(4.0)
    assert card.num_waiting == 0
    assert 0 < len(resumed) < len(jobs)
    for request in resumed:
        assert request.age_seconds == pytest.approx(4.0 - jobs[request.seq].arrival_seconds)
        assert sum(map(len, request.outputs)) == outputs.counts[request.seq]
    assert any(request.outputs for request in resumed)
    with pytest.raises(ValueError, match="has been stopped"):
        first.submit(resumed[0], 4.0)

    second = SimulatedPipeline(config, MixedCost(0.125), [after], loop=loop, links=links)
    for request in resumed:
        second.submit(request, 4.0)
    loop.run()
    assert max(commits.times) <= 4.0
    for seq, job in enumerate(jobs):
        assert outputs.counts[seq] + after.counts[seq] == job.num_output_tokens
    assert second.scheduler.kv_cache.block_pool.num_free_blocks == 60


def test_stop_resumes_the_living_choices_of_a_request() -> None:
    config = SchedulerConfig(block_size=4).resolve(1, 60, 100)
    pipeline = SimulatedPipeline(config, ConstantCostModel(0.125))
    prompt = list(range(8))
    pipeline.submit(SchedulerRequest(3, prompt, 20, n=3, age_seconds=1.0), 0.0)
    pipeline.loop.run(until=1.0)
    pipeline.abort([4], 1.0)
    (resumed,) = pipeline.stop(1.0)
    assert (resumed.seq, resumed.n, resumed.age_seconds) == (3, 2, 2.0)
    assert len(resumed.outputs) == 2
    assert all(0 < len(output) < 20 for output in resumed.outputs)
    waiting = SimulatedPipeline(config, ConstantCostModel(0.125))
    waiting.submit(resumed, 5.0)
    waiting.submit(SchedulerRequest(9, prompt, 20, n=3, age_seconds=1.0), 5.0)
    # Choices that wait for their first one to compute the prompt are alive as well.
    assert waiting.stop(6.0) == [
        SchedulerRequest(3, prompt, 20, n=2, outputs=resumed.outputs, age_seconds=3.0),
        SchedulerRequest(9, prompt, 20, n=3, age_seconds=2.0),
    ]


def test_links_that_do_not_fit_the_stages_are_refused() -> None:
    links = make_pipeline_links(EventLoop(), 2)
    config = SchedulerConfig().resolve(3, 10, 16)
    with pytest.raises(ValueError, match="1 activation links and 2 plan links, but 3 stages need"):
        SimulatedPipeline(config, ConstantCostModel(1.0), links=links)


def test_joint_message_arrives_when_the_last_link_has_sent_its_part() -> None:
    loop = EventLoop()
    up, down, other = (SimulatedLink(loop, ActivationsFirstPolicy()) for _ in range(3))
    arrivals: list[tuple[str, float]] = []

    def deliver(now: float, name: str) -> None:
        arrivals.append((name, now))

    path = JointLink(loop, [LinkShare(up, 1.0, 100.0), LinkShare(down, 0.5, 100.0)])
    later = JointLink(loop, [LinkShare(other, 1.0, 100.0), LinkShare(down, 1.0, 100.0)])
    cost = TransferCost(1.0, 0.25, 100)
    path.send(TrafficClass.KV_CACHE, cost, deliver, "first")
    later.send(TrafficClass.KV_CACHE, cost, deliver, "second")
    later.send(TrafficClass.KV_CACHE, cost, deliver, "dropped", owner=loop)
    later.drop(loop)
    assert (path.num_waiting, later.num_waiting) == (2, 2)
    loop.run()
    # The second one waits for the half of the first one on the common link.
    assert arrivals == [("first", 1.25), ("second", 1.75)]


def test_activations_do_not_wait_for_kv_blocks_of_a_shared_link() -> None:
    loop = EventLoop()
    link = SimulatedLink(loop, ActivationsFirstPolicy())
    arrivals: dict[str, float] = {}
    rate = float(KV_CHUNK_BYTES)
    for name, traffic_class, num_bytes in (
        ("kv", TrafficClass.KV_CACHE, 100 * KV_CHUNK_BYTES),
        ("decode", TrafficClass.DECODE, KV_CHUNK_BYTES),
    ):
        cost = TransferCost(num_bytes / rate, 0.0, num_bytes)
        link.send(traffic_class, cost, lambda now, name: arrivals.update({name: now}), name)
    loop.run()
    assert arrivals == {"decode": pytest.approx(2.0), "kv": pytest.approx(101.0)}
