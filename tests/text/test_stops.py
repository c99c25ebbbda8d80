"""Nothing of a stop string leaks, and nothing else is lost."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.text.stops import StopMatcher


def plainly(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule in words: the first to be complete ends the text, the longest of those."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=600, deadline=None)
@given(
    text=st.text("aab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_against_the_plain_rule(text, stops, cuts):
    matcher = StopMatcher(stops)
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
    matcher = StopMatcher(["END"])
    assert matcher.push("abc E") == ("abc ", None)
    assert matcher.push("N") == ("", None)
    assert matcher.push("O EN") == ("ENO ", None)
    assert matcher.push("D tail") == ("", "END")


def test_first_to_be_complete_wins_and_releases_what_the_other_held():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("ab") == ("", None)
    assert matcher.push("cd") == ("a", "bc")


def test_no_stops():
    matcher = StopMatcher([])
    assert matcher.push("text") == ("text", None)
    assert matcher.finish() == ""
