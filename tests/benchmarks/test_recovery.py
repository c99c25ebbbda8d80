"""Figures of a kill from hand-made timelines."""

import argparse

import pytest

from benchmarks.recovery import format_page, make_prompts, resume_seconds, summarize
from gllm.commands.bench.client import RequestResult
from gllm.observability.latency import RequestTimeline

pytestmark = pytest.mark.full


def result(times: list[float], text: str = "abc", failure: str = "") -> RequestResult:
    line = RequestTimeline(0.0, times, len(times))
    return RequestResult(
        line, 10, times[-1], list(text), failure=failure, detail=failure and "went away"
    )


UNDISTURBED = [result([1.0, 2.0, 3.0]), result([1.0, 2.0, 3.0]), result([1.0, 1.5])]


def test_tokens_that_had_passed_the_killed_stage_are_not_the_next_ones() -> None:
    stream = result([1.0, 2.0, 2.55, 5.5, 5.6])
    assert resume_seconds(stream, killed=2.5) == pytest.approx(3.0)


def test_the_pause_is_that_of_all_streams_together() -> None:
    disturbed = [result([1.0, 2.0, 5.5]), result([1.0, 2.2, 5.0, 5.1]), result([1.0, 1.5])]
    figures = summarize(UNDISTURBED, disturbed, killed=2.5)
    assert figures["pause"] == pytest.approx(5.0 - 2.2)
    assert figures["next_token_last"] == pytest.approx(5.5 - 2.5)
    assert figures["next_token_p50"] == pytest.approx(2.75)
    assert (figures["running"], figures["lost"], figures["differing"]) == (2, 0, 0)
    # Two prompts and the tokens emitted before the kill; the third stream had ended.
    assert figures["running_tokens"] == 2 * 10 + 4


def test_lost_requests_and_other_texts_are_counted() -> None:
    disturbed = [
        result([1.0, 2.0, 5.5], text="abd"),
        result([1.0, 2.2], failure="cut off"),
        result([1.0, 1.5]),
    ]
    figures = summarize(UNDISTURBED, disturbed, killed=2.5)
    assert (figures["lost"], figures["differing"]) == (1, 1)
    assert figures["causes"] == ["went away"]


def test_the_page_has_the_limits() -> None:
    disturbed = [result([1.0, 2.0, 5.5]), result([1.0, 2.2, 5.0, 5.1]), result([1.0, 1.5])]
    figures = summarize(UNDISTURBED, disturbed, killed=2.5)
    results = {
        "kills": {"0": [figures], "1": [figures]},
        "import_seconds": 1.0,
        "read_seconds": 0.25,
        "recompute_seconds": 0.5,
        "computed_tokens": 7,
        "running_tokens": 24,
        "foreign_cores": 0.0,
    }
    options = argparse.Namespace(streams=3, output_tokens=3, rounds=1)
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in format_page(results, options).splitlines()
        if line.startswith("|")
    ]
    assert rows[2][:3] == ["0", "0 of 2", "0 of 2"]
    assert [row[-1] for row in rows[2:]] == ["1.75", "0.75"]


def test_prompts_are_all_different() -> None:
    prompts = make_prompts(64, 20, seed=0)
    assert len(set(prompts)) == 64
    assert prompts == make_prompts(64, 20, seed=0)
