"""Machines that leave and join a running engine: no request fails, and no text changes."""

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.net.rig import make_rig
from gllm.__main__ import main
from tests.support.servers.nodes import Cluster, running_cluster
from tests.support.servers.recovery_load import Answer, Load, compare, load_during
from tests.support.servers.server import alive, wait_until


def planned(cluster: Cluster) -> dict[str, float]:
    """Return the number of recoveries that have begun, by cause."""
    with cluster.head.open("/metrics", None) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = (each for family in families for each in family.samples)
    return {
        each.labels["cause"]: each.value
        for each in samples
        if each.name == "gllm:recoveries_total" and each.value
    }


def drain(cluster: Cluster, machine: int) -> None:
    """Run `gllm drain` on the head's machine; the machine's process ends with status 0."""
    server = cluster.servers.pop(machine)
    pids = server.pids()
    with cluster.rig.inside(0):
        assert main(["drain", f"machine-{machine}", cluster.head.url]) == 0
    assert f"machine-{machine}" not in cluster.nodes()
    code, log = server.end()
    assert code == 0, log[-3000:]
    assert "the head ends this node" in log
    wait_until(lambda: not any(map(alive, pids)))


@pytest.mark.full
def test_a_machine_leaves_and_another_one_joins_under_load(
    tmp_path: Path, expected: dict[str, Answer]
) -> None:
    with (
        make_rig(3) as rig,
        running_cluster(rig, tmp_path, 2, "--pp", "2", "--max-restarts", "0") as cluster,
    ):
        worker = cluster.pids()["0"]
        load = load_during(cluster.head, "drained")
        drain(cluster, 1)
        compare(load.wait(), expected)
        assert planned(cluster) == {"drained": 1}
        assert cluster.nodes()["machine-0"]["stages"] == [0]
        load = load_during(cluster.head, "joined")
        cluster.join(2)
        wait_until(lambda: cluster.nodes().get("machine-2", {}).get("stages") == [1])
        compare(load.wait(), expected)
        compare(Load(cluster.head, "afterwards").wait(), expected)
        assert planned(cluster) == {"drained": 1, "joined": 1}
        assert cluster.pids()["0"] == worker, "no process of the head is replaced"
        # The same again is no error, and a machine that never was is one.
        answer = cluster.head.post("/nodes/machine-1/drain", {})
        assert answer == (200, {"name": "machine-1", "state": "drained"})
        assert cluster.head.post("/nodes/other/drain", {})[0] == 404
        assert cluster.head.post("/nodes/machine-0/drain", {})[0] == 409


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_machines_leave_and_join_in_turn(
    seed: int, tmp_path: Path, expected: dict[str, Answer]
) -> None:
    with (
        make_rig(3) as rig,
        running_cluster(rig, tmp_path, 3, "--pp", "3", "--max-restarts", "0") as cluster,
    ):
        for turn in range(4):
            machine = 1 + (seed + turn) % 2
            load = load_during(cluster.head, f"leaves {turn}")
            drain(cluster, machine)
            compare(load.wait(), expected)
            load = load_during(cluster.head, f"joins {turn}")
            cluster.join(machine)
            wait_until(lambda: cluster.nodes().get(f"machine-{machine}", {}).get("stages"))  # noqa: B023
            compare(load.wait(), expected)
        assert planned(cluster) == {"drained": 4, "joined": 4}
