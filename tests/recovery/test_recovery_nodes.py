"""Recovery with several nodes: properties over random events, and its rules one by one."""

from itertools import accumulate
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.recovery.actions import (
    AssignEpoch,
    ChangeShape,
    CloseInstances,
    DetachClient,
    KillWorker,
    RejectParked,
    SpawnWorker,
)
from gllm.recovery.placement import LOCAL_NODE
from gllm.recovery.records import STEADY_SECONDS, RecoveryLimits, RecoveryState
from tests.recovery.test_recovery import EVENTS, happen
from tests.support.examples import num_examples
from tests.support.recovery.node_world import NodeWorld

NODE_EVENTS = (
    "silent",
    "killed",
    "leave",
    "join",
    "join",
    "spare",
    "link",
    "two",
    "timeout",
    "short",
    "drain",
    "drain",
    "eager",
    "prepared",
)


def happen_to_nodes(world: NodeWorld, event: str, pick: int, seconds: float) -> None:
    """Let one event happen, if the world permits it."""
    remote = sorted(world.up.keys() - {LOCAL_NODE})
    node = remote[pick % len(remote)] if remote else ""
    lost = sorted(world.lost)
    match event:
        case "silent" | "killed" if node:
            world.lose_node(node, event == "killed", keeps_workers=pick % 4 > 0)
        case "two" if len(remote) > 1:
            world.lose_node(node, pick % 2 > 0)
            if not world.given_up:
                world.lose_node(remote[(pick + 1) % len(remote)], pick % 3 > 0)
        case "leave" if node:
            world.leave(node)
        case "join" if lost:
            capacity = 1 if pick % 5 == 0 else 99
            world.join(lost[pick % len(lost)], capacity)
        case "spare" if len(world.up) < 6:
            name = f"spare-{pick % 4}"
            if name not in world.up:
                world.join(name, 1 + pick % 3)
        case "drain" if node:
            world.drain(node)
        case "eager" if len(world.up) < 6:
            name = f"node-{10 + pick % 4}"
            if name not in world.up:
                world.join(name, 1 + pick % 3, is_spare=False)
        case "prepared":
            world.finish_change()
        case "link":
            world.fail_link()
        case "short":
            world.run_short_of_memory()
        case "timeout":
            world.wait(400.0)
        case _ if event in EVENTS:
            happen(world, event, pick, seconds)


@settings(max_examples=num_examples(300, 5000), deadline=None)
@given(
    stages=st.lists(st.tuples(st.integers(1, 2), st.integers(0, 3)), min_size=1, max_size=5),
    max_restarts=st.integers(0, 4),
    num_standbys=st.integers(0, 2),
    seed=st.integers(0, 99),
    spare_preloads=st.booleans(),
    flags=st.tuples(*[st.booleans()] * 4),
    rows=st.lists(
        st.tuples(
            st.sampled_from((*EVENTS, *NODE_EVENTS, *NODE_EVENTS)),
            st.integers(0, 50),
            st.floats(0.0, 100.0),
        ),
        max_size=60,
    ),
)
@example(  # A spare's workers, of which a planned change has reserved the first.
    stages=[(1, 0), (1, 1)],
    max_restarts=0,
    num_standbys=0,
    seed=0,
    spare_preloads=True,
    flags=(False, False, True, True),
    rows=[("answer", 0, 0.0), ("eager", 0, 0.0)],
)
@example(  # A spare's node takes a stage while a worker is started for another one.
    stages=[(1, 0), (1, 0), (1, 1)],
    max_restarts=2,
    num_standbys=0,
    seed=0,
    spare_preloads=True,
    flags=(False, False, False, False),
    rows=[
        *[("exit", 0, 0.0)] * 3,
        ("eager", 0, 0.0),
        ("prepared", 0, 0.0),
        ("exit", 0, 0.0),
        ("silent", 0, 0.0),
    ],
)
@example(  # A node returns with too little capacity after a spare has got other stages.
    stages=[(1, 0), (2, 1), (1, 2)],
    max_restarts=0,
    num_standbys=0,
    seed=0,
    spare_preloads=False,
    flags=(False, False, False, False),
    rows=[("silent", 0, 0.0), ("silent", 0, 0.0), ("eager", 0, 0.0), ("join", 0, 0.0)],
)
def test_random_losses_end_in_a_ready_or_a_dead_engine(
    stages: list[tuple[int, int]],
    max_restarts: int,
    num_standbys: int,
    seed: int,
    spare_preloads: bool,
    flags: tuple[bool, bool, bool, bool],
    rows: list[tuple[str, int, float]],
) -> None:
    # Neighbouring stages share a node, and the first ones are on the head's.
    numbers = sorted(node for _, node in stages)
    nodes = [LOCAL_NODE if node == numbers[0] else f"node-{node}" for node in numbers]
    limits = RecoveryLimits(
        max_restarts,
        num_standbys=num_standbys,
        spare_preloads=spare_preloads,
        standbys_map=seed % 2 == 0,
    )
    degrees = [degree for degree, _ in stages]
    world = NodeWorld(degrees, nodes, limits, seed, *flags)
    world.start()
    for event, pick, seconds in rows:
        happen_to_nodes(world, event, pick, seconds)
        if world.given_up:
            return
    world.finish_change()
    if world.given_up:
        return
    assert world.recovery.state is RecoveryState.READY
    assert not world.recovery.draining
    assert not world.recovery.is_overdue
    assert world.recovery.layers == world.layers
    placement = world.recovery.placement
    assert placement is not None
    assert placement.layers[0][0] == 0
    assert placement.workers_of(0)[0].node == LOCAL_NODE
    assert {worker.node for worker in placement.workers} <= world.up.keys()


NODES = [LOCAL_NODE, LOCAL_NODE, "b", "c"]


def ready_world(can_repartition: bool = True, **limits: Any) -> NodeWorld:
    """Return an engine of four stages on three nodes."""
    world = NodeWorld([1] * 4, NODES, RecoveryLimits(**limits), can_repartition=can_repartition)
    world.start()
    world.settle()
    world.log.clear()
    return world


def actions_of(world: NodeWorld, kind: type) -> list[Any]:
    return [action for _, action in world.log if isinstance(action, kind)]


def stage_nodes(world: NodeWorld) -> list[str]:
    assert world.recovery.placement is not None
    return [worker.node for worker in world.recovery.placement.workers]


def senders(world: NodeWorld) -> list[int]:
    assert world.recovery.placement is not None
    return world.recovery.placement.senders


def test_the_first_epoch_is_placed_on_the_nodes() -> None:
    world = NodeWorld([2, 1], [LOCAL_NODE, "b"], RecoveryLimits())
    world.start()
    assert [action.node for action in actions_of(world, SpawnWorker)] == [LOCAL_NODE] * 2 + ["b"]
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE] * 2 + ["b"]


def test_the_first_stage_is_always_on_the_node_of_the_head() -> None:
    with pytest.raises(ValueError, match="stage 0 has to be on the head's node"):
        NodeWorld([1, 1], ["b", LOCAL_NODE], RecoveryLimits())
    world = ready_world()
    assert world.recovery.on_node_lost(LOCAL_NODE, "impossible", world.now, is_death=True) == []
    assert world.recovery.state is RecoveryState.READY


def test_a_spare_takes_the_stages_of_a_lost_node_at_once() -> None:
    world = ready_world()
    world.join("small", capacity=0)
    world.join("s", capacity=1)
    survivors = senders(world)[:2] + senders(world)[3:]
    world.log.clear()
    world.lose_node("b", is_death=False)
    kinds = [type(action) for _, action in world.log]
    assert kinds == [DetachClient, CloseInstances, ChangeShape, SpawnWorker]
    (spawn,) = actions_of(world, SpawnWorker)
    assert (spawn.node, spawn.place) == ("s", 2)
    begin = world.now
    world.settle()
    assert world.now == begin, "nothing waits for the lost node"
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "s", "c"]
    assert [*senders(world)[:2], senders(world)[3]] == survivors
    assert world.recovery.layers == [(0, 2), (2, 4), (4, 6), (6, 8)]


def test_the_smallest_spare_with_the_capacity_is_used() -> None:
    world = NodeWorld([1, 2], [LOCAL_NODE, "b"], RecoveryLimits())
    world.start()
    world.settle()
    for name, capacity in (("one", 1), ("four", 4), ("two", 2)):
        world.join(name, capacity)
    world.lose_node("b", is_death=True)
    assert world.recovery.stage_nodes == [LOCAL_NODE, "two"]


def test_several_spares_share_the_stages_of_a_node() -> None:
    world = NodeWorld([1, 1, 1], [LOCAL_NODE, "b", "b"], RecoveryLimits())
    world.start()
    world.settle()
    world.join("x", 1)
    world.lose_node("b", is_death=True)
    assert world.recovery.state is RecoveryState.FORMING
    assert world.recovery.vacant_nodes == ["b"], "one spare is too small"
    world.join("y", 1)
    assert sorted(world.recovery.stage_nodes[1:]) == ["x", "y"]
    world.settle()
    assert world.is_attached


@pytest.mark.parametrize("keeps_workers", [True, False])
def test_a_node_that_returns_in_time_gets_its_stages_and_workers(keeps_workers: bool) -> None:
    world = ready_world(node_return_seconds=10.0)
    before = senders(world)
    world.lose_node("b", is_death=False, keeps_workers=keeps_workers)
    world.close_all()
    world.wait(9.0)
    assert actions_of(world, SpawnWorker) == []
    assert actions_of(world, ChangeShape) == []
    kept = world.join("b")
    assert kept == ({before[2]} if keeps_workers else set())
    assert actions_of(world, KillWorker) == []
    world.settle()
    assert stage_nodes(world) == NODES
    assert (senders(world) == before) == keeps_workers
    assert len(actions_of(world, SpawnWorker)) == (not keeps_workers)


def test_a_worker_that_cannot_free_its_memory_does_not_return() -> None:
    world = NodeWorld([1, 1], [LOCAL_NODE, "b"], RecoveryLimits())
    world.start()
    for sender in sorted(world.pending["loaded"]):
        world.answer("loaded", sender, keeps_weights=False)
    world.settle()
    world.lose_node("b", is_death=False)
    assert world.join("b") == set()
    world.settle()
    assert world.is_attached


def test_layers_are_cut_anew_if_the_node_does_not_return() -> None:
    world = ready_world(node_return_seconds=10.0)
    before = senders(world)
    world.lose_node("b", is_death=False)
    world.close_all()
    world.wait(9.9)
    assert actions_of(world, ChangeShape) == []
    world.wait(0.2)
    (change,) = actions_of(world, ChangeShape)
    assert change.shape.nodes == [LOCAL_NODE, LOCAL_NODE, "c"]
    assert list(accumulate(end - begin for begin, end in change.shape.layers))[-1] == 8
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]
    assert senders(world) == [before[0], before[1], before[3]], "survivors keep their processes"
    # The returned node becomes a spare, without its old workers, and is used for the next loss.
    world.log.clear()
    assert world.join("b") == set()
    assert world.is_attached
    world.lose_node("c", is_death=False)
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "b"]


def test_without_enough_memory_the_engine_waits_for_the_node_for_ever() -> None:
    world = ready_world(can_repartition=False, node_return_seconds=10.0, recovery_timeout=60.0)
    world.lose_node("c", is_death=True)
    world.wait(59.0)
    assert actions_of(world, RejectParked) == []
    world.wait(10_000.0)
    assert len(actions_of(world, RejectParked)) == 1
    assert actions_of(world, ChangeShape) == []
    assert not world.given_up
    world.join("c")
    world.settle()
    assert stage_nodes(world) == NODES
    assert not world.recovery.is_overdue


def reach_initializing(world: NodeWorld) -> None:
    """Let all workers load the weights."""
    for _ in range(300):
        if world.recovery.state is RecoveryState.INITIALIZING:
            return
        if not world.act_fairly():
            world.wait(max(0.0, world.recovery.next_deadline - world.now))
    raise AssertionError("the weights are not loaded")


def test_layers_that_do_not_fit_after_all_wait_for_the_lost_node() -> None:
    world = ready_world(node_return_seconds=10.0, recovery_timeout=60.0)
    before = senders(world)
    world.lose_node("b", is_death=False)
    world.close_all()
    world.wait(10.0)
    reach_initializing(world)
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]
    world.run_short_of_memory()
    assert not world.given_up
    assert world.recovery.vacant_nodes == ["b"]
    world.close_all()
    world.wait(10_000.0)
    assert len(actions_of(world, RejectParked)) == 1
    assert len(actions_of(world, AssignEpoch)) == 1, "no epoch in vain"
    world.join("b")
    world.settle()
    assert stage_nodes(world) == NODES
    assert world.recovery.layers == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [*senders(world)[:2], senders(world)[3]] == [*before[:2], before[3]]


def test_a_spare_that_is_too_small_after_all_is_not_used_again() -> None:
    world = ready_world(node_return_seconds=10.0, can_repartition=False)
    world.join("s", capacity=1)
    world.lose_node("b", is_death=False)
    reach_initializing(world)
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "s", "c"]
    world.run_short_of_memory()
    world.settle()
    # Nothing else could happen, so "b" has returned.
    assert stage_nodes(world) == NODES
    # Without other nodes to go back to it is an error.
    world.lose_node("b", is_death=False)
    world.join("b")
    reach_initializing(world)
    assert world.recovery.on_memory_short(world.epoch, "no memory", world.now) == []


def test_a_node_that_has_returned_meanwhile_gets_its_stages_back() -> None:
    world = ready_world(node_return_seconds=10.0)
    world.lose_node("b", is_death=False)
    world.close_all()
    world.wait(10.0)
    reach_initializing(world)
    world.join("b")
    world.run_short_of_memory()
    world.settle()
    assert stage_nodes(world) == NODES


def test_a_loss_changes_whether_the_layers_fit() -> None:
    world = ready_world(can_repartition=False)
    world.lose_node("b", is_death=False)
    world.wait(30.0)
    world.can_repartition = True
    world.lose_node("c", is_death=False)
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE]


def test_each_loss_is_judged_anew() -> None:
    """Before the first epoch nobody knows what fits; the next loss of the node finds out."""
    world = NodeWorld([1] * 4, NODES, RecoveryLimits(), can_repartition=False)
    world.start()
    world.lose_node("c", is_death=False)
    world.wait(30.0)
    world.join("c")
    world.settle()
    world.can_repartition = True
    world.lose_node("c", is_death=False)
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "b"]


def test_two_nodes_are_lost_at_once() -> None:
    world = ready_world(node_return_seconds=10.0)
    world.lose_node("b", is_death=False)
    world.wait(5.0)
    world.lose_node("c", is_death=True)
    world.wait(9.0)
    assert actions_of(world, ChangeShape) == [], "the second one may still return"
    world.join("c")
    (change,) = actions_of(world, ChangeShape)
    assert change.shape.nodes == [LOCAL_NODE, LOCAL_NODE, "c"]
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "c"]


def test_a_node_that_leaves_is_not_awaited() -> None:
    world = ready_world()
    begin = world.now
    world.leave("c")
    assert len(actions_of(world, ChangeShape)) == 1
    world.settle()
    assert world.now == begin
    assert stage_nodes(world) == [LOCAL_NODE, LOCAL_NODE, "b"]


def test_silence_uses_up_no_restart_and_the_death_of_an_agent_does() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(4):
        world.lose_node("b", is_death=False)
        world.join("b")
        world.settle()
    world.lose_node("b", is_death=True)
    world.join("b")
    world.settle()
    assert not world.given_up
    world.lose_node("b", is_death=True)
    assert "b is lost" in world.given_up


def test_a_committed_step_clears_the_deaths_of_a_node() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(4):
        world.lose_node("b", is_death=True)
        world.join("b")
        world.settle()
        world.commit()
    assert not world.given_up


def test_deaths_of_a_node_that_are_far_apart_do_not_end_an_idle_engine() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(4):
        world.lose_node("b", is_death=True)
        world.join("b")
        world.settle()
        world.wait(STEADY_SECONDS)
    assert not world.given_up


@pytest.mark.parametrize("phase", ["forming", "loaded", "ready", "warm"])
def test_a_node_is_lost_before_the_engine_was_ever_ready(phase: str) -> None:
    world = NodeWorld([1] * 4, NODES, RecoveryLimits(join_seconds=100.0), can_repartition=False)
    world.start()
    if phase == "forming":
        # An epoch that is being left, because a worker has died.
        world.exit(senders(world)[1])
    else:
        while not world.pending[phase]:
            assert world.act_fairly()
    world.lose_node("b", is_death=False)
    world.wait(99.0)
    assert not world.given_up
    world.join("b")
    world.settle()
    assert stage_nodes(world) == NODES
    assert world.recovery.recovering_since is None


def test_an_engine_that_was_never_ready_names_the_node_that_it_misses() -> None:
    world = NodeWorld([1] * 4, NODES, RecoveryLimits(join_seconds=100.0), can_repartition=False)
    world.start()
    world.lose_node("b", is_death=False)
    world.wait(101.0)
    assert "b is lost; node b did not return within 100 seconds" in world.given_up


def test_a_node_is_lost_while_the_workers_measure() -> None:
    world = NodeWorld([1, 1], [LOCAL_NODE, "b"], RecoveryLimits(), should_measure=True)
    world.start()
    while not world.pending["measured"]:
        assert world.act_fairly()
    world.lose_node("b", is_death=False)
    assert len(world.join("b")) == 1
    world.settle()
    assert world.num_measurements == 2
    assert stage_nodes(world) == [LOCAL_NODE, "b"]


def test_the_loss_of_a_spare_is_no_event_for_the_requests() -> None:
    world = ready_world(num_standbys=1)
    world.join("s", 1)
    standby = next(sender for sender, node in world.node_of.items() if node == "s")
    world.log.clear()
    world.lose_node("s", is_death=True)
    assert world.is_attached
    assert world.log == []
    world.lose_node("b", is_death=False)
    assert "s" not in world.recovery.stage_nodes
    assert standby not in world.alive


def test_a_standby_worker_takes_places_of_its_own_node_only() -> None:
    world = ready_world(num_standbys=1)
    standbys = {world.node_of[s]: s for s in world.alive if world.place[s] is None}
    assert sorted(standbys) == ["b", "c", LOCAL_NODE]
    world.exit(senders(world)[2])
    world.settle()
    assert senders(world)[2] == standbys["b"]


def test_a_spare_that_is_lost_with_new_stages_leaves_them_to_the_returned_node() -> None:
    world = ready_world()
    world.join("s", 1)
    world.lose_node("b", is_death=False)
    assert world.recovery.stage_nodes[2] == "s"
    assert world.join("b") == set(), "its stage is taken"
    world.lose_node("s", is_death=False)
    assert world.recovery.stage_nodes[2] == "b"
    world.settle()
    assert stage_nodes(world) == NODES


def test_late_reports_of_workers_of_a_lost_node_are_ignored() -> None:
    world = ready_world()
    late = senders(world)[2]
    world.lose_node("b", is_death=False)
    recovery, now = world.recovery, world.now
    assert recovery.on_exit(late, "late", now) == []
    assert recovery.on_failed(late, "late", now) == []
    assert recovery.on_closed(late, now) == []
    assert recovery.is_exiting(late)


def test_a_returned_node_with_less_capacity_gets_no_stages() -> None:
    world = NodeWorld([1, 2], [LOCAL_NODE, "b"], RecoveryLimits(), can_repartition=False)
    world.start()
    world.settle()
    world.lose_node("b", is_death=True)
    world.join("b", capacity=1)
    assert world.recovery.state is RecoveryState.FORMING
    assert all(action.node != "b" for action in actions_of(world, SpawnWorker)[3:])
    world.join("s", capacity=2)
    world.settle()
    assert stage_nodes(world) == [LOCAL_NODE, "s", "s"]


def test_links_that_fail_are_tried_again_for_ever_once_the_engine_was_ready() -> None:
    world = ready_world(max_restarts=1)
    before = senders(world)
    for _ in range(6):
        world.fail_link()
        while not any(world.pending.values()):
            if not world.act_fairly():
                world.wait(40.0)
    world.settle()
    assert senders(world) == before, "nobody dies for it"
    assert len(actions_of(world, AssignEpoch)) >= 6
    assert world.recovery.on_epoch_failed(world.epoch - 1, "stale", world.now) == []


def test_links_that_fail_at_the_first_start_end_the_engine() -> None:
    world = NodeWorld([1, 1], [LOCAL_NODE, "b"], RecoveryLimits(max_restarts=2))
    world.start()
    while not world.given_up:
        world.fail_link()
        while not (any(world.pending.values()) or world.given_up):
            if not world.act_fairly():
                world.wait(40.0)
    assert world.num_failed_links == 3
    assert "could not be connected: no route" in world.given_up
