"""Learned return times: bounded, honest about conversations that do not return, in small memory."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler import return_times
from gllm.scheduler.return_times import (
    AGE_EDGES,
    FIRST_REQUEST,
    MAX_CLIENTS,
    MAX_CONVERSATIONS,
    NUM_BINS,
    UNKNOWN_GROUP,
    ConversationGroup,
    ReturnTimes,
    age_bin,
    index_returns,
)
from tests.support.examples import num_examples


def pause_repeatedly(times: ReturnTimes, session: str, seconds: list[float], start: float) -> float:
    """Let a conversation return after each pause; return the time of the last arrival."""
    now = start
    group = times.on_arrival("", session, [], now)
    for pause in seconds:
        times.on_end(group, session, None, now)
        now += pause
        group = times.on_arrival("", session, [], now)
    return now


def test_without_observations_a_conversation_is_worth_less_the_longer_it_is_idle() -> None:
    values = ReturnTimes().values(UNKNOWN_GROUP, 0.0)
    assert values == sorted(values, reverse=True)


def test_a_conversation_is_worth_most_just_before_its_tool_answers() -> None:
    times = ReturnTimes()
    for number in range(30):
        now = pause_repeatedly(times, f"s{number}", [30.0] * 5, 10.0 * number)
    group = ConversationGroup("", age_bin(30.0) // return_times.BINS_PER_KIND)
    values = times.values(group, now)
    best = max(range(NUM_BINS), key=values.__getitem__)
    assert AGE_EDGES[best] <= 30.0 < AGE_EDGES[best + 1]
    assert values[: best + 1] == sorted(values[: best + 1])
    assert values[best + 1] < values[0]


def test_kinds_of_conversations_are_told_apart_by_their_last_pause() -> None:
    times = ReturnTimes()
    for number in range(40):
        pause = 600.0 if number % 2 else 5.0
        now = pause_repeatedly(times, f"s{number}", [pause] * 6, number)
    short, long = (
        times.hazards(
            ConversationGroup("", age_bin(pause) // return_times.BINS_PER_KIND), now + 1000
        )
        for pause in (5.0, 600.0)
    )
    assert short[age_bin(5.0)] > 0.8 > 0.2 > long[age_bin(5.0)]
    assert long[age_bin(600.0)] > 0.8


def test_conversations_that_do_not_return_count() -> None:
    """Of those that have returned, all have; of all, half."""
    times = ReturnTimes()
    for number in range(200):
        now = float(number)
        group = times.on_arrival("", f"s{number}", [], now)
        times.on_end(group, f"s{number}", None, now)
        if number % 2:
            times.on_arrival("", f"s{number}", [], now + 3.0)
    hazards = times.hazards(ConversationGroup("", FIRST_REQUEST), now + 100.0)
    assert 0.4 < hazards[age_bin(3.0)] < 0.55


def test_a_prompt_that_continues_an_earlier_one_is_its_conversation() -> None:
    times = ReturnTimes()
    first, second = [b"a", b"b"], [b"a", b"b", b"c", b"d"]
    group = times.on_arrival("", "", first, 0.0)
    times.on_end(group, "", first[-1], 0.0)
    assert times.on_arrival("", "", [b"a", b"x"], 1.0).kind == FIRST_REQUEST
    assert times.num_idle == 1
    assert times.on_arrival("", "", second, 8.0).kind == age_bin(8.0) // return_times.BINS_PER_KIND
    assert times.num_idle == 0
    # Sessions of the same name belong to different conversations of different clients.
    times.on_end(ConversationGroup("a", FIRST_REQUEST), "name", None, 9.0)
    times.on_end(ConversationGroup("b", FIRST_REQUEST), "name", None, 9.0)
    times.on_arrival("b", "name", [], 10.0)
    assert times.num_idle == 1


def test_100000_names_take_no_more_memory_and_displace_no_other_client() -> None:
    times = ReturnTimes()
    honest = [f"s{number}" for number in range(100)]
    for name in honest:
        times.on_end(times.on_arrival("honest", name, [], 0.0), name, None, 0.0)
    rng = Random(0)
    for number in range(100_000):
        name = f"{rng.getrandbits(64):x}" * 8
        group = times.on_arrival("hostile", name, [], number * 1e-4)
        times.on_end(group, name, None, number * 1e-4)
    assert times.num_idle == MAX_CONVERSATIONS
    returned = [times.on_arrival("honest", name, [], 30.0).kind for name in honest]
    assert FIRST_REQUEST not in returned
    for number in range(1000):
        client = f"key {number}"
        times.on_end(times.on_arrival(client, "s", [], 40.0), "s", None, 40.0)
        times.values(ConversationGroup(client, number % 7), 40.0)
    assert times.num_clients == MAX_CLIENTS
    assert times.num_idle <= MAX_CONVERSATIONS
    assert len(times._values) <= MAX_CLIENTS * NUM_BINS + 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["arrive", "end", "wait"]),
        st.integers(0, 5),
        st.sampled_from(["", "key 0", "key 1"]),
        st.floats(0, 1e4),
    ),
    max_size=80,
)


@settings(max_examples=num_examples(60, 1000), deadline=None)
@given(events=EVENTS, limit=st.integers(1, 4))
def test_probabilities_and_values_are_bounded(
    events: list[tuple[str, int, str, float]], limit: int
) -> None:
    times, now = ReturnTimes(), 0.0
    groups: dict[tuple[str, int], ConversationGroup] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(return_times, "MAX_CONVERSATIONS", limit)
        patch.setattr(return_times, "MAX_CLIENTS", 2)
        patch.setattr(return_times, "MAX_COUNT", 4.0)
        for event, number, client, seconds in events:
            session = str(number) if number else ""
            hashes = [bytes([number, index]) for index in range(1, 3)]
            if event == "arrive":
                groups[client, number] = times.on_arrival(client, session, hashes, now)
            elif event == "end":
                group = groups.get((client, number), ConversationGroup(client, FIRST_REQUEST))
                times.on_end(group, session, hashes[-1], now)
            else:
                now += seconds
            assert times.num_idle <= limit
            assert times.num_clients <= 2
            assert times.num_idle == sum(len(c.idle) for c in times._clients.values())
        for group in {*groups.values(), UNKNOWN_GROUP}:
            assert all(0 < hazard < 1 for hazard in times.hazards(group, now))
            assert all(0 < value < 10 for value in times.values(group, now))


@given(hazards=st.lists(st.floats(0.001, 0.999), min_size=NUM_BINS, max_size=NUM_BINS))
def test_the_value_is_at_least_the_rate_of_every_wait(hazards: list[float]) -> None:
    """It is the best ratio over all times after which one could give up, one bin included."""
    values = index_returns(hazards)
    for index, (value, hazard) in enumerate(zip(values, hazards, strict=True)):
        width = return_times.BIN_SECONDS[index]
        assert value >= hazard / (width * (1 - hazard / 2)) * (1 - 1e-9)
        if index + 1 < NUM_BINS:
            # Waiting longer helps only towards something better.
            assert value <= max(hazard / (width * (1 - hazard / 2)), values[index + 1]) * (1 + 1e-9)
