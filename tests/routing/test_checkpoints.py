"""When running requests are copied to other engines, and what is forgotten."""

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.routing.checkpoints import LEASE_SECONDS, MIN_SECONDS, Checkpoints, Copy, CopyTicket
from tests.support.examples import num_examples

SIZES = {"a": 4, "b": 8, "c": 16}


@settings(max_examples=num_examples(100, 1000))
@given(st.integers(1, 100), st.data())
def test_a_copy_is_whole_blocks_and_at_least_an_interval_more_than_the_one_before(
    interval: int, data: st.DataObject
) -> None:
    table: Checkpoints[str] = Checkpoints(interval)
    num_known, now, earlier = data.draw(st.integers(2, 200)), 0.0, None
    open_tickets: dict[int, Copy] = {}
    started: dict[int, float] = {}
    for ticket in range(1, data.draw(st.integers(1, 30))):
        num_known += data.draw(st.integers(0, 60))
        now += data.draw(st.floats(0, 20))
        names = data.draw(st.lists(st.sampled_from("bc"), unique=True))
        copy = table.plan("x", "a", [(name, SIZES[name]) for name in names], num_known, now)
        if copy is not None:
            assert copy.num_tokens % SIZES[copy.target] == 0
            assert 0 < copy.num_tokens < num_known, "the last token is not computed"
            assert copy.target == (
                earlier.target if earlier is not None and earlier.target in names else names[0]
            )
            num_earlier = earlier.num_tokens if earlier and earlier.target == copy.target else 0
            assert copy.num_tokens - num_earlier >= interval
            assert all(now - time >= MIN_SECONDS for time in started.values())
            table.on_started("x", copy, ticket, now)
            earlier, open_tickets[ticket], started[ticket] = copy, copy, now
            assert table.target_of("x") == copy.target
        elif names and not any(now - time < MIN_SECONDS for time in started.values()):
            target = earlier.target if earlier and earlier.target in names else names[0]
            num_earlier = earlier.num_tokens if earlier and earlier.target == target else 0
            size = SIZES[target]
            assert (num_known - 1) // size * size - num_earlier < interval
        for expired in table.pop_expired(now):
            assert now - started[expired.ticket] >= LEASE_SECONDS
            assert open_tickets.pop(expired.ticket) == expired.copy
        assert all(now - started[ticket] < LEASE_SECONDS for ticket in open_tickets)
    assert table.end("x") == [CopyTicket(*each) for each in open_tickets.items()]
    assert (table.keys, table.target_of("x")) == ([], "")


def test_copies_of_a_lost_engine_are_forgotten() -> None:
    table: Checkpoints[str] = Checkpoints(4)
    for key, target in (("x", "b"), ("y", "c")):
        table.on_started(key, Copy("a", target, 8), ord(key), 0.0)
    table.on_engine_lost("b")
    assert (table.target_of("x"), table.target_of("y")) == ("", "c")
    assert table.plan("x", "a", [("c", 4)], 13, 0.0) == Copy("a", "c", 12)
    assert table.plan("y", "a", [], 100, 5.0) is None
