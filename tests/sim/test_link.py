"""Links in simulated time: occupancy and propagation, policies, and pipelines between them."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, CostModel, TransferCost
from gllm.sim.costs.constant import ConstantCostModel
from gllm.sim.costs.slowed import SlowedCostModel
from gllm.sim.event_loop import PIPELINE, EventLoop
from gllm.sim.link import LinkBurst, LinkMessage, MessageClass, SimulatedLink
from gllm.sim.link_policies import LINK_POLICIES, make_link
from gllm.sim.pipeline import PipelineLinks, SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest, to_scheduler_requests
from tests.examples import num_examples
from tests.sim.observers import CommitTimes, RecordedStages, TokenCounts

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
        self.link = make_link(self.loop, policy)
        self.arrivals: list[tuple[str, float]] = []

    def send_at(
        self,
        time: float,
        name: str,
        message_class: MessageClass,
        cost: TransferCost,
        owner: object = None,
    ) -> None:
        """Send a message at a time."""
        message = name, message_class, cost, owner
        self.loop.push(time, PIPELINE, self._send, message)

    def _send(self, now: float, message: tuple[str, MessageClass, TransferCost, object]) -> None:
        name, message_class, cost, owner = message
        self.link.send(message_class, cost, self._deliver, name, owner)

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
        wire.send_at(0.0, str(number), MessageClass.PREFILL, TransferCost(0.25, 2.0))
    wire.send_at(0.5, "late", MessageClass.DECODE, TransferCost(0.125, 2.0))
    assert wire.run() == [("0", 2.25), ("1", 2.5), ("2", 2.75), ("late", 2.875)]


def test_priority_interrupts_at_the_end_of_a_chunk() -> None:
    """Chunks take 1 ms: decode overtakes prefill and prefill the KV cache, each after its chunk."""
    wire = Wire("priority")
    wire.send_at(0.0, "kv", MessageClass.KV_CACHE, TransferCost(1.0))
    wire.send_at(0.1005, "prefill", MessageClass.PREFILL, TransferCost(0.2))
    wire.send_at(0.2015, "decode 0", MessageClass.DECODE, TransferCost(0.01))
    wire.send_at(0.2016, "decode 1", MessageClass.DECODE, TransferCost(0.01))
    arrivals = dict(wire.run())
    assert list(arrivals) == ["decode 0", "decode 1", "prefill", "kv"]
    # Chunks end at 0.101 s, and at 0.202 s in the prefill.
    assert arrivals == pytest.approx(
        {"decode 0": 0.212, "decode 1": 0.222, "prefill": 0.321, "kv": 1.22}, abs=1e-6
    )


def test_fair_gives_equal_shares() -> None:
    """A message among n has an n-th of the link, as under processor sharing."""
    wire = Wire("fair")
    wire.send_at(0.0, "long", MessageClass.PREFILL, TransferCost(1.0))
    wire.send_at(0.1, "short", MessageClass.DECODE, TransferCost(0.1))
    wire.send_at(0.1, "middle", MessageClass.KV_CACHE, TransferCost(0.3))
    arrivals = dict(wire.run())
    # Three shares until the short one ends at 0.4 s, two until the middle one at 0.8 s.
    assert arrivals == pytest.approx({"short": 0.4, "middle": 0.8, "long": 1.4}, abs=4e-3)


@settings(max_examples=num_examples(60, 400), deadline=None, database=None)
@given(
    policy=st.sampled_from(sorted(LINK_POLICIES)),
    messages=st.lists(
        st.tuples(
            st.floats(0, 0.05),
            st.sampled_from(MessageClass),
            st.floats(0, 0.02),
            st.sampled_from([0.0, 0.03]),
        ),
        min_size=1,
        max_size=12,
    ),
)
def test_every_policy_delivers_each_message_once_and_never_idles(
    policy: str, messages: list[tuple[float, MessageClass, float, float]]
) -> None:
    """The last message leaves a link when any work-conserving link would send it."""
    wire = Wire(policy)
    for number, (time, message_class, occupancy, delay) in enumerate(messages):
        wire.send_at(time, str(number), message_class, TransferCost(occupancy, delay))
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
    wire.send_at(0.0, "sent", MessageClass.PREFILL, TransferCost(0.5, 1.0), dead)
    wire.send_at(0.0, "under way", MessageClass.PREFILL, TransferCost(10.0), dead)
    wire.send_at(0.0, "waits", MessageClass.PREFILL, TransferCost(10.0), dead)
    wire.send_at(0.0, "other", MessageClass.PREFILL, TransferCost(0.25), alive)
    wire.loop.push(0.75, PIPELINE, lambda now, owner: wire.link.drop(owner), dead)
    assert wire.run() == [("other", 1.0), ("sent", 1.5)]


def test_an_unknown_policy_and_an_empty_burst_are_refused() -> None:
    with pytest.raises(ValueError, match="link policy 'lifo' is none of serial, priority, fair"):
        make_link(EventLoop(), "lifo")

    class Stuck:
        def select(self, waiting: Sequence[LinkMessage], now: float) -> LinkBurst:
            return LinkBurst(0, 0.0)

    link = SimulatedLink(EventLoop(), Stuck())
    with pytest.raises(ValueError, match="select more than 0 s"):
        link.send(MessageClass.DECODE, TransferCost(1.0), lambda now, argument: None, None)


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


@pytest.mark.parametrize("policy", sorted(LINK_POLICIES))
def test_steps_stay_in_order_on_a_shared_link_under_every_policy(policy: str) -> None:
    """One network card carries all edges: messages overtake each other, steps do not."""
    loop = EventLoop()
    card = make_link(loop, policy)
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


# Stages that change their speed.


@pytest.mark.parametrize(
    ("now", "seconds"),
    [
        (0.0, 2.0),
        (2.0, 2.0),
        # One second of three is slow.
        (3.0, 1.0 + 3.0),
        (4.0, 6.0),
        # The period ends when 4/3 of the 2 seconds are done.
        (6.0, 4.0 + 2.0 - 4.0 / 3),
        (10.0, 2.0),
    ],
)
def test_a_stage_is_slow_for_the_part_of_a_step_in_the_period(now: float, seconds: float) -> None:
    cost = SlowedCostModel(ConstantCostModel(2.0), 1, 3.0, 4.0, 10.0)
    work = StageWork(0, 1, (), 1, 1, 1)
    assert cost.stage_seconds(1, work, now) == pytest.approx(seconds)
    assert cost.stage_seconds(0, work, now) == 2.0
    # The whole period, of 1 s, is within the step.
    short = SlowedCostModel(ConstantCostModel(2.0), 1, 3.0, now + 0.5, now + 1.5)
    assert short.stage_seconds(1, work, now) == pytest.approx(2.0 + 1.0 - 1.0 / 3)


def test_a_pipeline_asks_for_costs_at_the_time_of_each_step() -> None:
    cost = SlowedCostModel(ConstantCostModel(0.25), 1, 2.0, 1.0, 2.0)
    _, stages = run_jobs(cost, 2, [WorkloadRequest(0.0, 4, 9)])
    lengths = {start: end - start for (stage, _), (start, end) in stages.times.items() if stage}
    assert lengths[0.25] == lengths[0.75] == lengths[2.0] == 0.25
    assert lengths[1.25] == 0.5
    for slow in ({"factor": 0.0}, {"factor": 2.0, "begin_seconds": 3.0, "end_seconds": 3.0}):
        with pytest.raises(ValueError, match=r"factor is 0|begin_seconds has to be less"):
            SlowedCostModel(ConstantCostModel(0.25), 0, **slow)


# The end of a generation.


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
    request = SchedulerRequest(3, list(range(8)), 20, n=3, age_seconds=1.0)
    pipeline.submit(request, 0.0)
    pipeline.loop.run(until=1.0)
    pipeline.abort([4], 1.0)
    (resumed,) = pipeline.stop(1.0)
    assert (resumed.seq, resumed.n, resumed.age_seconds) == (3, 2, 2.0)
    assert len(resumed.outputs) == 2
    assert all(0 < len(output) < 20 for output in resumed.outputs)
    waiting = SimulatedPipeline(config, ConstantCostModel(0.125))
    waiting.submit(resumed, 5.0)
    waiting.submit(request._replace(seq=9), 5.0)
    # Choices that wait for their first one to compute the prompt are alive as well.
    assert waiting.stop(6.0) == [
        resumed._replace(age_seconds=3.0), request._replace(seq=9, age_seconds=2.0)
    ]  # fmt: skip


def test_links_that_do_not_fit_the_stages_are_refused() -> None:
    links = make_pipeline_links(EventLoop(), 2)
    config = SchedulerConfig().resolve(3, 10, 16)
    with pytest.raises(ValueError, match="1 activation links and 2 plan links, but 3 stages need"):
        SimulatedPipeline(config, ConstantCostModel(1.0), links=links)
