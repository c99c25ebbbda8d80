"""Three machines under faults of networks, machines and people. All marked `long`."""

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from benchmarks.net import namespaces
from benchmarks.net.proxy import TcpProxy
from benchmarks.net.rig import NamespaceRig, unsupported_reason
from tests.support.servers.metrics import scrape
from tests.support.servers.nodes import DATA_PORT, EXACT, Cluster, running_cluster
from tests.support.servers.recovery_load import COMPLETIONS, Answer, Load, compare, load_during
from tests.support.servers.server import alive, serving, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason())),
]


@pytest.fixture(scope="module")
def rig() -> Iterator[NamespaceRig]:
    """Three machines, and one for a spare or a forwarder."""
    with NamespaceRig(4) as machines:
        yield machines


@pytest.fixture
def cluster(rig: NamespaceRig, tmp_path: Path) -> Iterator[Cluster]:
    """Machines 0 to 2 with a stage each, which wait for one that starts again."""
    flags = ("--pp", "3", "--node-return-timeout", "120")
    with running_cluster(rig, tmp_path, 3, *flags) as started:
        yield started


def test_texts_over_a_slow_network(
    rig: NamespaceRig, cluster: Cluster, expected: dict[str, Answer]
) -> None:
    """100 Mbit/s and 30 ms from machine to machine, which the hops' bytes and the time prove."""
    num_tokens, one_way = 10, 0.03
    before = num_hop_bytes(rig, 1) - num_link_bytes(cluster, "machine-1")
    try:
        for machine in range(3):
            rig.hop(machine).set_rate(100e6)
            rig.hop(machine).set_delay(one_way / 2)
        compare(Load(cluster.head, "slow").wait(), expected)
        body = {"prompt": "The owl", "max_tokens": num_tokens, "ignore_eos": True}
        begin = time.monotonic()
        assert cluster.head.post(COMPLETIONS, body)[0] == 200
        # Between two tokens of a request a step passes the three stages and its token returns.
        assert time.monotonic() - begin >= (num_tokens - 1) * 3 * one_way
        # Activations to and from machine 1 pass its hop.
        num_activation_bytes = num_link_bytes(cluster, "machine-1")
        assert num_activation_bytes > 100_000
        assert num_hop_bytes(rig, 1) - num_activation_bytes >= before
        # Delays and stages have been measured meanwhile: more micro-batches than stages.
        head = cluster.head

        def read_depth() -> float:
            assert head.post(COMPLETIONS, {**body, "max_tokens": 2})[0] == 200
            return scrape(head).value("pipeline_depth")

        wait_until(lambda: read_depth() == 12)
    finally:
        for machine in range(3):
            rig.hop(machine).set_rate(0)
            rig.hop(machine).set_delay(0)


def num_hop_bytes(rig: NamespaceRig, machine: int) -> int:
    """Bytes that have passed a machine's hop in both directions."""
    return sum(each["bytes"] for each in rig.hop(machine).counters().values())


def num_link_bytes(cluster: Cluster, name: str) -> int:
    """Bytes of a machine's data connections, as its agent has reported."""
    return sum(link["num_bytes"] for link in cluster.nodes()[name]["links"])


@pytest.mark.parametrize("degrees", ["2,1", "1,2"])
def test_tensor_parallel_stages(rig: NamespaceRig, tmp_path: Path, degrees: str) -> None:
    """Sums of ranks have another order than those of one worker, so ranks are compared."""
    flags = ("--pp", "2", "--tp", degrees)
    with serving("demo", *EXACT, *flags) as server:
        expected = Load(server, "one machine").wait()
    with running_cluster(rig, tmp_path, 2, *flags) as cluster:
        assert len(cluster.pids()) == 3
        compare(Load(cluster.head, "degrees").wait(), expected)


def test_a_link_is_cut_for_ten_seconds(
    rig: NamespaceRig, cluster: Cluster, expected: dict[str, Answer]
) -> None:
    """Neither a process nor weights are lost, although the machine is."""
    pids = cluster.pids()
    load = load_during(cluster.head, "cut")
    rig.hop(1).cut()
    time.sleep(10)
    rig.hop(1).restore()
    compare(load.wait(), expected)
    cluster.wait_until_ready()
    assert cluster.pids() == pids
    assert sum(row["num_losses"] for row in cluster.nodes().values()) >= 1


def test_losses_leave_no_descriptors_behind(rig: NamespaceRig, tmp_path: Path) -> None:
    """Head, agent, workers and gllm-link have as many after five losses as after one."""
    with running_cluster(rig, tmp_path, 2, "--pp", "2") as cluster:
        pids = [pid for server in cluster.servers.values() for pid in server.pids()]
        counts = []
        for num_losses in range(1, 6):
            rig.hop(1).cut()
            wait_until(lambda: cluster.nodes()["machine-1"]["num_losses"] == num_losses)  # noqa: B023
            rig.hop(1).restore()
            cluster.wait_until_ready()
            assert cluster.head.post(COMPLETIONS, {"prompt": "The owl", "max_tokens": 2})[0] == 200
            counts.append([len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids])
        # Some are open for a moment.
        assert all(after <= before + 2 for before, after in zip(*counts[::4], strict=True)), counts


def test_a_short_cut_of_the_data_alone_costs_no_epoch(
    rig: NamespaceRig, cluster: Cluster, expected: dict[str, Answer]
) -> None:
    """A reset of the data connections: steps are sent again, nothing restarts."""
    links = [pid for machine in range(3) for pid in link_pids(rig, machine)]
    assert len(links) == 3
    epoch = scrape(cluster.head).values["epoch"]
    load = load_during(cluster.head, "links")
    for pid in links:
        os.kill(pid, signal.SIGKILL)
    compare(load.wait(), expected)
    assert not any(map(alive, links))
    assert all(link_pids(rig, machine) for machine in range(3))
    assert scrape(cluster.head).values["epoch"] == epoch >= 1
    assert sum(row["num_losses"] for row in cluster.nodes().values()) == 0


def link_pids(rig: NamespaceRig, machine: int) -> list[int]:
    """Process ids of gllm-link on a machine."""
    found = []
    for pid in rig.pids(machine):
        with suppress(FileNotFoundError):
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            if title.startswith(b"gllm-link") or b"gllm.transport.link" in title:
                found.append(pid)
    return found


def test_a_spare_takes_the_place_of_a_dead_machine(
    cluster: Cluster, expected: dict[str, Answer]
) -> None:
    spare = cluster.join(3, "--spare")
    wait_until(lambda: cluster.nodes().get("machine-3", {}).get("state") == "spare")
    assert spare.status("/health") == 200
    load = load_during(cluster.head, "spare")
    cluster.servers[1].kill()
    compare(load.wait(), expected)
    assert cluster.nodes()["machine-3"]["stages"] == [1]
    # The machine that returns becomes the spare.
    cluster.start(1)
    wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "spare")
    load = load_during(cluster.head, "spare dies")
    cluster.servers[3].kill()
    compare(load.wait(), expected)
    assert cluster.nodes()["machine-1"]["stages"] == [1]


def test_a_restarted_agent_gets_its_stage_again(
    cluster: Cluster, expected: dict[str, Answer]
) -> None:
    load = load_during(cluster.head, "restart")
    cluster.servers[2].kill()
    cluster.start(2)
    compare(load.wait(), expected)
    assert cluster.nodes()["machine-2"]["stages"] == [2]


def test_layers_are_cut_anew_without_a_spare(
    rig: NamespaceRig, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    """The machines that are left serve with fewer stages; the lost one returns as a spare."""
    flags = ("--pp", "3", "--node-return-timeout", "1")
    with running_cluster(rig, tmp_path, 3, *flags) as cluster:
        load = load_during(cluster.head, "fewer stages")
        cluster.servers[1].kill()
        compare(load.wait(), expected)
        rows = cluster.nodes()
        assert rows["machine-0"]["stages"] + rows["machine-2"]["stages"] == [0, 1]
        assert rows["machine-1"]["state"] == "lost"
        cluster.start(1)
        wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "spare")
        compare(Load(cluster.head, "afterwards").wait(), expected)


def test_a_frozen_machine_comes_back_late(cluster: Cluster, expected: dict[str, Answer]) -> None:
    """Frames of a machine that was stopped for long are stale and harm nobody."""
    load = load_during(cluster.head, "frozen")
    cluster.servers[2].kill(signal.SIGSTOP)
    wait_until(lambda: cluster.nodes()["machine-2"]["state"] == "lost")
    cluster.servers[2].kill(signal.SIGCONT)
    compare(load.wait(), expected)
    compare(Load(cluster.head, "after the freeze").wait(), expected)


def separate(rig: NamespaceRig, first: int, second: int) -> None:
    """Let the router drop what two machines send to each other, as if both were behind NAT."""
    for source, target in ((first, second), (second, first)):
        ends = ["from", rig.addresses[source], "to", rig.addresses[target]]
        namespaces.run_ip("-n", rig.router, "rule", "add", *ends, "prohibit")


def test_neighbours_without_a_way_to_each_other(
    tmp_path: Path, expected: dict[str, Answer]
) -> None:
    """Two neighbouring machines that only dial out serve through a forwarded port."""
    with NamespaceRig(4) as rig:
        separate(rig, 1, 2)
        with rig.inside(3):
            # As `ssh -R` on a machine that both can dial.
            forwarder = TcpProxy((rig.addresses[2], DATA_PORT), host=rig.addresses[3])
        cluster = Cluster(rig, tmp_path, 3, "--pp", "3")
        with closing(forwarder), closing(cluster):
            cluster.start(0)
            cluster.start(1, "--data-port", "0")
            cluster.start(2, "--advertise", forwarder.address)
            cluster.wait_until_ready()
            compare(Load(cluster.head, "forwarded").wait(), expected)
            assert forwarder.num_connections >= 1


def test_a_machine_behind_a_firewall_joins_and_serves(
    rig: NamespaceRig, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    """Nobody can open a connection to the machine between two others; it dials both."""
    hop = rig.hop(1)
    hop.block_inbound()
    num_blocked = hop.counters()["ba"]["blocked"]
    cluster = Cluster(rig, tmp_path, 3, "--pp", "3")
    try:
        with closing(cluster):
            for rank in range(3):
                cluster.start(rank, *(["--data-port", "0"] if rank == 1 else []))
            cluster.wait_until_ready()
            compare(Load(cluster.head, "outbound only").wait(), expected)
            assert cluster.nodes()["machine-1"]["stages"] == [1]
            assert hop.counters()["ba"]["blocked"] == num_blocked, "nobody has tried to dial it"
            with rig.inside(0), pytest.raises(TimeoutError):
                socket.create_connection((rig.addresses[1], cluster.servers[1].port), timeout=1)
            assert hop.counters()["ba"]["blocked"] > num_blocked
            # Its connections are lost, and it dials again.
            hop.cut()
            wait_until(lambda: cluster.nodes()["machine-1"]["state"] == "lost")
            hop.restore()
            compare(Load(cluster.head, "returned").wait(), expected)
            assert cluster.nodes()["machine-1"]["stages"] == [1]
    finally:
        hop.restore()
        hop.admit_inbound()


def test_neighbours_that_cannot_accept_are_named(rig: NamespaceRig, tmp_path: Path) -> None:
    cluster = Cluster(rig, tmp_path, 3, "--pp", "3", "--join-timeout", "30")
    with closing(cluster):
        head = cluster.start(0)
        for rank in (1, 2):
            cluster.start(rank, "--data-port", "0")
        code, log = head.end()
        assert code == 1
        assert "--advertise" in log
        assert "machine-1" in log
        assert "machine-2" in log


def test_agents_without_a_head_end_by_themselves(rig: NamespaceRig, tmp_path: Path) -> None:
    """C17: workers and weights stay until --recovery-timeout is over."""
    with running_cluster(rig, tmp_path, 2, "--pp", "2", "--recovery-timeout", "4") as cluster:
        agent = cluster.servers[1]
        workers = list(agent.stage_pids().values())
        cluster.head.kill()
        wait_until(lambda: agent.status("/ready") == 503)
        assert agent.status("/health") == 200
        assert all(map(alive, workers))
        code, log = agent.end()
        assert code == 1
        assert rig.addresses[0] in log
        wait_until(lambda: not any(map(alive, workers)))


def test_a_head_that_is_started_again_gets_its_agents(
    rig: NamespaceRig, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    with running_cluster(rig, tmp_path, 2, "--pp", "2") as cluster:
        cluster.head.kill()
        cluster.start(0)
        cluster.wait_until_ready()
        compare(Load(cluster.head, "second head").wait(), expected)


def test_requests_survive_the_head_behind_a_router(
    rig: NamespaceRig, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    """Two engines, one of two machines: SIGKILL of its head under requests of all kinds."""
    hub = f"{rig.addresses[3]}:29500"
    cluster = Cluster(rig, tmp_path, 2, "--pp", "2", "--router", hub, "--name", "a")
    flags = ["--hub", hub, "--policy", "round-robin", "--engine-timeout", "10", *cluster.security]
    router = cluster.run(3, ["gllm.commands.router", "demo", *flags])
    try:
        for rank in (0, 1):
            cluster.start(rank)
        other = ["--router", hub, "--name", "b", *cluster.security]
        cluster.run(2, ["gllm.serve", "demo", *EXACT, *other])

        def num_ready() -> int:
            return sum(row["state"] == "ready" for row in router.get("/engines")["engines"])

        wait_until(lambda: router.status("/version") == 200)
        wait_until(lambda: num_ready() == 2)
        load = load_during(router, "router")
        cluster.head.kill()
        compare(load.wait(), expected)
        assert num_ready() == 1
    finally:
        cluster.close()
