"""KV transfers between simulated engines: times on shared links, and ends that die."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.link_policies.fixed_chunk import CHUNK_BYTES
from gllm.sim.cluster.cluster import EngineDrain, EngineFailure, SimulatedCluster
from gllm.sim.cluster.handoffs import KvTransfer, TransferPath
from gllm.sim.event_loop import ARRIVAL, EventLoop
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.link import make_link
from gllm.sim.pipeline import PipelineLinks, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.examples import num_examples
from tests.support.scheduler.link_messages import EVERY_LINK_POLICY
from tests.support.sim.cluster_parts import FirstEngineRouter, make_deployment, token_times

NETWORK = NetworkLink(1e6, 0.2)
"""1 MB/s, so that 300 kB take 0.3 s, and 0.2 s of latency."""

times = st.floats(0.0, 5.0).map(lambda seconds: round(seconds, 2))


class TransferLog:
    """Times of the ends of transfers."""

    def __init__(self) -> None:
        self.done: dict[str, float] = {}
        self.lost: dict[str, float] = {}

    def transfer(
        self, name: str, num_bytes: int, path: TransferPath, ends: str = "ab"
    ) -> KvTransfer:
        """Return a transfer whose end is logged under its name."""

        def on_done(now: float) -> None:
            self.done[name] = round(now, 9)

        def on_lost(now: float) -> None:
            self.lost[name] = round(now, 9)

        return KvTransfer(ends[0], ends[1], num_bytes, path, on_done, on_lost)


def make_cluster(
    links: PipelineLinks | None = None, loop: EventLoop | None = None
) -> SimulatedCluster:
    """Return a cluster of three engines; the first one has two stages and these links."""
    cluster = SimulatedCluster(FirstEngineRouter(), loop)
    cluster.add_engine("a", make_deployment(2), links=links)
    cluster.add_engine("b", make_deployment())
    cluster.add_engine("c", make_deployment())
    return cluster


def start_at(cluster: SimulatedCluster, time: float, transfer: KvTransfer) -> None:
    """Start a transfer at a time."""

    def start(now: float, transfer: KvTransfer) -> None:
        assert cluster.start_transfer(transfer)

    cluster.loop.push(time, ARRIVAL, start, transfer)


def test_transfers_of_one_link_queue_and_arrive_a_latency_later() -> None:
    cluster, log = make_cluster(), TransferLog()
    path = TransferPath(make_link(cluster.loop), NETWORK)
    for time, name, num_bytes in ((1.0, "one", 300_000), (1.1, "two", 100_000)):
        start_at(cluster, time, log.transfer(name, num_bytes, path))
    cluster.run()
    assert log.done == {"one": 1.5, "two": 1.6}
    assert not any(map(cluster.transfers.has_transfer_of, cluster.engines))
    assert not log.lost


@pytest.mark.parametrize(
    ("policy", "first_token"), [("serial", 0.05 + 0.3 + 0.01 + 0.05), ("fixed-chunk", None)]
)
def test_transfer_and_activations_share_a_link(policy: str, first_token: float | None) -> None:
    """Activations of 10 ms wait for the whole transfer, or for one chunk at most."""
    loop = EventLoop()
    own = make_pipeline_links(loop, 2)
    shared = make_link(loop, EVERY_LINK_POLICY[policy])
    cluster = make_cluster(PipelineLinks([shared], own.plans, own.results), loop)
    log = TransferLog()
    start_at(cluster, 0.05, log.transfer("kv", 300_000, TransferPath(shared, NETWORK)))
    cluster.submit_each([WorkloadRequest(0.0, 8, 1)])
    run = cluster.run()
    (time,) = token_times(run)
    if first_token is not None:
        assert time == pytest.approx(first_token)
        assert log.done == {"kv": 0.55}
    else:
        assert 0.11 <= time <= 0.11 + CHUNK_BYTES / NETWORK.bandwidth
        assert log.done == {"kv": 0.56}


@pytest.mark.parametrize("dead", ["a", "b"])
def test_death_of_an_end_frees_the_link_and_is_reported_when_it_is_known(dead: str) -> None:
    cluster, log = make_cluster(), TransferLog()
    path = TransferPath(make_link(cluster.loop), NETWORK)
    start_at(cluster, 1.0, log.transfer("broken", 300_000, path))
    start_at(cluster, 1.0, log.transfer("other", 100_000, path, "cc"))
    cluster.apply_each([EngineFailure(dead, 1.1, detection_seconds=0.5, restart_seconds=0.1)])
    cluster.run()
    assert log.lost == {"broken": 1.6}
    # The other transfer begins at the death.
    assert log.done == {"other": 1.4}


def test_transfer_that_travels_when_its_target_dies_is_lost() -> None:
    cluster, log = make_cluster(), TransferLog()
    path = TransferPath(make_link(cluster.loop), NETWORK)
    start_at(cluster, 1.0, log.transfer("broken", 300_000, path))
    cluster.apply_each([EngineFailure("b", 1.4)])
    cluster.run()
    assert (log.lost, log.done) == ({"broken": 1.4}, {})


def test_transfers_need_two_running_engines_and_bytes() -> None:
    cluster, log = make_cluster(), TransferLog()
    path = TransferPath(make_link(cluster.loop), NETWORK)
    with pytest.raises(ValueError, match="num_bytes is 0, but a transfer has at least 1"):
        cluster.start_transfer(log.transfer("empty", 0, path))
    with pytest.raises(ValueError, match="engine 'x' is none of a, b, c"):
        cluster.start_transfer(log.transfer("lost", 1, path, "ax"))
    cluster.apply_each([EngineFailure("b", 0.0)])
    cluster.run()
    assert not cluster.start_transfer(log.transfer("late", 1, path))
    assert (log.lost, log.done) == ({}, {})


def test_draining_engine_ends_behind_its_last_transfer() -> None:
    cluster, log = make_cluster(), TransferLog()
    path = TransferPath(make_link(cluster.loop), NETWORK)
    start_at(cluster, 1.0, log.transfer("kv", 300_000, path))
    cluster.apply_each([EngineDrain("a", 1.1), EngineDrain("b", 1.2)])
    run = cluster.run()
    assert log.done == {"kv": 1.5}
    assert [run.engines[name].lives[0].end_time for name in "abc"] == [1.5, 1.5, None]


@settings(max_examples=num_examples(30, 800), deadline=None)
@given(
    transfers=st.lists(
        st.tuples(
            times,
            st.sampled_from(["ab", "ba", "bc", "ca"]),
            st.integers(1, 2_000_000),
            st.booleans(),
        ),
        max_size=8,
    ),
    failures=st.lists(st.tuples(times, st.sampled_from("abc"), times), max_size=4),
    policy=st.sampled_from(sorted(EVERY_LINK_POLICY.values())),
)
def test_every_transfer_ends_once_whatever_dies(
    transfers: list[tuple[float, str, int, bool]],
    failures: list[tuple[float, str, float]],
    policy: str,
) -> None:
    cluster, log = make_cluster(), TransferLog()
    paths = [TransferPath(make_link(cluster.loop, policy), NETWORK) for _ in range(2)]
    started: list[str] = []

    def start(now: float, named: tuple[str, KvTransfer]) -> None:
        name, transfer = named
        if cluster.start_transfer(transfer):
            started.append(name)

    for number, (time, ends, num_bytes, is_second) in enumerate(transfers):
        transfer = log.transfer(str(number), num_bytes, paths[is_second], ends)
        cluster.loop.push(time, ARRIVAL, start, (str(number), transfer))
    cluster.apply_each(
        EngineFailure(name, time, detection_seconds, 0.5)
        for time, name, detection_seconds in failures
    )
    cluster.run()
    assert sorted([*log.done, *log.lost]) == sorted(started)
    assert not any(map(cluster.transfers.has_transfer_of, cluster.engines))
    assert not any(path.link.num_waiting for path in paths)
    for name, arrival in log.done.items():
        time, _, num_bytes, _ = transfers[int(name)]
        assert arrival >= time + num_bytes / NETWORK.bandwidth + NETWORK.latency - 1e-6
