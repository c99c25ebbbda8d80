"""Queue of fetches and circuit breakers of engines: rules that hold in any order of calls."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.transport.kv.fetch_queue import (
    MAX_OPEN_SECONDS,
    MAX_PEERS,
    OPEN_SECONDS,
    FetchQueue,
    PeerCircuits,
)

PEER, OTHER = b"peer", b"other"
PEERS = st.sampled_from([b"a", b"b", b"c"])


def test_after_a_silence_there_is_one_probe_at_a_time_and_the_pauses_double() -> None:
    circuits, now, pause = PeerCircuits(), 100.0, OPEN_SECONDS
    assert circuits.may_fetch(PEER, now)
    for _ in range(10):
        assert circuits.on_silence(PEER, now, now) == pause
        assert not circuits.may_fetch(PEER, now + pause - 0.01)
        assert circuits.may_fetch(OTHER, now)
        now += pause
        assert circuits.may_fetch(PEER, now)
        assert not circuits.may_fetch(PEER, now), "one probe at a time"
        pause = min(2 * pause, MAX_OPEN_SECONDS)
    circuits.on_answer(PEER)
    assert all(circuits.may_fetch(PEER, now) for _ in range(3))
    assert len(circuits) == 0


def test_fetches_that_began_together_count_as_one_failure() -> None:
    circuits = PeerCircuits()
    pauses = [circuits.on_silence(PEER, 1.0, now) for now in (3.0, 3.1, 3.2)]
    assert pauses == [OPEN_SECONDS, 0.0, 0.0]


def test_a_cancelled_probe_is_followed_by_another_one() -> None:
    circuits = PeerCircuits()
    circuits.on_silence(PEER, 0.0, 0.0)
    assert circuits.may_fetch(PEER, OPEN_SECONDS)
    circuits.on_cancelled(PEER)
    assert circuits.may_fetch(PEER, OPEN_SECONDS)


def test_few_peers_are_remembered() -> None:
    circuits = PeerCircuits()
    for number in range(MAX_PEERS + 10):
        circuits.on_silence(b"%d" % number, 0.0, 0.0)
    assert len(circuits) == MAX_PEERS
    assert circuits.may_fetch(b"0", 0.0)
    assert not circuits.may_fetch(b"%d" % MAX_PEERS, 0.0)


@given(calls=st.lists(st.tuples(st.sampled_from(["push", "pop", "end", "drop"]), PEERS)))
def test_queue_keeps_its_bounds_and_its_order(calls: list[tuple[str, bytes]]) -> None:
    queue: FetchQueue[int] = FetchQueue(max_running=2, max_waiting=3)
    waiting: dict[bytes, list[int]] = {b"a": [], b"b": [], b"c": []}
    running = dict.fromkeys(waiting, 0)
    for number, (call, peer) in enumerate(calls):
        match call:
            case "push":
                is_full = len(waiting[peer]) == 3
                assert queue.push(peer, number) != is_full
                if not is_full:
                    waiting[peer].append(number)
            case "pop":
                able = {each for each in waiting if waiting[each] and running[each] < 2}
                item = queue.pop()
                assert (item is not None) == bool(able)
                if item is not None:
                    assert item[0] in able
                    assert item[1] == waiting[item[0]].pop(0)
                    running[item[0]] += 1
            case "end" if running[peer]:
                queue.end(peer)
                running[peer] -= 1
            case "drop":
                assert queue.drop(peer) == waiting[peer]
                waiting[peer].clear()
        assert queue.num_waiting == sum(map(len, waiting.values()))


def test_peers_take_turns() -> None:
    queue: FetchQueue[int] = FetchQueue(max_running=4, max_waiting=8)
    for number in range(3):
        queue.push(PEER, number)
    queue.push(OTHER, 3)
    order = [queue.pop() for _ in range(5)]
    assert order == [(PEER, 0), (OTHER, 3), (PEER, 1), (PEER, 2), None]
