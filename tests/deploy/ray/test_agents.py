"""Placement group, actors and spares, with a stand-in of Ray."""

import logging
import sys
import threading
from typing import Any

import msgspec
import pytest

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.ray.actors import AgentActor
from gllm.deploy.ray.agents import GpuHolder, LaunchSpec, RayAgents
from gllm.deploy.ray.launcher import make_launch_spec
from gllm.deploy.ray.ray_cluster import LaunchError, import_ray
from gllm.observability.logs import LogConfig
from tests.support.nodes.fake_ray import FakeRay

HEAD, *OTHERS = ("h" * 8, "a" * 8, "b" * 8, "c" * 8)


def machine(identity: str, number: int, **resources: float) -> dict[str, Any]:
    return {
        "NodeID": identity,
        "NodeManagerAddress": f"127.0.0.{number}",
        "NodeManagerHostname": f"host{number}",
        "Alive": True,
        "Resources": {"CPU": 4.0, **resources},
    }


def cluster(num_machines: int, num_waits: int = 0, **resources: float) -> FakeRay:
    identities = [HEAD, *OTHERS][:num_machines]
    machines = [machine(each, 11 + index, **resources) for index, each in enumerate(identities)]
    return FakeRay(machines, HEAD, num_waits)


def launch_spec(num_stages: int = 2, **changes: Any) -> LaunchSpec:
    engine = EngineConfig("demo", pipeline_parallel_size=num_stages)
    spec = make_launch_spec(engine, NodesConfig(), None, LogConfig())
    return msgspec.structs.replace(spec, **changes)


def create(ray: FakeRay, spec: LaunchSpec, **options: Any) -> RayAgents:
    """Return the agents of a cluster, which do not wait between looks."""
    return RayAgents(spec, threading.Event(), ray, poll_seconds=0.0, **options)


def test_without_ray_the_error_has_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(LaunchError, match=r"pip install -r requirements-ray\.txt"):
        import_ray()


def test_without_a_cluster_the_error_says_how_to_start_one() -> None:
    ray = cluster(1)
    ray.error = ConnectionError("no cluster")
    with pytest.raises(LaunchError, match=r"no cluster; start it .* `ray start --head`"):
        create(ray, launch_spec()).start()


def test_each_other_machine_gets_an_actor_that_ray_restarts() -> None:
    ray = cluster(3)
    agents = create(ray, launch_spec(3, address="10.0.0.1:6379"))
    event = agents.start()
    assert (event.num_nodes, event.host, event.gpu_ids, event.error) == (3, "127.0.0.11", [], "")
    assert (ray.address, ray.strategy) == ("10.0.0.1:6379", "STRICT_SPREAD")
    assert [actor["kind"] for actor in ray.actors] == [AgentActor] * 2
    for index, actor in enumerate(ray.actors, 1):
        assert actor["options"] == {
            "num_cpus": 1.0,
            "num_gpus": 0,
            "max_restarts": -1,
            "scheduling_strategy": ("bundle", index),
        }
        arguments, ports, head = actor["arguments"]
        assert arguments[:2] == ["--join", "127.0.0.11:29600"]
        assert "--spare" not in arguments
        assert ports == {"--data-port": 29601, "--port": 8000}
        assert head == HEAD


def test_on_gpus_the_head_holds_its_own() -> None:
    ray = cluster(2, GPU=2.0)
    event = create(ray, launch_spec(4)).start()
    assert event.gpu_ids == ["2", "3"]
    holder, agent = ray.actors
    assert holder["kind"] is GpuHolder
    assert holder["options"]["num_gpus"] == agent["options"]["num_gpus"] == 2.0


def test_off_loopback_a_secret_is_needed() -> None:
    ray = cluster(2)
    with pytest.raises(LaunchError, match="needs a node secret"):
        create(ray, launch_spec(host="10.0.0.1")).start()
    assert ray.actors == []
    event = create(ray, launch_spec(host="10.0.0.1", has_secret=True)).start()
    assert event.host == "10.0.0.1"


def test_the_log_says_what_is_missing_until_the_time_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ray = cluster(1, num_waits=3)
    event = create(ray, launch_spec(num_nodes=2), log_seconds=0.0).start()
    assert event.num_nodes == 2
    assert [record.getMessage() for record in caplog.records] == [
        "waiting for Ray to reserve 2 bundles on as many machines (1 CPU; 1 CPU); its cluster has "
        "1: 127.0.0.11 (4 CPU)"
    ] * 3
    ray = cluster(1, num_waits=10**9)
    agents = create(ray, launch_spec(num_nodes=2, timeout_seconds=0.05))
    with pytest.raises(LaunchError, match=r"its cluster has 1: .*; gave up after --join-timeout"):
        agents.start()
    agents.close()
    assert len(ray.removed) == 1


def test_the_end_of_the_head_ends_the_wait() -> None:
    ray = cluster(1, num_waits=10**9)
    is_ended = threading.Event()
    is_ended.set()
    with pytest.raises(LaunchError, match="the head has ended"):
        RayAgents(launch_spec(num_nodes=2), is_ended, ray, poll_seconds=0.0).start()


def test_spares_start_on_machines_that_are_added_and_again_after_a_loss(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    ray = cluster(2)
    agents = create(ray, launch_spec(2, num_spares=1))
    agents.start()
    ray.places = {0: HEAD, 1: OTHERS[0]}
    agents.poll()
    assert len(ray.actors) == 1
    ray.machines += [machine(OTHERS[1], 13), machine(OTHERS[2], 14)]
    agents.poll()
    agents.poll()
    _, spare = ray.actors
    assert spare["options"]["scheduling_strategy"] == ("machine", OTHERS[1], False)
    assert spare["arguments"][0][-1] == "--spare"
    # The machine of the spare is lost: the next one gets one.
    ray.machines[2]["Alive"] = False
    agents.poll()
    assert ray.actors[2]["options"]["scheduling_strategy"][1] == OTHERS[2]
    assert "Ray has lost the machine 127.0.0.13 and looks for another one" in caplog.text
    agents.close()
    # All that are left: the agent and the second spare.
    assert [actor.number for actor in ray.killed] == [0, 2]
    assert len(ray.removed) == 1
    assert not ray.is_connected
    agents.close()


def test_a_machine_that_ray_finds_for_a_lost_one_gets_no_spare() -> None:
    ray = cluster(3)
    agents = create(ray, launch_spec(2, num_spares=2, num_nodes=2))
    agents.start()
    ray.places = {0: HEAD, 1: OTHERS[0]}
    ray.machines[1]["Alive"] = False
    # Ray has moved the bundle to the third machine.
    ray.places[1] = OTHERS[1]
    agents.poll()
    assert len(ray.actors) == 1
