"""Decisions of the launcher: bundles, spares, log lines."""

import pytest

from gllm.deploy.ray.bundles import (
    RayMachine,
    choose_num_nodes,
    describe_wait,
    find_spare_machines,
    has_gpus_on,
    plan_bundles,
    port_offset,
    ray_node_name,
    read_ray_machines,
    spare_bundle,
)


def machine(number: int, is_alive: bool = True, **resources: float) -> RayMachine:
    return RayMachine(f"{number:x}" * 40, f"10.0.0.{number}", is_alive, resources)


def test_machines_are_read_from_rays_table_also_dead_ones_without_resources() -> None:
    alive = {
        "NodeID": "a",
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerHostname": "host",
        "Alive": True,
        "Resources": {"CPU": 2.0},
    }
    dead = {
        "NodeID": "b",
        "NodeManagerAddress": "10.0.0.2",
        "NodeManagerHostname": "other",
        "Alive": False,
    }
    assert read_ray_machines([alive, dead]) == [
        RayMachine("a", "10.0.0.1", True, {"CPU": 2.0}, "host"),
        RayMachine("b", "10.0.0.2", False, {}, "other"),
    ]


def test_two_raylets_of_one_host_have_agents_of_different_names() -> None:
    assert ray_node_name("10.0.0.1", "abcdef0123") == "ray-10.0.0.1-abcdef"
    assert ray_node_name("10.0.0.1", "0123456789") != ray_node_name("10.0.0.1", "abcdef0123")


def test_agents_of_one_host_have_different_ports_and_the_head_keeps_its_own() -> None:
    def raylet(identity: str, host_name: str, is_alive: bool = True) -> RayMachine:
        return RayMachine(identity, "10.0.0.1", is_alive, {}, host_name)

    machines = [raylet("a", "x"), raylet("b", "y"), raylet("c", "x"), raylet("d", "x")]
    machines.append(raylet("0", "x", is_alive=False))
    offsets = {each: port_offset(machines, each, "d") for each in "abcd"}
    assert offsets == {"d": 0, "a": 1, "c": 2, "b": 0}


def test_each_machine_has_a_bundle_with_its_workers_and_the_first_is_the_heads() -> None:
    assert plan_bundles([1, 1, 1, 1], 2, False, "10.0.0.1") == [
        {"CPU": 2.0, "node:10.0.0.1": 0.001},
        {"CPU": 2.0},
    ]
    assert plan_bundles([2, 2, 4], 2, True, "10.0.0.1") == [
        {"CPU": 1.0, "GPU": 4.0, "node:10.0.0.1": 0.001},
        {"CPU": 1.0, "GPU": 4.0},
    ]
    with pytest.raises(ValueError, match="2 pipeline stages cannot be distributed over 3 nodes"):
        plan_bundles([1, 1], 3, False, "10.0.0.1")


def test_a_spare_can_take_the_place_of_any_machine_but_the_heads() -> None:
    assert spare_bundle(plan_bundles([3, 1, 2], 3, False, "10.0.0.1")) == {"CPU": 2.0}
    assert spare_bundle(plan_bundles([1, 2], 2, True, "10.0.0.1")) == {"CPU": 1.0, "GPU": 2.0}
    # An engine on the head alone has no other bundle.
    assert spare_bundle(plan_bundles([1, 1], 1, False, "10.0.0.1")) == {"CPU": 2.0}


def test_an_engine_takes_the_machines_that_are_there_but_none_without_a_stage() -> None:
    machines = [machine(1, CPU=8.0), machine(2, CPU=8.0, GPU=1.0), machine(3, False, CPU=8.0)]
    assert choose_num_nodes(4, machines, has_gpus=False) == 2
    assert choose_num_nodes(1, machines, has_gpus=False) == 1
    assert choose_num_nodes(4, machines, has_gpus=True) == 1
    assert choose_num_nodes(4, [], has_gpus=False) == 1


def test_gpus_are_needed_if_the_heads_machine_has_them() -> None:
    machines = [machine(1, CPU=8.0), machine(2, CPU=8.0, GPU=1.0)]
    assert not has_gpus_on(machines, machines[0].identity)
    assert has_gpus_on(machines, machines[1].identity)


def test_spares_start_on_living_machines_without_an_agent_that_are_large_enough() -> None:
    machines = [
        machine(1, CPU=8.0),
        machine(2, CPU=8.0),
        machine(3, False, CPU=8.0),
        machine(4, CPU=1.0),
        machine(5, CPU=8.0),
        machine(6, CPU=8.0),
    ]
    used = {machines[0].identity}
    bundle = {"CPU": 2.0}
    assert find_spare_machines(machines, used, bundle, 2) == [machines[1], machines[4]]
    assert find_spare_machines(machines, used, bundle, 9) == [machines[1], *machines[4:]]
    assert find_spare_machines(machines, used, bundle, -1) == []


def test_the_log_says_what_is_needed_and_what_ray_has() -> None:
    bundles = plan_bundles([1, 1], 2, True, "10.0.0.1")
    text = describe_wait(bundles, [machine(1, CPU=8.0, GPU=1.0), machine(2, False, CPU=8.0)])
    assert text == (
        "waiting for Ray to reserve 2 bundles on as many machines (1 CPU, 1 GPU; 1 CPU, 1 GPU); "
        "its cluster has 1: 10.0.0.1 (8 CPU, 1 GPU)"
    )
    assert describe_wait(bundles, []).endswith("its cluster has 0: none")
