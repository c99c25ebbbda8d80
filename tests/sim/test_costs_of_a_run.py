"""Operations of a simulation, counted: calls, events and objects, which no busy machine changes."""

import gc

import pytest

from gllm.sim.cluster.cluster import SimulatedCluster, simulate_cluster
from gllm.sim.cluster.generation import EngineGeneration
from gllm.sim.cluster.router import make_router
from gllm.sim.costs.roofline import LayerRoofline
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, iterate_scheduler_requests, make_workload
from tests.support.work import count_all_calls

MAX_CALLS_PER_ROW = 25
"""Python functions called per output token, with the events of its share of a micro-batch."""
MAX_EVENTS_PER_BATCH = 15
"""Events per micro-batch on four stages."""
MAX_SNAPSHOTS_PER_ARRIVAL = 2.5
"""Snapshots made per arrival at eight engines: of the one that got the last request, and of those
whose requests have ended."""
MAX_EXTRA_OBJECTS = 10
"""Objects that garbage collection visits, by which records of runs of different lengths differ."""


def deployment() -> Deployment:
    return roofline_deployment("qwen2.5-32b", "L20", 4, 4096)


def decodes(count: int) -> list[WorkloadRequest]:
    """Requests that decode together nearly all the time."""
    return make_workload("uniform:20,60,50,60", count, arrivals="static")


def test_calls_per_decode_row_do_not_grow_with_engines() -> None:
    calls_per_row = []
    for num_engines in (1, 4):
        engines = {f"engine-{index}": deployment() for index in range(num_engines)}
        # The same arrivals at each engine.
        jobs = [job for job in decodes(64) for _ in range(num_engines)]
        router = make_router("round-robin", 0)
        num_calls = count_all_calls(lambda: simulate_cluster(engines, jobs, router)).total()  # noqa: B023
        calls_per_row.append(num_calls / sum(job.num_output_tokens for job in jobs))
    assert calls_per_row[0] < MAX_CALLS_PER_ROW
    assert calls_per_row[1] < 1.05 * calls_per_row[0]


def test_engines_that_share_a_cost_model_predict_each_micro_batch_once() -> None:
    """The stages share a prediction, whatever other engines predict in between."""
    shared = roofline_deployment("qwen2.5-14b", "L20", 4, 4096)
    jobs = make_workload("uniform:200,900,20,60", 40, 16.0)
    pool = {f"e{number}": shared for number in range(8)}
    cluster = SimulatedCluster(make_router("least-requests", 0))
    for name, engine in pool.items():
        cluster.add_engine(name, engine)
    cluster.submit_each(jobs)
    num_predictions = count_all_calls(cluster.run)[LayerRoofline.seconds.__code__]
    engines = cluster.run().engines.values()
    num_batches = sum(len(each.record.micro_batches) for each in engines)
    assert num_batches <= num_predictions <= 1.2 * num_batches


@pytest.mark.full
def test_snapshots_of_request_counts_are_made_when_the_count_has_changed() -> None:
    jobs = make_workload("uniform:200,900,20,60", 80, 16.0)
    engines = {f"engine-{index}": deployment() for index in range(8)}
    router = make_router("least-requests", 0)
    counts = count_all_calls(lambda: simulate_cluster(engines, jobs, router))
    num_snapshots = counts[EngineGeneration.snapshot.__code__]
    assert len(jobs) < num_snapshots < MAX_SNAPSHOTS_PER_ARRIVAL * len(jobs)


def test_events_per_micro_batch() -> None:
    runs: list[RunRecord] = []
    counts = count_all_calls(lambda: runs.append(simulate(deployment(), decodes(64))))
    num_events = counts[EventLoop.push.__code__]
    assert 8 < num_events / len(runs[0].micro_batches) < MAX_EVENTS_PER_BATCH


@pytest.mark.full
def test_a_record_has_no_object_per_micro_batch() -> None:
    simulate(deployment(), decodes(2))
    records, counts = [], []
    for output in (50, 100):
        jobs = make_workload(f"fixed:50,{output}", 16, arrivals="static")
        gc.collect()
        before = len(gc.get_objects())
        records.append(simulate(deployment(), jobs))
        gc.collect()
        counts.append(len(gc.get_objects()) - before)
    assert counts[1] < counts[0] + MAX_EXTRA_OBJECTS
    batches = [len(record.micro_batches) for record in records]
    assert batches[1] > batches[0] + 10 * MAX_EXTRA_OBJECTS


def test_prompts_take_no_memory_before_they_arrive() -> None:
    (_, request), *_ = iterate_scheduler_requests([WorkloadRequest(0.0, 1000, 1)])
    assert request.prompt_token_ids == range(1000)
