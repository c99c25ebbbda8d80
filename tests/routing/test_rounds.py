"""Rounds of placements: heartbeats, and requests that wait for room in order."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.rounds import PlacementRounds
from tests.support.examples import num_examples

HEARTBEAT = 0.5
GAPS = st.lists(st.sampled_from((0.0, 0.1, 0.2, 0.49, 0.5, 2.0)), min_size=1, max_size=40)


@settings(max_examples=num_examples(60, 2000))
@given(GAPS)
def test_no_request_waits_longer_than_a_heartbeat_and_rounds_are_no_closer(
    gaps: list[float],
) -> None:
    rounds, now = PlacementRounds(HEARTBEAT), 0.0
    begun: list[float] = []
    held: list[float] = []
    for gap in gaps:
        now += gap
        while held and rounds.next_time <= now:
            # The timer that the first of them has set.
            assert rounds.next_time - held[0] <= HEARTBEAT + 1e-9
            held.clear()
            begun.append(rounds.next_time)
            rounds.begin(rounds.next_time)
        if rounds.holds(bool(held), now):
            held.append(now)
        else:
            assert not held
            begun.append(now)
            rounds.begin(now)
    # A request that comes after a heartbeat without any is placed at once.
    assert begun[0] == gaps[0]
    assert all(later - earlier >= HEARTBEAT - 1e-9 for earlier, later in pairwise(begun))


def test_requests_without_a_heartbeat_are_placed_at_their_arrival() -> None:
    rounds = PlacementRounds()
    for now in (0.0, 0.0, 1.0):
        assert not rounds.holds(True, now)
        rounds.begin(now)
        assert not rounds.on_unplaced()


def test_requests_behind_one_that_finds_no_room_wait_for_the_next_round() -> None:
    rounds = PlacementRounds(waits_for_room=True)
    assert not rounds.holds(False, 0.0)
    assert rounds.on_unplaced()
    assert rounds.holds(True, 0.1)
    assert not rounds.holds(False, 0.1), "the one that waited has ended"
    rounds.begin(0.2)
    assert not rounds.holds(True, 0.2)


def test_a_heartbeat_places_long_prompts_first_and_a_queue_keeps_the_order() -> None:
    requests = [(0, 10, 1.0), (0, 90, 2.0), (-1, 5, 3.0), (0, 90, 1.5), (1, 500, 0.0)]
    heartbeat, queue = PlacementRounds(HEARTBEAT), PlacementRounds(waits_for_room=True)
    order = sorted(requests, key=lambda each: heartbeat.rank(*each))
    assert order == [requests[index] for index in (2, 3, 1, 0, 4)]
    order = sorted(requests, key=lambda each: queue.rank(*each))
    assert order == [requests[index] for index in (2, 0, 3, 1, 4)]
