"""Lifecycle of services: by example, and under random failures of nodes and processes."""

import random

import pytest

from gllm.deploy.cluster.selection import NodeSelection
from gllm.deploy.cluster.service import Service, ServiceRequest, ServiceState
from gllm.deploy.cluster.service_table import MAX_RESTARTS, ServiceTable
from gllm.messages.services import (
    DrainServiceNode,
    EndServiceProcess,
    ServiceReading,
    StartServiceProcess,
)

READY = ServiceReading("ready")
TWO = NodeSelection(("a", "b"), (1, 1), "even")


def make_table() -> ServiceTable:
    return ServiceTable(10.0)


def sent(table: ServiceTable) -> list[tuple[str, object]]:
    """Return the commands that were queued."""
    commands, table.commands = table.commands, []
    return list(commands)


def starts(table: ServiceTable) -> dict[str, StartServiceProcess]:
    return {node: each for node, each in sent(table) if isinstance(each, StartServiceProcess)}


def ends(table: ServiceTable) -> dict[str, int]:
    return {node: each.process for node, each in sent(table) if isinstance(each, EndServiceProcess)}


def running(table: ServiceTable) -> tuple[Service, int, int]:
    """A ready service on two nodes, and the numbers of its processes."""
    service = table.deploy(ServiceRequest("s", "demo"), TWO, "key")
    head = starts(table)["a"].process
    table.on_started(head, "a:1", "http://a:2")
    member = starts(table)["b"].process
    table.on_reading(head, READY, 1.0)
    assert service.state is ServiceState.READY
    return service, head, member


def test_the_head_starts_first_and_gets_the_key_alone() -> None:
    table = make_table()
    service = table.deploy(ServiceRequest("s", "demo", parameters={"seed": 1}), TWO, "key")
    (node, command), *others = sent(table)
    assert (node, others, service.state) == ("a", [], ServiceState.STARTING)
    assert isinstance(command, StartServiceProcess)
    assert (command.node_rank, command.api_key, command.head) == (0, "key", "")
    assert (command.degrees, command.parameters) == ([1, 1], {"seed": 1})
    table.on_started(command.process, "a:1", "http://a:2")
    member = starts(table)["b"]
    assert (member.node_rank, member.api_key, member.head) == (1, "", "a:1")
    table.on_started(command.process, "a:1", "http://a:2")
    assert sent(table) == []
    assert table.busy_nodes == {"a": "s", "b": "s"}


def test_deleting_ends_the_head_first_and_frees_all_nodes() -> None:
    table = make_table()
    service, head, member = running(table)
    assert table.delete("s")
    assert (service.state, ends(table)) == (ServiceState.STOPPING, {"a": head})
    assert table.delete("s")
    assert sent(table) == []
    table.on_exited(head, "it exited with 0", 2.0)
    assert ends(table) == {"b": member}
    table.on_exited(member, "it exited with 0", 2.0)
    assert (table.services, table.busy_nodes) == ({}, {})
    assert not table.delete("s")


def test_a_head_that_dies_fails_its_service_alone() -> None:
    table = make_table()
    service, head, member = running(table)
    other = table.deploy(ServiceRequest("t", "demo"), NodeSelection(("c",), (1,), "even"), "key")
    sent(table)
    table.on_exited(head, "it was killed by SIGKILL", 2.0)
    assert service.state is ServiceState.FAILED
    assert service.cause == "node a: it was killed by SIGKILL"
    assert ends(table) == {"b": member}
    table.on_exited(member, "it exited with 0", 2.0)
    assert table.busy_nodes == {"c": "t"}
    assert other.state is ServiceState.STARTING
    assert list(table.services) == ["s", "t"]
    assert table.delete("s")
    assert list(table.services) == ["t"]


def test_a_member_that_dies_fails_the_start_and_is_restarted_later() -> None:
    table = make_table()
    service, head, member = running(table)
    for attempt in range(MAX_RESTARTS):
        now, delay = 10.0 * attempt, 2.0**attempt
        table.on_exited(member, "it was killed", now)
        table.tick(now + delay - 0.5)
        assert sent(table) == []
        table.tick(now + delay)
        member = starts(table)["b"].process
    table.on_exited(member, "it was killed", 90.0)
    table.tick(99.0)
    assert sent(table) == []
    assert (service.state, table.busy_nodes) == (ServiceState.READY, {"a": "s"})

    table = make_table()
    service = table.deploy(ServiceRequest("s", "demo"), TWO, "key")
    head = starts(table)["a"].process
    table.on_started(head, "a:1", "http://a:2")
    table.on_exited(starts(table)["b"].process, "no model", 2.0)
    assert (service.state, service.cause) == (ServiceState.FAILED, "node b: no model")
    assert ends(table) == {"a": head}


@pytest.mark.parametrize("returns", [True, False])
def test_a_lost_head_is_awaited(returns: bool) -> None:
    table = make_table()
    service, head, member = running(table)
    table.on_node_lost("a", "silence", False, 5.0)
    table.tick(14.9)
    assert service.state == "recovering"
    assert "node a, which runs the head, is lost: silence" in service.cause
    if returns:
        assert table.on_node_joined("a", [head, 77], 14.9) == [head]
        table.on_reading(head, READY, 15.0)
        table.tick(99.0)
        assert (service.state, service.cause) == ("ready", "")
    else:
        table.tick(15.0)
        assert service.state == "failed"
        assert ends(table) == {"b": member}


def test_a_node_that_returns_without_its_process_runs_it_again() -> None:
    table = make_table()
    service, _, member = running(table)
    table.on_node_lost("b", "its agent died", False, 5.0)
    assert table.on_node_joined("b", [], 6.0) == []
    table.tick(7.0)
    assert starts(table)["b"].process != member
    assert service.state is ServiceState.READY


def test_a_node_that_returns_kills_a_process_that_was_to_end() -> None:
    table = make_table()
    _, head, _ = running(table)
    table.on_node_lost("a", "silence", False, 5.0)
    table.delete("s")
    assert table.on_node_joined("a", [head], 6.0) == []


def test_a_node_leaves_a_running_engine() -> None:
    table = make_table()
    service, head, member = running(table)
    table.drain_node("b", 1.0)
    sent(table)
    table.on_exited(member, "it exited with 0", 2.0)
    table.forget_node("b")
    table.tick(99.0)
    assert (service.state, service.nodes, sent(table)) == (ServiceState.READY, ("a",), [])
    assert table.busy_nodes == {"a": "s"}
    table.drain_node("a", 3.0)
    assert (service.state, ends(table)) == (ServiceState.MOVING, {"a": head})


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_node_that_leaves_takes_its_service_elsewhere(is_refused: bool) -> None:
    table = make_table()
    service, head, member = running(table)
    table.drain_node("b", 1.0)
    assert service.state == "ready"
    assert sent(table) == [("a", DrainServiceNode(head, "b"))]
    if is_refused:
        table.on_release_refused(head, "b")
    else:
        table.tick(10.9)
        assert service.state == "ready"
        table.tick(11.0)
    table.on_release_refused(head, "b")
    assert (service.state, ends(table)) == ("moving", {"a": head})
    table.on_exited(head, "it exited with 0", 2.0)
    table.on_exited(member, "it exited with 0", 2.0)
    assert table.movable == ["s"]
    table.resume("s", NodeSelection(("a", "c"), (1, 1), "auto"))
    assert (service.state, service.api_key) == (ServiceState.STARTING, "key")
    again = starts(table)["a"]
    assert (again.layers, again.head) == ("auto", "")
    assert table.busy_nodes == {"a": "s", "c": "s"}
    assert table.draining == {"b"}


class NodeModel:
    """A node as the table sees it: the processes that it runs, and its session."""

    def __init__(self) -> None:
        self.living: set[int] = set()
        self.is_alive = True


def check(table: ServiceTable) -> None:
    """Check what holds at any moment."""
    services_of: dict[str, set[str]] = {}
    for process in table.processes:
        services_of.setdefault(process.node, set()).add(process.service)
        assert process.service in table.services
    assert all(len(services) == 1 for services in services_of.values())
    for name, service in table.services.items():
        own = [each for each in table.processes if each.service == name]
        assert len({each.node for each in own}) == len(own)
        if service.state not in (
            ServiceState.STARTING,
            ServiceState.READY,
            ServiceState.RECOVERING,
        ):
            heads = [each for each in own if each.rank == 0]
            assert all(each.is_ending for each in heads or own), (name, own)
        else:
            assert any(each.rank == 0 for each in own)


def step(
    rng: random.Random, table: ServiceTable, nodes: dict[str, NodeModel], now: float, i: int
) -> None:
    """Let something happen."""
    name = rng.choice(sorted(nodes))
    node = nodes[name]
    match rng.randrange(9):
        case 0 | 1:
            busy = table.busy_nodes
            free = [
                each
                for each, model in nodes.items()
                if model.is_alive and each not in busy and each not in table.draining
            ]
            rng.shuffle(free)
            chosen = tuple(free[: rng.randint(1, 3)])
            if chosen:
                request = ServiceRequest(f"s{i}", "demo")
                table.deploy(request, NodeSelection(chosen, (1,) * len(chosen), "even"), "k")
        case 2 if table.services:
            table.delete(rng.choice(sorted(table.services)))
        case 3 if node.living:
            number = rng.choice(sorted(node.living))
            node.living.discard(number)
            if node.is_alive:
                table.on_exited(number, "it died", now)
        case 4 if node.is_alive:
            node.is_alive = False
            has_left = rng.random() < 0.3
            if has_left:
                node.living.clear()
            table.on_node_lost(name, "silence", has_left, now)
        case 5 if not node.is_alive:
            join(table, name, node, now)
        case 6:
            table.drain_node(name, now)
        case 7:
            table.forget_node(name)
            if not node.is_alive:
                table.on_node_lost(name, "it was forgotten", has_left=True, now=now)
        case 8 if node.living and node.is_alive:
            reading = rng.choice([READY, ServiceReading("recovering"), ServiceReading("dead")])
            table.on_reading(rng.choice(sorted(node.living)), reading, now)


def join(table: ServiceTable, name: str, node: NodeModel, now: float) -> None:
    node.is_alive = True
    wanted = table.on_node_joined(name, sorted(node.living), now)
    assert set(wanted) <= node.living
    for number in sorted(node.living - set(wanted)):
        node.living.discard(number)
        table.on_exited(number, "it was killed", now)


def deliver(table: ServiceTable, nodes: dict[str, NodeModel], now: float) -> None:
    """Let the nodes that are alive obey their commands."""
    while table.commands:
        commands, table.commands = table.commands, []
        for name, command in commands:
            node = nodes[name]
            if not node.is_alive:
                continue
            if isinstance(command, StartServiceProcess):
                node.living.add(command.process)
                if command.node_rank == 0:
                    table.on_started(command.process, f"{name}:1", "http://x")
                else:
                    assert command.head
            elif isinstance(command, DrainServiceNode):
                leaves = nodes[command.node]
                own = table.busy_nodes.get(command.node) == table.busy_nodes.get(name)
                numbers = [
                    each.number
                    for each in table.processes
                    if each.node == command.node and each.is_started
                ]
                if now % 1 < 0.5 or not own or not leaves.is_alive:
                    table.on_release_refused(command.process, command.node)
                else:
                    for number in numbers:
                        leaves.living.discard(number)
                        table.on_exited(number, "it exited with 0", now)
            elif isinstance(command, EndServiceProcess):
                node.living.discard(command.process)
                table.on_exited(command.process, "it exited with 0", now)
            check(table)


@pytest.mark.parametrize(
    "seed",
    [*range(20), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(20, 60))],
)
def test_nothing_is_left_behind_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    table = make_table()
    nodes = {name: NodeModel() for name in "abcde"}
    now = 0.0
    for i in range(60):
        now += rng.uniform(0, 4)
        step(rng, table, nodes, now, i)
        check(table)
        if rng.random() < 0.8:
            deliver(table, nodes, now)
        table.tick(now)
        for name in table.movable:
            table.fail(name, "no nodes")
        check(table)
    # All nodes return, all services are deleted: nothing runs any more.
    for name, node in nodes.items():
        if not node.is_alive:
            join(table, name, node, now)
    for name in list(table.services):
        table.delete(name)
    for _ in range(3):
        deliver(table, nodes, now)
        now += 100.0
        table.tick(now)
    for name, node in nodes.items():
        join(table, name, node, now)
    deliver(table, nodes, now)
    assert table.services == {}
    assert table.busy_nodes == {}
    assert not any(node.living for node in nodes.values())
