"""Rules for requests that are computed when workers die."""

import pytest

from gllm.messages.requests import PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.head.suspects import (
    MAX_FINGERPRINTS,
    REFUSAL_SECONDS,
    PoisonList,
    SuspectTracker,
    fingerprint,
)

OWNERS = {1: "a", 2: "b", 3: "c"}


def test_the_first_death_makes_no_suspect_not_even_of_a_lone_request() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    assert tracker.on_death([1], OWNERS) is None
    assert tracker.suspects("abc") == []


def test_the_second_death_makes_suspects() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1, 2], OWNERS)
    assert tracker.on_death([2, 1, 3], OWNERS) is None
    assert tracker.suspects("cba") == ["b", "a"]
    assert tracker.num_deaths("c") == 1


def test_requests_without_rows_are_not_counted() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    for _ in range(9):
        tracker.on_death([1], OWNERS)
        tracker.on_death([], OWNERS)
        tracker.on_death([77], OWNERS)
    assert tracker.num_deaths("a") == 9


def test_the_third_death_alone_ends_the_request() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1, 2], OWNERS)
    tracker.on_death([1, 2], OWNERS)
    tracker.isolate("a", [4])
    assert tracker.on_death([4], {4: "a"}) == "a"
    assert tracker.isolated is None


def test_deaths_that_are_explained_count_for_nobody() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1, 2], OWNERS)
    tracker.on_death([2, 3], OWNERS)
    tracker.on_death([1, 2], OWNERS)
    tracker.isolate("a", [4])
    assert tracker.on_death([4], {4: "a"}) == "a"
    assert [tracker.num_deaths(each) for each in "abc"] == [0, 1, 1]
    tracker.clear("b")
    assert tracker.has_deaths
    tracker.clear("c")
    assert not tracker.has_deaths


def test_the_third_death_in_company_does_not() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    for _ in range(5):
        assert tracker.on_death([1, 2], OWNERS) is None
    tracker.isolate("a", [4])
    assert tracker.on_death([4, 9], {4: "a"}) is None, "rows of an aborted request ran beside it"
    assert tracker.num_deaths("a") == 6


def test_a_death_while_a_suspect_has_no_row_is_not_its_fault() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1], OWNERS)
    tracker.on_death([1], OWNERS)
    tracker.isolate("a", [4])
    assert tracker.on_death([], {4: "a"}) is None
    assert tracker.suspects("a") == ["a"], "it runs alone again"


def test_a_new_token_clears() -> None:
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1], OWNERS)
    tracker.on_death([1], OWNERS)
    tracker.isolate("a", [4])
    tracker.clear("a")
    assert tracker.suspects("a") == []
    assert tracker.on_death([4], {4: "a"}) is None
    assert tracker.num_deaths("a") == 1


def test_isolation_ends_with_the_epoch_and_deaths_stay_counted() -> None:
    """A planned restart is nobody's fault."""
    tracker: SuspectTracker[str] = SuspectTracker()
    tracker.on_death([1], OWNERS)
    tracker.on_death([1], OWNERS)
    tracker.isolate("a", [4])
    tracker.isolated = None
    assert tracker.isolated is None
    assert tracker.num_deaths("a") == 2
    assert tracker.on_death([4], {4: "a"}) is None


def test_equal_requests_are_refused_for_ten_minutes() -> None:
    poison = PoisonList()
    sampling = SequenceSamplingParams(seed=3, logit_bias={4: 1.0, 5: 2.0})
    poison.add([1, 2], sampling, 100.0)
    again = SequenceSamplingParams(seed=9, logit_bias={5: 2.0, 4: 1.0})
    for now in (100.0, 100.0 + REFUSAL_SECONDS - 0.1):
        with pytest.raises(PoisonRequestError, match="refused for another"):
            poison.check([1, 2], again, now)
        poison.check([1, 2, 3], again, now)
        poison.check([1, 2], SequenceSamplingParams(), now)
    poison.check([1, 2], again, 100.0 + REFUSAL_SECONDS)


def test_a_repeated_poison_is_refused_for_longer() -> None:
    poison, sampling = PoisonList(), SequenceSamplingParams()
    poison.add([1], sampling, 0.0)
    poison.add([2], sampling, 1.0)
    poison.add([1], sampling, 300.0)
    poison.check([2], sampling, REFUSAL_SECONDS + 1.0)
    with pytest.raises(PoisonRequestError):
        poison.check([1], sampling, REFUSAL_SECONDS + 1.0)


def test_the_list_is_bounded() -> None:
    poison, sampling = PoisonList(), SequenceSamplingParams()
    for token in range(MAX_FINGERPRINTS + 5):
        poison.add([token], sampling, 0.0)
    poison.check([4], sampling, 0.0)
    with pytest.raises(PoisonRequestError):
        poison.check([5], sampling, 0.0)


def test_prompts_of_any_kind_have_a_fingerprint() -> None:
    from array import array

    sampling = SequenceSamplingParams()
    assert fingerprint(array("i", [1, 2]), sampling) == fingerprint([1, 2], sampling)
    assert fingerprint([1], sampling) != fingerprint([1, 2], sampling)
