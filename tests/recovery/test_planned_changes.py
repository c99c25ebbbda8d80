"""Planned changes: layers are prepared while the engine serves, and nobody dies for them."""

from typing import Any

import pytest

from gllm.recovery.actions import (
    BeginChange,
    ChangeShape,
    CloseInstances,
    DetachClient,
    DismissNode,
    KillWorker,
    PrepareLayers,
    SpawnWorker,
)
from gllm.recovery.placement import LOCAL_NODE
from gllm.recovery.records import RecoveryLimits
from tests.recovery.test_recovery import ready_world as ready_machine
from tests.recovery.test_recovery import sender_of
from tests.recovery.test_recovery_nodes import NODES, actions_of, senders, stage_nodes
from tests.support.recovery.node_world import NodeWorld
from tests.support.recovery.world import World


def ready_world(
    nodes: list[str] = NODES,
    can_extend: bool = True,
    uses_joined_nodes: bool = False,
    can_repartition: bool = True,
    **limits: Any,
) -> NodeWorld:
    """Return an engine that serves, with a stage for each name of a node."""
    limits = {"max_restarts": 0, **limits}
    world = NodeWorld(
        [1] * len(nodes),
        nodes,
        RecoveryLimits(**limits),
        can_repartition=can_repartition,
        can_extend=can_extend,
        uses_joined_nodes=uses_joined_nodes,
    )
    world.start()
    world.settle()
    world.log.clear()
    return world


def kinds(world: World) -> list[type]:
    return [type(action) for _, action in world.log]


def test_other_layers_are_prepared_while_the_engine_serves() -> None:
    world = ready_machine(max_restarts=0)
    alive = set(world.alive)
    layers = [(0, 3), (3, 4)]
    world.run(world.recovery.change_layers(layers, "other layers are faster", world.now))
    assert kinds(world) == [PrepareLayers]
    assert world.is_attached
    first, last = sorted(world.preparing[1])
    world.prepare(first)
    world.prepare(first)
    assert world.is_attached, "one worker still loads"
    world.prepare(last)
    assert kinds(world)[1:] == [BeginChange, DetachClient, CloseInstances, ChangeShape]
    assert world.recovery.recovering_since == world.now
    world.settle()
    assert world.alive == alive
    assert world.epoch == 2
    assert not world.given_up, "it is no death"
    assert world.recovery.placement is not None
    assert world.recovery.placement.layers == layers
    world.log.clear()
    world.run(world.recovery.change_layers(layers, "the same", world.now))
    assert world.log == []


def test_a_death_ends_the_preparation_and_it_begins_again() -> None:
    world = ready_machine()
    world.run(world.recovery.change_layers([(0, 1), (1, 4)], "faster", world.now))
    world.exit(sender_of(world, 0))
    world.settle()
    assert world.recovery.placement is not None
    assert world.recovery.placement.layers == [(0, 2), (2, 4)]
    world.finish_change()
    assert world.recovery.placement.layers == [(0, 1), (1, 4)]
    numbers = [each.number for each in actions_of(world, PrepareLayers)]  # type: ignore[arg-type]
    assert numbers == [1, 2]
    late = world.recovery.on_prepared(sender_of(world, 0), 1, world.now)
    assert late == [], "an answer to an earlier preparation"


def test_a_change_that_is_not_prepared_in_time_happens_all_the_same() -> None:
    world = ready_machine(phase_seconds=50.0)
    world.run(world.recovery.change_layers([(0, 1), (1, 4)], "faster", world.now))
    world.wait(49.0)
    assert kinds(world) == [PrepareLayers]
    world.wait(2.0)
    assert BeginChange in kinds(world)
    world.settle()
    assert world.layers == [(0, 1), (1, 4)]


def test_a_drained_node_gives_its_layers_to_the_others_and_is_dismissed() -> None:
    world = ready_world()
    before = senders(world)
    assert world.drain("b")
    assert kinds(world) == [PrepareLayers]
    assert world.recovery.draining == {"b"}
    world.finish_change()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]
    assert senders(world) == [before[0], before[1], before[3]]
    assert [kill.sender for kill in actions_of(world, KillWorker)] == [before[2]]
    assert world.dismissed == ["b"]
    (dismissal,) = actions_of(world, DismissNode)
    assert "b has been drained" in dismissal.cause
    assert not world.recovery.draining
    assert not world.given_up, "no restart is used up, although there are none"


def test_a_spare_takes_the_stages_of_a_drained_node() -> None:
    world = ready_world()
    world.join("s", 1)
    world.log.clear()
    world.drain("c")
    (spawn,) = actions_of(world, SpawnWorker)
    assert (spawn.node, spawn.place) == ("s", None)
    assert world.is_attached
    world.finish_change()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "b", "s"]
    assert senders(world)[3] == spawn.sender, "the worker that has the layers"
    assert world.layers == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_a_standby_worker_is_prepared_first() -> None:
    world = ready_world(num_standbys=1)
    world.join("s", 1)
    (standby,) = (sender for sender, node in world.node_of.items() if node == "s")
    world.drain("c")
    world.finish_change()
    assert senders(world)[3] == standby


def test_a_spare_that_is_drained_leaves_at_once() -> None:
    world = ready_world(num_standbys=1)
    world.join("s", 1)
    world.log.clear()
    world.drain("s")
    assert kinds(world) == [DismissNode]
    assert world.is_attached


def test_all_other_nodes_can_be_drained_at_once() -> None:
    world = ready_world()
    world.drain("b")
    world.drain("c")
    world.finish_change()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE]
    assert world.dismissed == ["b", "c"]
    assert world.epoch == 2, "one pause for both"


def test_what_cannot_be_drained_is_refused() -> None:
    world = ready_world(can_repartition=False)
    assert "memory" in world.recovery.refuse_drain("b")
    assert "head" in world.recovery.refuse_drain(LOCAL_NODE)
    assert not world.drain("c")
    world.join("s", 1)
    assert world.recovery.refuse_drain("b") == ""
    world.lose_node("c", is_death=False)
    assert "not ready" in world.recovery.refuse_drain("b")


def test_a_drain_goes_on_after_a_death() -> None:
    world = ready_world(max_restarts=3)
    world.drain("b")
    world.exit(senders(world)[3])
    world.settle()
    assert stage_nodes(world) == NODES
    world.finish_change()
    assert world.dismissed == ["b"]
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]


def test_a_drain_ends_if_the_layers_do_not_fit_any_more() -> None:
    world = ready_world(node_return_seconds=10.0)
    world.drain("b")
    world.lose_node("c", is_death=False)
    world.can_repartition = False
    world.join("c")
    world.finish_change()
    assert "memory" in world.recovery.drain_errors["b"]
    assert stage_nodes(world) == NODES
    assert world.recovery.refuse_drain("b")


def test_a_drain_ends_if_the_memory_turns_out_not_to_suffice() -> None:
    world = ready_world()
    world.drain("b")
    for sender in sorted(world.preparing[1]):
        world.prepare(sender)
    while not world.pending["ready"]:
        assert world.act_fairly()
    world.run_short_of_memory()
    world.finish_change()
    assert stage_nodes(world) == NODES
    assert "no memory" in world.recovery.drain_errors["b"]
    assert world.dismissed == []


def test_nobody_waits_for_a_draining_node_that_is_lost() -> None:
    world = ready_world(node_return_seconds=100.0)
    world.drain("b")
    begin = world.now
    world.lose_node("b", is_death=False)
    world.settle()
    assert world.now == begin
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]
    assert not world.recovery.draining


def test_a_node_that_returns_after_a_recut_gets_stages_again() -> None:
    world = ready_world(node_return_seconds=10.0)
    world.lose_node("b", is_death=False, keeps_workers=False)
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]
    before = senders(world)
    world.log.clear()
    world.join("b", capacity=1)
    assert kinds(world) == [SpawnWorker, PrepareLayers]
    assert world.is_attached
    world.finish_change()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c", "b"]
    assert senders(world)[:3] == before
    (begin,) = actions_of(world, BeginChange)
    assert begin.kind == "joined"


@pytest.mark.parametrize("uses_joined_nodes", [False, True])
def test_a_further_node_gets_stages_only_with_rebalance(uses_joined_nodes: bool) -> None:
    world = ready_world(uses_joined_nodes=uses_joined_nodes)
    world.join("d", is_spare=False)
    world.finish_change()
    expected = [*NODES, "d"] if uses_joined_nodes else NODES
    assert stage_nodes(world) == expected
    world.join("s", is_spare=True)
    world.finish_change()
    assert stage_nodes(world) == expected


def test_a_new_worker_that_dies_again_and_again_ends_the_attempts() -> None:
    world = ready_world(uses_joined_nodes=True, max_restarts=2)
    world.join("d", is_spare=False)
    for number in range(1, 4):
        assert [*world.preparing] == [number]
        world.exit(next(s for s, node in world.node_of.items() if node == "d" and s in world.alive))
        world.wait(60.0)
        for sender in sorted(world.killed & world.alive):
            world.exit(sender)
    assert world.preparing == {3: world.preparing[3]}
    world.wait(1000.0)
    assert world.is_attached
    assert stage_nodes(world) == NODES
    # A node that joins is a reason to try again.
    world.join("e", is_spare=False)
    assert kinds(world)[-1] is PrepareLayers


def test_a_node_that_is_lost_while_it_prepares_costs_nothing() -> None:
    world = ready_world(uses_joined_nodes=True)
    world.join("d", is_spare=False)
    assert kinds(world)[-1] is PrepareLayers
    world.lose_node("d", is_death=True)
    world.wait(1000.0)
    assert world.is_attached
    assert world.epoch == 1
    assert not world.given_up


def test_a_node_that_cannot_prepare_its_layers_loads_them_later() -> None:
    world = ready_world()
    world.drain("b")
    assert world.recovery.on_preparation_failed(world.epoch, world.now) == []
    world.run(world.recovery.on_preparation_failed(world.epoch + 1, world.now))
    assert not world.is_attached
    world.finish_change()
    assert world.dismissed == ["b"]


def test_a_spare_holds_the_layers_of_the_costliest_stage() -> None:
    world = NodeWorld(
        [1, 1, 2],
        [LOCAL_NODE, "b", "c"],
        RecoveryLimits(spare_preloads=True),
        can_repartition=False,
    )
    world.start()
    world.settle()
    world.log.clear()
    world.join("small", 1)
    assert world.log == [], "it has no place for two ranks"
    world.join("s", 2)
    assert kinds(world) == [SpawnWorker, SpawnWorker, PrepareLayers]
    (action,) = actions_of(world, PrepareLayers)
    assert action.node == "s"
    standbys = sorted(world.preloaded)
    assert [world.preloaded[sender] for sender in standbys] == [(2, 0), (2, 1)]
    world.commit()
    world.wait(1000.0)
    assert len(actions_of(world, PrepareLayers)) == 1, "once is enough"
    # One that dies is started again, and loads the layers again.
    world.exit(standbys[1])
    world.wait(60.0)
    standbys = sorted(set(world.preloaded) & world.alive)
    assert len(actions_of(world, PrepareLayers)) == 2
    world.log.clear()
    world.lose_node("c", is_death=False)
    world.settle()
    assert senders(world)[2:] == standbys, "the ranks that hold the layers"


def test_a_spare_holds_other_layers_once_the_stages_have_others() -> None:
    world = ready_world([LOCAL_NODE, "b"], spare_preloads=True)
    world.join("s", 1)
    assert len(actions_of(world, PrepareLayers)) == 1
    world.run(world.recovery.change_layers([(0, 1), (1, 4)], "faster", world.now))
    world.finish_change()
    change, preload = actions_of(world, PrepareLayers)[1:]
    assert (change.node, preload.node) == (None, "s")
    assert preload.placement.layers == [(0, 1), (1, 4)]


def begin(world: NodeWorld, phase: str) -> None:
    """Prepare the planned change, and let its epoch get as far as a phase."""
    for waiting in [*world.preparing.values()]:
        for sender in sorted(waiting):
            world.prepare(sender)
    while not world.pending[phase]:
        assert world.act_fairly()


@pytest.mark.parametrize("phase", ["loaded", "ready", "warm"])
@pytest.mark.parametrize("event", ["exit", "report", "freeze", "node", "link", "late"])
def test_a_joined_machine_that_cannot_begin_costs_a_pause_and_no_more(
    event: str, phase: str
) -> None:
    world = ready_world(uses_joined_nodes=True, node_return_seconds=100.0, phase_seconds=50.0)
    world.join("d", is_spare=False)
    begin(world, phase)
    assert "d" in stage_nodes(world)
    now, new = world.now, senders(world)[-1]
    match event:
        case "exit":
            world.exit(new)
        case "report" | "freeze":
            world.lose(new, event == "report")
        case "node":
            world.lose_node("d", is_death=True)
        case "link":
            world.fail_link()
        case "late":
            for sender in sorted(world.pending[phase] - {new}):
                if phase != "warm":
                    world.answer(phase, sender)
            world.wait(51.0)
            now = world.now
    world.settle()
    assert not world.given_up, "there are no restarts"
    assert world.now == now, "nothing waits for the machine"
    assert stage_nodes(world) == NODES
    assert world.num_reverts == 1
    epoch = world.epoch
    world.wait(1000.0)
    world.finish_change()
    assert (world.epoch, stage_nodes(world)) == (epoch, NODES), "the machine has to join again"


def test_a_death_before_the_new_stages_serve_uses_up_no_restart() -> None:
    world = ready_world()
    world.drain("b")
    begin(world, "ready")
    world.exit(senders(world)[0])
    world.finish_change()
    assert not world.given_up
    assert stage_nodes(world) == NODES


def test_stages_that_cannot_be_assigned_are_those_before() -> None:
    world = ready_world(uses_joined_nodes=True)
    world.join("d", is_spare=False)
    world.num_impossible = 1
    for sender in sorted(world.preparing[1]):
        world.prepare(sender)
    world.settle()
    assert stage_nodes(world) == NODES
    assert not world.given_up


def test_a_drain_whose_stages_cannot_be_connected_ends() -> None:
    world = ready_world()
    world.drain("b")
    begin(world, "ready")
    world.fail_link()
    world.finish_change()
    assert stage_nodes(world) == NODES
    assert "no route" in world.recovery.drain_errors["b"]
    assert world.dismissed == []


def test_a_worker_that_cannot_read_its_layers_ends_the_change() -> None:
    world = ready_world(uses_joined_nodes=True)
    world.join("d", is_spare=False)
    new = max(world.preparing[1])
    world.run(world.recovery.on_prepared(new, 1, world.now, "no such file"))
    world.preparing.clear()
    world.finish_change()
    assert world.epoch == 1
    assert stage_nodes(world) == NODES
    world.drain("b")
    survivor = senders(world)[0]
    world.run(world.recovery.on_prepared(survivor, 2, world.now, "no such file"))
    assert "no such file" in world.recovery.drain_errors["b"]
    assert world.is_attached
