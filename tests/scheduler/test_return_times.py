"""Learned return times: bounded, honest about conversations that do not return, in small memory."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.scheduler import return_times
from gllm.scheduler.return_times import (
    AGE_EDGES,
    BIN_SECONDS,
    FIRST_REQUEST,
    MAX_CLIENTS,
    MAX_CONVERSATIONS,
    NUM_BINS,
    PRIOR_RATES,
    UNKNOWN_GROUP,
    ConversationGroup,
    ReturnCounts,
    ReturnTimes,
    age_bin,
    estimate_rates,
    hazard_in,
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


def hazards_of(times: ReturnTimes, group: ConversationGroup, now: float) -> list[float]:
    """Return the learned probability of a return in each bin."""
    return [hazard_in(*pair) for pair in zip(times.rates(group, now), BIN_SECONDS, strict=True)]


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
        hazards_of(
            times, ConversationGroup("", age_bin(pause) // return_times.BINS_PER_KIND), now + 1000
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
    hazards = hazards_of(times, ConversationGroup("", FIRST_REQUEST), now + 100.0)
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
            assert all(0 < hazard < 1 for hazard in hazards_of(times, group, now))
            assert all(0 < value < 10 for value in times.values(group, now))


RATES = st.lists(st.floats(1e-6, 4.0), min_size=NUM_BINS, max_size=NUM_BINS)


@given(rates=RATES)
def test_the_value_is_at_least_the_rate_of_every_wait(rates: list[float]) -> None:
    """It is the best ratio over all times after which one could give up, one bin included."""
    values = index_returns(rates)
    for index, (value, rate) in enumerate(zip(values, rates, strict=True)):
        assert value >= rate
        if index + 1 < NUM_BINS:
            # Waiting longer helps only towards something better.
            assert value <= max(rate, values[index + 1]) * (1 + 1e-9)


@given(rates=RATES)
def test_where_rates_do_not_rise_values_are_the_rates(rates: list[float]) -> None:
    falling = sorted(rates, reverse=True)
    for index in range(0, NUM_BINS - 1, 2):
        falling[index + 1] = falling[index]
    assert index_returns(falling) == falling


def count_returns(seconds: list[float]) -> ReturnCounts:
    counts = ReturnCounts()
    for pause in seconds:
        counts.observe(age_bin(pause), has_returned=True)
    return counts


NO_OPEN = [0] * NUM_BINS


@settings(max_examples=num_examples(100, 3000), deadline=None)
@given(
    seconds=st.lists(st.floats(0, 1e4), max_size=60),
    num_open=st.integers(0, 40),
    last_open=st.integers(0, NUM_BINS),
)
def test_rates_are_positive_and_rise_beyond_chance_alone(
    seconds: list[float], num_open: int, last_open: int
) -> None:
    open_counts = [num_open] * last_open + [0] * (NUM_BINS - last_open)
    rates = estimate_rates(count_returns(seconds), open_counts, PRIOR_RATES)
    assert len(rates) == NUM_BINS
    assert all(0 < rate < 5 for rate in rates)
    # A return in each of many bins is no sign that returns become more likely with the time.
    each_once = count_returns([edge + 0.01 for edge in AGE_EDGES])
    rates = estimate_rates(each_once, open_counts, PRIOR_RATES)
    assert rates == sorted(rates, reverse=True)


def test_a_rise_is_believed_after_a_few_returns_and_not_after_one() -> None:
    believed = [
        estimate_rates(count_returns([30.0] * count), NO_OPEN, PRIOR_RATES)[age_bin(30.0)]
        > 2 * PRIOR_RATES[age_bin(30.0)]
        for count in range(20)
    ]
    assert not any(believed[:2])
    assert all(believed[8:])


@pytest.mark.parametrize("seed", range(3))
def test_pauses_without_memory_and_equal_kinds_keep_the_order_of_lru(seed: int) -> None:
    """Exponential pauses: the rate is the same at all times, and whatever the last pause was."""
    rng, times = Random(seed), ReturnTimes()
    for number in range(40):
        pauses = [rng.expovariate(1 / 30) for _ in range(9)]
        now = pause_repeatedly(times, f"s{number}", pauses, float(number))
    values = [
        times.values(ConversationGroup("", kind), now)
        for kind in range(NUM_BINS // return_times.BINS_PER_KIND)
    ]
    assert values[0] == sorted(values[0], reverse=True)
    assert all(other == values[0] for other in values)
    first = times.values(ConversationGroup("", FIRST_REQUEST), now)
    assert first == sorted(first, reverse=True)


def test_single_requests_say_nothing_about_conversations_that_have_returned() -> None:
    times = ReturnTimes()
    for number in range(400):
        times.on_end(times.on_arrival("", f"s{number}", [], number), f"s{number}", None, number)
    now = pause_repeatedly(times, "agent", [30.0], 400.0)
    returned = times.values(ConversationGroup("", age_bin(30.0) // return_times.BINS_PER_KIND), now)
    first = times.values(ConversationGroup("", FIRST_REQUEST), now)
    assert all(returned[index] > 3 * first[index] for index in range(age_bin(30.0) + 1))
