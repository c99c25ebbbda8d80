"""Nothing of a stop string leaks, and nothing else is lost."""

import itertools
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.options.limits import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS
from gllm.text.detokenizer import StopMatcher, StopStrings
from tests.support.examples import num_examples


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule in words: the first to be complete ends the text, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=num_examples(200, 10000), deadline=None)
@given(
    text=st.text("aab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_against_the_plain_rule(text, stops, cuts):
    matcher = StopMatcher(StopStrings(stops))
    shown, found = "", None
    edges = sorted({0, *(min(cut, len(text)) for cut in cuts), len(text)})
    for start, end in itertools.pairwise(edges):
        piece, found = matcher.push(text[start:end])
        shown += piece
        if found is not None:
            break
        held = text[len(shown) : end]
        assert not held or any(stop.startswith(held) for stop in stops)  # only for a reason
    expected, stop = plainly(text, stops)
    assert found == stop
    assert shown + ("" if found is not None else matcher.finish()) == expected


def test_match_over_pieces():
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("abc E") == ("abc ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("O EN") == ("ENO ", None)
    assert matcher.push("D tail") == ("", "END")


def test_first_to_be_complete_wins_and_releases_what_the_other_held():
    matcher = StopMatcher(StopStrings(["abcd", "bc"]))
    assert matcher.push("ab") == ("", None)
    assert matcher.push("cd") == ("a", "bc")


@settings(max_examples=num_examples(80, 3000), deadline=None)
@given(
    text=st.lists(st.sampled_from(["a", "aab", "b" * 9, "a" * 40, "ab" * 20]), max_size=12),
    stops=st.lists(st.text("ab", min_size=15, max_size=60), max_size=3),
    size=st.integers(1, 50),
)
def test_long_stops_that_nearly_match(text, stops, size):
    text = "".join(text)
    matcher, shown, found = StopMatcher(StopStrings(stops)), "", None
    for start in range(0, len(text), size):
        piece, found = matcher.push(text[start : start + size])
        shown += piece
        if found is not None:
            break
    expected, stop = plainly(text, stops)
    assert (shown + ("" if found is not None else matcher.finish()), found) == (expected, stop)


def test_choices_share_what_is_prepared():
    """The largest stop strings: memory and comparisons do not grow with their length."""
    calls = 0

    class Counted(str):
        def startswith(self, *tail):
            nonlocal calls
            calls += 1
            return super().startswith(*tail)

    longest = "a" * (MAX_STOP_CHARACTERS - 1)
    stops = StopStrings([Counted(longest + chr(66 + i)) for i in range(MAX_STOP_STRINGS)])
    tracemalloc.start()
    matchers = [StopMatcher(stops) for _ in range(128)]
    assert tracemalloc.get_traced_memory()[0] < 128 * 1024
    tracemalloc.stop()
    matcher, text = matchers[0], ("a" * 500 + "b") * 20
    shown = "".join(matcher.push(char)[0] for char in text) + matcher.finish()
    assert shown == text
    assert 0 < calls <= 2 * MAX_STOP_STRINGS * len(text)


def test_no_stops():
    matcher = StopMatcher(StopStrings([]))
    assert matcher.push("text") == ("text", None)
    assert matcher.finish() == ""
