"""Hand-offs in a simulated cluster: order, back-pressure, failures, and no lost request."""

from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.disaggregation.policy_registry import PAIR_POLICIES, make_pair_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from gllm.scheduler.kv_transfers import SchedulerTransfers
from gllm.scheduler.output_lengths import LengthPredictor, PromptLengthPredictor
from gllm.sim.cluster.cluster import ClusterChange, EngineDrain, EngineFailure
from gllm.sim.cluster.handoffs import KvNetwork, LinkFailure
from gllm.sim.cluster.paired import RENEWAL_SECONDS, PairedRun, simulate_pairs
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples
from tests.support.work import count_all_calls

STEP = 0.05
"""Seconds of a micro-batch on its only stage."""
LATENCY = 0.01
BYTES_PER_TOKEN = 10
PROMPT, OUTPUT = 8, 4
JOB = WorkloadRequest(0.0, PROMPT, OUTPUT)
ROLES = {"P0": "prefill", "P1": "prefill", "D0": "decode", "D1": "decode"}


def make_engine(blocks: int = 40) -> Deployment:
    """Return an engine with blocks of four tokens."""
    config = SchedulerConfig(
        block_size=4, max_num_batched_tokens=16, policy="vllm", prefix_cache=False,
        async_scheduling=False,
    )  # fmt: skip
    cost = ConstantCostModel(STEP, 0.0)
    return Deployment("made up", [1], cost, config.resolve(1, blocks, 64))


def serve(
    jobs: list[WorkloadRequest],
    names: str = "P0 D0",
    changes: tuple[ClusterChange, ...] = (),
    link_failures: tuple[LinkFailure, ...] = (),
    blocks: int = 40,
    bandwidth: float = 1000.0,
    policy: str = "distserve",
    lengths: LengthPredictor | None = None,
) -> PairedRun:
    """Simulate jobs on engines whose names begin with their role."""
    engines = {name: make_engine(blocks) for name in names.split()}
    network = KvNetwork(NetworkLink(bandwidth, LATENCY), BYTES_PER_TOKEN)
    return simulate_pairs(
        engines,
        {name: ROLES[name] for name in engines},
        jobs,
        make_pair_policy(policy, Random(0)),
        network,
        changes,
        link_failures,
        lengths,
    )


def check_all_served(run: PairedRun, jobs: list[WorkloadRequest]) -> None:
    """Every token came once, in order of time, and no block is in use."""
    assert not run.cluster.unserved
    assert len(run.cluster.requests) == len(jobs)
    for index, served in run.cluster.requests.items():
        line = served.line
        assert line.num_tokens == len(line.times) == jobs[index].num_output_tokens
        assert line.times == sorted(line.times)
    for engine in run.cluster.engines.values():
        if engine.lives[-1].end_time is None:
            assert engine.stats.unfinished == 0
            assert engine.stats.held_blocks == engine.stats.fetching == 0
            assert engine.stats.kv_usage == 0


def test_times_of_one_handoff() -> None:
    run = serve([JOB])
    check_all_served(run, [JOB])
    record = run.handoffs[0]
    transfer = PROMPT * BYTES_PER_TOKEN / 1000 + LATENCY
    assert record.is_ok
    assert (record.prefill, record.decode, record.num_tokens) == ("P0", "D0", PROMPT)
    assert record.fetch_time == record.ready_time == pytest.approx(STEP)
    assert record.arrival_time == record.decode_time == pytest.approx(STEP + transfer)
    times = run.cluster.requests[0].line.times
    first = STEP + transfer + STEP
    assert times == pytest.approx([STEP, first, first + STEP, first + 2 * STEP])
    assert run.cluster.requests[0].num_resumptions == 0
    assert run.cluster.requests[0].max_tokens == OUTPUT


@pytest.mark.parametrize("changes", [(), (EngineFailure("D0", 0.12),)])
def test_the_predictor_learns_each_output_once(changes: tuple[ClusterChange, ...]) -> None:
    jobs = [WorkloadRequest(index * STEP, PROMPT, 1 + index) for index in range(9)]
    lengths = PromptLengthPredictor()
    run = serve(jobs, "P0 D0 D1", changes, blocks=400, lengths=lengths)
    check_all_served(run, jobs)
    (recorded,) = lengths.recent_lengths.values()
    assert sorted(recorded) == [job.num_output_tokens for job in jobs]


def test_decodes_begin_soon_after_their_kv_has_arrived() -> None:
    jobs = [WorkloadRequest(index * STEP, PROMPT, 20) for index in range(9)]
    run = serve(jobs, blocks=400)
    check_all_served(run, jobs)
    for index, record in run.handoffs.items():
        second_token = run.cluster.requests[index].line.times[1]
        assert record.arrival_time is not None
        assert record.decode_time is not None
        assert record.arrival_time <= record.decode_time <= second_token - STEP + 1e-9


def test_a_request_of_one_token_is_not_handed_over() -> None:
    jobs = [WorkloadRequest(0.0, PROMPT, 1)]
    run = serve(jobs)
    check_all_served(run, jobs)
    assert not run.handoffs


def test_a_full_decode_engine_holds_up_the_prefill_engine() -> None:
    """Blocks wait at the source, so that its prompts wait as well."""
    jobs = [WorkloadRequest(0.0, PROMPT, 30)] * 24
    run = serve(jobs, blocks=20)
    check_all_served(run, jobs)
    ready = sorted(record.ready_time for record in run.handoffs.values())
    wide = serve(jobs, blocks=400)
    check_all_served(wide, jobs)
    assert ready[-1] > 2 * max(record.ready_time for record in wide.handoffs.values())


def test_transfers_of_one_engine_share_its_link() -> None:
    jobs = [JOB] * 4
    run = serve(jobs, bandwidth=100.0)
    arrivals = sorted(record.arrival_time or 0.0 for record in run.handoffs.values())
    seconds = PROMPT * BYTES_PER_TOKEN / 100
    gaps = [after - before for before, after in pairwise(arrivals)]
    assert gaps == pytest.approx([seconds] * 3)


def test_leases_of_held_blocks_are_renewed_once_per_interval() -> None:
    """Transfers that take longer than a lease arrive."""
    jobs, runs = [JOB] * 3, list[PairedRun]()
    bandwidth = PROMPT * BYTES_PER_TOKEN / (2 * HOLD_LEASE_SECONDS)
    calls = count_all_calls(lambda: runs.append(serve(jobs, bandwidth=bandwidth)))
    check_all_served(runs[0], jobs)
    records = runs[0].handoffs.values()
    assert all(record.is_ok for record in records)
    held_seconds = sum((record.arrival_time or 0.0) - record.ready_time for record in records)
    assert held_seconds > 12 * HOLD_LEASE_SECONDS - 1
    num_renewals = calls[SchedulerTransfers.renew.__code__]
    assert num_renewals == pytest.approx(held_seconds / RENEWAL_SECONDS, abs=2 * len(jobs))


def test_a_broken_link_means_prefill_at_the_decode_engine() -> None:
    for failure in (LinkFailure("P0", "D0", 0.0, 10.0), LinkFailure("P0", "D0", 0.06, 10.0)):
        run = serve([JOB], link_failures=(failure,))
        check_all_served(run, [JOB])
        assert not run.handoffs[0].is_ok
        assert sum(step.num_prefill_tokens for step in
                   run.cluster.engines["D0"].record.micro_batches) == PROMPT + 1  # fmt: skip
    run = serve([JOB], link_failures=(LinkFailure("P0", "D0", 0.0, 0.01),))
    assert run.handoffs[0].is_ok


@pytest.mark.parametrize("time", [0.02, 0.06, 0.2])
@pytest.mark.parametrize("engine", ["P0", "D0"])
def test_a_dead_engine_loses_no_request(engine: str, time: float) -> None:
    """During prefill, the transfer and decode."""
    jobs = [JOB] * 3
    run = serve(jobs, "P0 P1 D0 D1", (EngineFailure(engine, time, 0.1, 1.0),), policy="distserve")
    check_all_served(run, jobs)


def test_blocks_survive_the_decode_engine_that_was_to_fetch_them() -> None:
    slow = serve([JOB], "P0 D0 D1", bandwidth=100.0)
    target = slow.handoffs[0].decode
    run = serve([JOB], "P0 D0 D1", (EngineFailure(target, 0.2, 0.1),), bandwidth=100.0)
    check_all_served(run, [JOB])
    record = run.handoffs[0]
    assert record.is_ok
    assert record.decode != target
    assert record.ready_time == slow.handoffs[0].ready_time


def test_a_draining_prefill_engine_waits_for_its_holds() -> None:
    run = serve([JOB], "P0 P1 D0", (EngineDrain("P0", 0.06), EngineDrain("P1", 0.06)))
    check_all_served(run, [JOB])
    record = run.handoffs[0]
    assert record.is_ok
    end = run.cluster.engines[record.prefill].lives[-1].end_time
    assert end == record.arrival_time


def test_a_link_failure_has_times() -> None:
    with pytest.raises(ValueError, match="seconds"):
        LinkFailure("P0", "D0", 0.0, -1.0)
    with pytest.raises(ValueError, match="roles"):
        simulate_pairs(
            {"A": make_engine()}, {"B": "decode"}, [JOB],
            make_pair_policy("distserve", Random(0)),
            KvNetwork(NetworkLink(1.0, 0.0), 1),
        )  # fmt: skip


@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(
    policy=st.sampled_from(sorted(PAIR_POLICIES)),
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=16),
    gap=st.floats(0.0, 0.1),
    blocks=st.integers(16, 40),
    failures=st.lists(
        st.tuples(st.sampled_from(sorted(ROLES)), st.floats(0.0, 2.0), st.floats(0.0, 0.3)),
        max_size=3,
    ),
    breaks=st.lists(
        st.tuples(st.sampled_from(["D0", "D1"]), st.floats(0.0, 2.0), st.floats(0.0, 1.0)),
        max_size=2,
    ),
    bandwidth=st.floats(50.0, 5000.0),
)
def test_whatever_fails_every_request_is_served(
    policy: str,
    lengths: list[tuple[int, int]],
    gap: float,
    blocks: int,
    failures: list[tuple[str, float, float]],
    breaks: list[tuple[str, float, float]],
    bandwidth: float,
) -> None:
    """Blocks return, no state waits forever, and a seed repeats a run."""
    jobs = [WorkloadRequest(i * gap, *pair) for i, pair in enumerate(lengths)]
    changes = tuple(EngineFailure(name, time, delay, 0.2) for name, time, delay in failures)
    links = tuple(
        LinkFailure(source, target, time, seconds)
        for source in ("P0", "P1")
        for target, time, seconds in breaks
    )
    runs = [
        serve(jobs, " ".join(ROLES), changes, links, blocks, bandwidth, policy) for _ in range(2)
    ]
    check_all_served(runs[0], jobs)
    assert runs[0].handoffs == runs[1].handoffs
