"""Properties of Recovery over random rows of events, and its rules one by one."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.actions import (
    AssignEpoch,
    AttachClient,
    ChooseLayers,
    CloseInstances,
    DetachClient,
    GiveUp,
    KillWorker,
    MeasureWorkers,
    RejectParked,
    SpawnWorker,
)
from gllm.recovery.phase_times import RecoveryPhase
from gllm.recovery.records import (
    FIRST_BACKOFF_SECONDS,
    MAX_BACKOFF_SECONDS,
    STANDBY_SECONDS,
    STEADY_SECONDS,
    RecoveryLimits,
    RecoveryState,
)
from tests.support.examples import num_examples
from tests.support.recovery.world import World

EVENTS = (
    "exit",
    "poison",
    "report",
    "freeze",
    "close",
    "answer",
    "answer",
    "answer",
    "commit",
    "connect",
    "wait",
    "fair",
    "fair",
    "settle",
    "stale",
    "impossible",
    "change",
    "prepare",
    "prepare",
)


def happen(world: World, event: str, pick: int, seconds: float) -> None:
    """Let one event happen, if the world permits it."""
    alive = sorted(world.alive)
    sender = alive[pick % len(alive)] if alive else 0
    match event:
        case "exit" | "poison":
            world.exit(sender, event == "poison")
        case "report" | "freeze":
            world.lose(sender, event == "report", pick % 7 == 0)
        case "close" if world.closing:
            world.close(sorted(world.closing)[pick % len(world.closing)])
        case "answer":
            for phase, waiting in world.pending.items():
                if waiting:
                    world.answer(phase, sorted(waiting)[pick % len(waiting)], pick % 3 > 0)
                    break
        case "commit":
            world.commit()
        case "connect":
            world.connect(sender)
        case "wait":
            world.wait(seconds)
        case "fair":
            world.act_fairly()
        case "settle":
            world.settle()
        case "impossible":
            world.num_impossible = 1 + pick % 3
        case "change":
            world.change_layers(pick)
        case "prepare":
            for waiting in [*world.preparing.values()]:
                if waiting:
                    world.prepare(sorted(waiting)[pick % len(waiting)])
        case "stale":
            report_stale_events(world, 10_000 + pick)


def report_stale_events(world: World, sender: int) -> None:
    """Report events of a process that is unknown, and answers that nobody waits for."""
    recovery, now = world.recovery, world.now
    events = [recovery.on_closed, recovery.on_loaded, recovery.on_ready]
    for event in events:
        world.run(event(sender, now))
    for end in (recovery.on_exit, recovery.on_failed, recovery.on_lost):
        world.run(end(sender, "unknown", now))
    recovery.on_progress(sender, now)
    assert recovery.on_prepared(sender, sender, now) == []
    for epoch in (recovery.epoch - 1, recovery.epoch + 1):
        assert recovery.on_assignment_failed(epoch, "stale", now) == []
    assert recovery.start(now) == []
    if not world.pending["warm"]:
        world.run(recovery.on_warm(now))


@settings(max_examples=num_examples(300, 5000), deadline=None)
@given(
    degrees=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    max_restarts=st.integers(0, 4),
    num_standbys=st.integers(0, 2),
    seed=st.integers(0, 99),
    should_measure=st.booleans(),
    rows=st.lists(
        st.tuples(st.sampled_from(EVENTS), st.integers(0, 50), st.floats(0.0, 100.0)), max_size=60
    ),
)
def test_random_events_end_in_a_ready_or_a_dead_engine(
    degrees: list[int],
    max_restarts: int,
    num_standbys: int,
    seed: int,
    should_measure: bool,
    rows: list[tuple[str, int, float]],
) -> None:
    limits = RecoveryLimits(max_restarts, num_standbys=num_standbys, standbys_map=seed % 2 == 0)
    world = World(degrees, limits, seed, should_measure)
    world.start()
    for event, pick, seconds in rows:
        happen(world, event, pick, seconds)
        if world.given_up:
            break
    world.finish_change()
    if not world.given_up:
        assert world.recovery.state is RecoveryState.READY
        assert not world.recovery.is_overdue
        assert world.recovery.layers == world.layers
        assert (world.num_measurements > 0) == should_measure
        # Every place is filled, and the standby workers are there after their backoff.
        world.wait(MAX_BACKOFF_SECONDS)
        for sender in sorted(world.killed & world.alive):
            world.exit(sender)
        world.wait(MAX_BACKOFF_SECONDS)
        held = [world.place[sender] for sender in world.alive]
        assert sorted(s for s in held if s is not None) == list(range(sum(degrees)))
        assert held.count(None) == num_standbys


def ready_world(num_stages: int = 2, degrees: Sequence[int] = (), **limits: Any) -> World:
    world = World(degrees or [1] * num_stages, RecoveryLimits(**limits))
    world.start()
    world.settle()
    world.log.clear()
    return world


def actions_of(world: World, kind: type) -> list[Any]:
    return [action for _, action in world.log if isinstance(action, kind)]


def sender_of(world: World, stage: int, rank: int = 0) -> int:
    assert world.recovery.placement is not None
    return world.recovery.placement.workers_of(stage)[rank].sender


def test_a_death_restarts_its_place_and_survivors_keep_their_processes() -> None:
    world = ready_world(3)
    victim, survivors = sender_of(world, 1), [sender_of(world, 0), sender_of(world, 2)]
    world.exit(victim)
    assert [type(action) for _, action in world.log] == [DetachClient, CloseInstances, SpawnWorker]
    assert world.recovery.recovering_since == world.now
    world.settle()
    assert [sender_of(world, 0), sender_of(world, 2)] == survivors
    assert sender_of(world, 1) not in (victim, *survivors)
    assert world.epoch == 2
    assert world.recovery.recovering_since is None


def test_a_dead_rank_ends_the_epoch_and_is_replaced_in_its_place() -> None:
    world = ready_world(degrees=[2, 1])
    victim, survivors = sender_of(world, 0, 1), [sender_of(world, 0), sender_of(world, 1)]
    assert str(world.recovery.name_of(victim)) == "stage 0 rank 1"
    assert str(world.recovery.name_of(survivors[1])) == "stage 1"
    world.exit(victim)
    (closing,) = actions_of(world, CloseInstances)
    assert closing.senders == survivors
    (spawn,) = actions_of(world, SpawnWorker)
    assert spawn.place == 1
    world.settle()
    assert [sender_of(world, 0), sender_of(world, 1)] == survivors
    assert sender_of(world, 0, 1) == spawn.sender


def test_deaths_are_counted_by_rank() -> None:
    world = ready_world(degrees=[3], max_restarts=1)
    for rank in range(3):
        world.exit(sender_of(world, 0, rank))
        world.settle()
    assert not world.given_up
    world.exit(sender_of(world, 0, 1))
    assert "died" in world.given_up


def test_deaths_that_are_far_apart_do_not_end_an_idle_engine() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(5):
        world.exit(sender_of(world, 1))
        world.settle()
        world.wait(STEADY_SECONDS)
    assert not world.given_up
    for seconds in (STEADY_SECONDS - 1.0, 0.0):
        world.exit(sender_of(world, 1))
        world.settle()
        world.wait(seconds)
    assert "died" in world.given_up


@pytest.mark.parametrize("max_restarts", [0, 1, 3])
def test_a_place_that_keeps_dying_ends_the_engine(max_restarts: int) -> None:
    world = ready_world(max_restarts=max_restarts)
    for _ in range(max_restarts):
        world.exit(sender_of(world, 1))
        world.settle()
        assert not world.given_up
    world.exit(sender_of(world, 0))
    if max_restarts:
        assert not world.given_up, "deaths are counted by place"
        world.settle()
        world.exit(sender_of(world, 1))
    assert "died" in world.given_up
    assert isinstance(world.log[-1][1], GiveUp)


def test_a_committed_step_clears_the_count() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(5):
        world.exit(sender_of(world, 0))
        world.settle()
        world.commit()
    assert not world.given_up


def test_poison_that_kills_all_ranks_uses_up_no_restart() -> None:
    world = ready_world(degrees=[3, 1], max_restarts=1)
    for _ in range(3):
        world.exit(sender_of(world, 0, 1), is_poison=True)
        world.exit(sender_of(world, 0))
        world.exit(sender_of(world, 0, 2))
        world.settle()
    assert not world.given_up
    # Deaths for another reason count.
    world.exit(sender_of(world, 0, 1))
    world.exit(sender_of(world, 0))
    world.settle()
    world.exit(sender_of(world, 0))
    assert "died" in world.given_up


def test_poison_uses_up_no_restart() -> None:
    world = ready_world(max_restarts=1)
    for _ in range(5):
        world.exit(sender_of(world, 0), is_poison=True)
        world.settle()
    assert not world.given_up


def test_backoff_grows_and_is_bounded() -> None:
    world = ready_world(1, max_restarts=20)
    delays = []
    for _ in range(20):
        world.spawn_times.clear()
        world.exit(sender_of(world, 0))
        died = world.now
        world.settle()
        ((spawned, _),) = world.spawn_times
        delays.append(spawned - died)
    nominal = [0.0] + [
        min(FIRST_BACKOFF_SECONDS * 2**power, MAX_BACKOFF_SECONDS) for power in range(19)
    ]
    assert all(0.75 * each <= delay <= each for each, delay in zip(nominal, delays, strict=True))
    assert len(set(delays[-8:])) > 1, "jitter"


def test_assignments_that_fail_are_tried_again_until_the_limit() -> None:
    world = ready_world(2, max_restarts=2)
    world.num_impossible = 2
    survivor = sender_of(world, 1)
    world.exit(sender_of(world, 0))
    begin = world.now
    world.settle()
    assert world.is_attached
    assert sender_of(world, 1) == survivor, "nobody dies for it"
    assert len(actions_of(world, AssignEpoch)) == 3
    assert world.now - begin >= 0.75 * (FIRST_BACKOFF_SECONDS + 2 * FIRST_BACKOFF_SECONDS)
    world.commit()
    world.num_impossible = 3
    world.exit(sender_of(world, 0))
    world.settle()
    assert "could not be assigned: no space" in world.given_up


def test_assignments_of_the_first_start_are_tried_again() -> None:
    world = World([1, 1], RecoveryLimits())
    world.num_impossible = 2
    world.start()
    world.settle()
    assert world.is_attached


def test_a_death_while_an_assignment_is_delayed_is_recovered() -> None:
    world = ready_world(2)
    world.num_impossible = 1
    world.exit(sender_of(world, 0))
    while world.num_impossible:
        assert world.act_fairly()
    world.exit(sender_of(world, 1))
    world.settle()
    assert world.is_attached
    assert len(actions_of(world, AssignEpoch)) == 2


def test_a_survivor_that_does_not_close_is_killed_and_does_not_count() -> None:
    world = ready_world(max_restarts=1)
    stuck = sender_of(world, 0)
    world.exit(sender_of(world, 1))
    world.wait(world.limits.close_seconds)
    assert [action.sender for action in actions_of(world, KillWorker)] == [stuck]
    assert actions_of(world, AssignEpoch) == [], "the old process is not reaped"
    world.settle()
    assert sender_of(world, 0) != stuck
    world.exit(sender_of(world, 0))
    assert not world.given_up


def test_a_worker_that_still_starts_has_more_time_to_close() -> None:
    world = World([1, 1], RecoveryLimits())
    world.start()
    starting = sender_of(world, 0)
    world.exit(sender_of(world, 1))
    assert [action.senders for action in actions_of(world, CloseInstances)] == [[starting]]
    world.wait(60.0)
    assert actions_of(world, KillWorker) == []
    world.connect(starting)
    world.wait(world.limits.close_seconds)
    assert [action.sender for action in actions_of(world, KillWorker)] == [starting]
    world.settle()


def test_survivors_that_cannot_free_their_memory_are_killed() -> None:
    world = World([1, 1], RecoveryLimits())
    world.start()
    for sender in sorted(world.pending["loaded"]):
        world.answer("loaded", sender, keeps_weights=False)
    world.settle()
    survivor = sender_of(world, 0)
    world.exit(sender_of(world, 1))
    assert [action.sender for action in actions_of(world, KillWorker)] == [survivor]
    assert actions_of(world, CloseInstances) == []
    world.settle()
    assert sender_of(world, 0) != survivor


def test_a_standby_worker_takes_the_place_and_is_replaced_when_the_engine_is_ready() -> None:
    world = ready_world(2, num_standbys=1)
    (standby,) = [sender for sender in world.alive if world.place[sender] is None]
    world.exit(sender_of(world, 1))
    assert actions_of(world, SpawnWorker) == []
    world.settle()
    assert sender_of(world, 1) == standby
    assert isinstance(world.log[-1][1], AttachClient)
    world.wait(0.9 * STANDBY_SECONDS)
    assert actions_of(world, SpawnWorker) == [], "imports must not slow down what continues"
    world.wait(0.2 * STANDBY_SECONDS)
    (spawn,) = actions_of(world, SpawnWorker)
    assert spawn.place is None


def test_a_standby_worker_maps_the_weights_of_every_place_once_it_has_connected() -> None:
    world = World([1, 2], RecoveryLimits(num_standbys=1, standbys_map=True))
    world.start()
    world.settle()
    (standby,) = [sender for sender in world.alive if world.place[sender] is None]
    if standby not in world.connected:
        assert world.mapped == {}
        world.connect(standby)
    everything = [(0, (0, 2)), (0, (2, 4)), (1, (2, 4))]
    assert world.mapped == {standby: everything}
    world.exit(standby)
    world.wait(60.0)
    (successor,) = [sender for sender in world.alive if world.place[sender] is None]
    world.connect(successor)
    assert world.mapped[successor] == everything
    world.exit(sender_of(world, 1))
    world.settle()
    assert sender_of(world, 1) == successor


def test_other_layers_are_mapped_after_a_change() -> None:
    world = ready_world(2, num_standbys=1, standbys_map=True)
    (standby,) = [sender for sender in world.alive if world.place[sender] is None]
    world.connect(standby)
    assert world.mapped[standby] == [(0, (0, 2)), (0, (2, 4))]
    world.run(world.recovery.change_layers([(0, 1), (1, 4)], "faster", world.now))
    for sender in sorted(world.preparing[max(world.preparing)]):
        world.prepare(sender)
    world.settle()
    assert world.mapped[standby] == [(0, (0, 1)), (0, (1, 4))]


def test_the_phases_of_a_recovery_add_up_to_it() -> None:
    world = ready_world(2)
    assert world.recovery.phase_times.seconds == {}, "the start is no recovery"
    begin = world.now
    world.exit(sender_of(world, 1))
    world.wait(1.0)
    world.settle()
    seconds = world.recovery.phase_times.seconds
    assert set(seconds) == set(RecoveryPhase)
    assert sum(seconds.values()) == pytest.approx(world.now - begin)
    assert seconds[RecoveryPhase.CLOSE] == pytest.approx(1.0)


def test_a_standby_worker_that_was_killed_takes_no_place() -> None:
    world = ready_world(1, num_standbys=1)
    (standby,) = [sender for sender in world.alive if world.place[sender] is None]
    world.lose(standby, is_report=False)
    assert world.is_attached
    world.exit(sender_of(world, 0))
    world.settle()
    assert sender_of(world, 0) != standby


def test_standby_workers_that_die_at_once_back_off() -> None:
    world = ready_world(1, num_standbys=1)
    world.spawn_times.clear()
    begin = world.now
    for _ in range(12):
        (standby,) = [sender for sender in world.alive if world.place[sender] is None]
        world.exit(standby)
        if world.recovery.next_deadline < float("inf"):
            world.wait(world.recovery.next_deadline - world.now)
    assert world.now - begin > 100
    assert world.is_attached


def test_the_timeout_rejects_parked_requests_once_and_the_recovery_goes_on() -> None:
    world = ready_world(1, recovery_timeout=20.0)
    world.exit(sender_of(world, 0))
    is_overdue = []
    for seconds in (19.0, 200.0):
        world.wait(seconds)
        is_overdue.append(world.recovery.is_overdue)
    assert is_overdue == [False, True]
    assert len(actions_of(world, RejectParked)) == 1
    world.settle()
    assert not world.recovery.is_overdue


def test_a_worker_that_does_not_load_is_killed_and_progress_extends_its_time() -> None:
    world = World([1, 1], RecoveryLimits(phase_seconds=50.0))
    world.start()
    slow, stuck = sender_of(world, 0), sender_of(world, 1)
    world.wait(40.0)
    world.recovery.on_progress(slow, world.now)
    world.wait(12.0)
    assert [action.sender for action in actions_of(world, KillWorker)] == [stuck]
    assert world.recovery.state is RecoveryState.FORMING
    world.settle()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_reported_failure_of_the_first_start_is_final(stage: int) -> None:
    world = World([1, 1], RecoveryLimits())
    world.start()
    world.lose(sender_of(world, stage), is_report=True)
    assert "fails" in world.given_up


def test_modules_that_cannot_be_imported_end_the_first_start_only() -> None:
    world = World([1, 1], RecoveryLimits())
    world.start()
    world.fail_import(sender_of(world, 1))
    assert "import" in world.given_up
    world = ready_world(1)
    world.fail_import(sender_of(world, 0))
    world.settle()
    assert (world.given_up, world.epoch) == ("", 2), (
        "the update of an installation may be the cause"
    )


def test_a_death_during_the_first_start_is_recovered() -> None:
    world = World([1, 1], RecoveryLimits())
    world.start()
    world.exit(sender_of(world, 1))
    assert world.recovery.recovering_since is None, "it has not been ready before"
    world.settle()
    assert world.epoch == 2


def test_a_failed_worker_is_killed_and_counts_once() -> None:
    world = ready_world(1, max_restarts=1)
    victim = sender_of(world, 0)
    world.lose(victim, is_report=True)
    assert actions_of(world, SpawnWorker) == [], "the old process is not reaped"
    world.exit(victim)
    world.settle()
    assert not world.given_up


def test_after_stop_nothing_follows() -> None:
    world = ready_world(2)
    senders = sorted(world.alive)
    world.recovery.stop()
    for sender in senders:
        assert world.recovery.on_exit(sender, "stopped", world.now) == []
    assert world.recovery.on_timer(world.now + 1e6) == []
    assert world.recovery.next_deadline == float("inf")


def measuring_world(num_stages: int = 2, **limits: Any) -> World:
    world = World([1] * num_stages, RecoveryLimits(**limits), should_measure=True)
    world.measured_layers = [(0, 1), (1, 2 * num_stages)] if num_stages == 2 else world.layers
    world.start()
    return world


def test_workers_measure_once_all_have_connected_and_the_layers_are_divided_by_it() -> None:
    world = measuring_world()
    assert world.recovery.state is RecoveryState.MEASURING
    world.connect(1)
    assert actions_of(world, MeasureWorkers) == []
    world.connect(2)
    (measure,) = actions_of(world, MeasureWorkers)
    assert measure.placement.senders == [1, 2]
    world.answer("measured", 2)
    assert actions_of(world, ChooseLayers) == []
    world.answer("measured", 1)
    (assign,) = actions_of(world, AssignEpoch)
    assert assign.placement.layers == [(0, 1), (1, 4)]
    assert assign.placement.epoch == 1
    world.settle()
    # A restart needs no measurement.
    world.exit(sender_of(world, 1))
    world.settle()
    assert len(actions_of(world, MeasureWorkers)) == 1
    assert actions_of(world, AssignEpoch)[-1].placement.layers == [(0, 1), (1, 4)]


def test_a_death_while_workers_measure_is_recovered() -> None:
    world = measuring_world()
    for sender in (1, 2):
        world.connect(sender)
    world.answer("measured", 1)
    world.exit(2)
    assert world.closing == {1}, "a probe is ended as an instance is"
    world.settle()
    assert len(actions_of(world, MeasureWorkers)) == 2
    assert actions_of(world, AssignEpoch)[-1].placement.layers == [(0, 1), (1, 4)]
    assert 1 in world.alive


def test_a_worker_that_holds_memory_after_its_measurement_is_replaced() -> None:
    world = measuring_world(max_restarts=0)
    for sender in (1, 2):
        world.connect(sender)
    world.answer("measured", 1, keeps_weights=False)
    world.answer("measured", 2)
    assert [action.sender for action in actions_of(world, KillWorker)] == [1]
    world.settle()
    assert world.is_attached, "it is no death"
    assert len(actions_of(world, MeasureWorkers)) == 1
    assert 1 not in world.alive
    assert 2 in world.alive


def test_a_worker_that_does_not_measure_is_killed() -> None:
    world = measuring_world(phase_seconds=50.0)
    for sender in (1, 2):
        world.connect(sender)
    world.answer("measured", 1)
    world.wait(51.0)
    (kill,) = actions_of(world, KillWorker)
    assert kill.sender == 2
    assert kill.cause == "measuring took longer than 50 seconds"
    world.settle()
    assert world.is_attached


def test_after_the_end_layers_do_not_change() -> None:
    world = ready_world()
    world.recovery.stop()
    assert world.recovery.change_layers([(0, 1), (1, 4)], "late", world.now) == []
