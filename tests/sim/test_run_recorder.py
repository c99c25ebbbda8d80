"""Records of simulated runs: as those that are read from the run's log."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.step_log import AddEvent, StartEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.metrics.run_recorder import RunRecorder
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.support.examples import num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY

LONGEST = 96
"""Tokens of a sequence at most."""
BLOCK_SIZE = 4


def start_of(config: SchedulerConfig) -> StartEvent:
    return StartEvent(0.0, "made up", [1] * config.stages, config, "simulator")


def without_kv_usage(batches: Any) -> list[MicroBatch]:
    return [replace(batch, kv_usage=None) for batch in batches]


def assert_equal(recorded: RunRecord, read: RunRecord) -> None:
    """Assert that two records of one run have the same figures."""
    assert recorded.requests == read.requests
    assert without_kv_usage(recorded.micro_batches) == read.micro_batches
    assert recorded.parallelism == read.parallelism
    assert (recorded.begin, recorded.end) == (read.begin, read.end)
    assert list(recorded.iterate_intervals()) == list(read.iterate_intervals())
    assert recorded.stage_usages() == read.stage_usages()
    if read.end > read.begin:  # Otherwise rates are not numbers.
        figures = summarize_run(recorded, 1.0, 0.5)
        assert figures.pop("kv_usage")["max"] > 0, "a log does not have it"
        assert figures == summarize_run(read, 1.0, 0.5)


requests = st.lists(
    st.tuples(
        st.floats(0, 20).map(lambda time: round(time, 3)),
        st.integers(1, 60),
        st.integers(1, 36),
        st.sampled_from([1, 1, 1, 3]),
        st.sampled_from([0, 0, 1]),
        st.booleans(),
    ),
    min_size=1,
    max_size=20,
)
"""(arrival, prompt, output, choices, priority, shares the prompt with others)."""


@settings(max_examples=num_examples(15, 1000), deadline=None)
@given(
    requests,
    st.sampled_from([name for name in EVERY_POLICY if name != "auto"]),
    st.integers(1, 4),
    st.integers(LONGEST // BLOCK_SIZE, 60),
    st.booleans(),
    st.lists(st.tuples(st.floats(0, 40), st.integers(0, 30)), max_size=4),
)
def test_a_record_is_that_of_the_log(
    requests: list[tuple[float, int, int, int, int, bool]],
    policy: str,
    stages: int,
    blocks: int,
    runs_ahead: bool,
    aborts: list[tuple[float, int]],
) -> None:
    options = SchedulerConfig(
        policy=policy, block_size=BLOCK_SIZE, async_scheduling=runs_ahead and stages == 1
    )
    config = options.resolve(stages, blocks, LONGEST)
    start = start_of(config)
    recorder, events = RunRecorder(start), list[StepLogEvent]([start])
    pipeline = SimulatedPipeline(config, ConstantCostModel(0.1, 0.02), [recorder], events.append)
    arrivals, seq = [], 0
    for time, prompt, output, n, priority, is_shared in sorted(requests):
        first = 0 if is_shared else 1000 * (seq + 1)
        tokens = range(first, first + prompt)
        arrivals.append((time, SchedulerRequest(seq, tokens, output, priority=priority, n=n)))
        seq += n
    pipeline.submit_each(arrivals)
    for time, aborted in aborts:
        pipeline.abort_at(time, [aborted])
    pipeline.loop.run()
    assert_equal(recorder.record, build_run_record(events))


def test_times_and_cache_of_preempted_sequences() -> None:
    """Two sequences of 8 + 24 tokens do not fit in 12 blocks of 4: the later one waits twice."""
    config = SchedulerConfig(
        policy="sarathi", block_size=4, expected_output_tokens=0, prefix_cache=False
    ).resolve(1, 12, 48)
    recorder = RunRecorder(start_of(config))
    pipeline = SimulatedPipeline(config, ConstantCostModel(1.0), [recorder])
    prompts = (range(8), range(100, 108))
    pipeline.submit_each((0.0, SchedulerRequest(seq, prompts[seq], 25)) for seq in range(2))
    pipeline.loop.run()
    run = recorder.record
    first, second = run.requests[0], run.requests[1]
    assert (first.first_scheduled_time, second.first_scheduled_time) == (0.0, 0.0)
    assert (first.num_preemptions, first.preempted_seconds) == (0, 0.0)
    assert second.num_preemptions == 1
    gaps = second.line.itl
    # The step that prefills it again takes one second itself.
    assert second.preempted_seconds == pytest.approx(max(gaps) - 1)
    usages = [batch.kv_usage for batch in run.micro_batches]
    assert usages[0] == pytest.approx(4 / 12)
    assert max(filter(None, usages)) == pytest.approx(1)
    assert len(run.micro_batches) == len(run.micro_batches[:]) > 0
    assert run.micro_batches[-1] == run.micro_batches[len(run.micro_batches) - 1]
    with pytest.raises(IndexError):
        run.micro_batches[len(run.micro_batches)]


def test_a_resumed_request_has_the_output_of_before() -> None:
    config = SchedulerConfig(block_size=4).resolve(2, 50, LONGEST)
    recorder = RunRecorder(start_of(config))
    pipeline = SimulatedPipeline(config, ConstantCostModel(1.0), [recorder])
    request = SchedulerRequest(3, [1, 2, 3], 6, outputs=[[5, 5]], age_seconds=2.5)
    pipeline.submit_each([(4.0, request)])
    pipeline.loop.run()
    served = recorder.record.requests[3]
    assert served.line.arrival == 1.5
    assert served.line.num_tokens == 6
    assert served.line.times[0] == 4.0
    assert len(served.line.times) == 5


def test_simulate_writes_a_log_only_if_required() -> None:
    config = SchedulerConfig(block_size=4).resolve(2, 50, LONGEST)
    deployment = Deployment("made up", [1, 1], ConstantCostModel(0.1), config)
    jobs = make_workload("uniform:4,40,2,24", 20, 3.0)
    events: list[StepLogEvent] = []
    logged, plain = simulate(deployment, jobs, events.append), simulate(deployment, jobs)
    assert_equal(plain, build_run_record(events))
    assert logged.requests == plain.requests
    assert sum(isinstance(event, AddEvent) for event in events) == len(jobs)


def test_a_preempted_prompt_loses_the_time_since_its_last_chunk() -> None:
    """Chunks of 4 tokens each 1 s; the second request has all blocks from 2 s on."""
    config = SchedulerConfig(policy="sarathi", max_num_batched_tokens=4, block_size=4)
    deployment = Deployment("made up", [1], ConstantCostModel(1.0), config.resolve(1, 5, 20))
    jobs = [WorkloadRequest(0.0, 16, 2, priority=1), WorkloadRequest(1.5, 16, 1)]
    events: list[StepLogEvent] = []
    record = simulate(deployment, jobs, events.append)
    preempted = record.requests[0]
    assert preempted.num_preemptions == 1
    assert preempted.first_scheduled_time == 0.0
    assert preempted.preempted_seconds == 4.0
    assert_equal(record, build_run_record(events))
