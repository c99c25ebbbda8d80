"""The report: names as scripts know them, figures as they are defined."""

import json
import sys
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any

import pytest

from gllm.commands.bench.client import RequestResult
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.commands.bench.report import (
    failure_lines,
    max_overlap,
    plot_load,
    report_lines,
    request_details,
    summarize,
    tokens_by_second,
)
from gllm.commands.bench.serve import main, result_document
from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo, parse_slo


def outcome(arrival: float, times: list[float], tokens: int, prompt: int = 10) -> RequestResult:
    line = RequestTimeline(arrival, times, tokens)
    return RequestResult(line, prompt, times[-1] if times else arrival, ["text"])


def failed(kind: str, detail: str) -> RequestResult:
    return RequestResult(RequestTimeline(100.0), 10, 100.5, failure=kind, detail=detail)


OUTCOMES = [
    outcome(100.0, [100.1, 100.2, 100.4], 3),
    outcome(100.5, [101.0, 101.5], 6),
    outcome(101.0, [101.4], 1),
    failed("HTTP 503", "full"),
]
FIGURES = summarize(OUTCOMES, 2.0, (50, 99), Slo(0.45, 0.12, 0.6))


def test_every_line_is_as_scripts_expect_it() -> None:
    assert report_lines(FIGURES, 2.5, 8, percents=(50,)) == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     3         ",
        "Failed requests:                         1         ",
        "Maximum request concurrency:             8         ",
        "Request rate configured (RPS):           2.50      ",
        "Benchmark duration (s):                  2.00      ",
        "Total input tokens:                      30        ",
        "Total generated tokens:                  10        ",
        "Request throughput (req/s):              1.50      ",
        "Request goodput (req/s):                 0.50      ",
        "Output token throughput (tok/s):         5.00      ",
        "Peak output token throughput (tok/s):    7.00      ",
        "Peak concurrent requests:                2.00      ",
        "Total token throughput (tok/s):          20.00     ",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          333.33    ",
        "Median TTFT (ms):                        400.00    ",
        "P50 TTFT (ms):                           400.00    ",
        "-----Time per Output Token (excl. 1st token)------",
        "Mean TPOT (ms):                          125.00    ",
        "Median TPOT (ms):                        125.00    ",
        "P50 TPOT (ms):                           125.00    ",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           266.67    ",
        "Median ITL (ms):                         200.00    ",
        "P50 ITL (ms):                            200.00    ",
        "----------------End-to-end Latency----------------",
        "Mean E2EL (ms):                          600.00    ",
        "Median E2EL (ms):                        400.00    ",
        "P50 E2EL (ms):                           400.00    ",
        "==================================================",
    ]


def test_lines_without_a_setting_are_left_out() -> None:
    figures = summarize(OUTCOMES, 2.0)
    lines = report_lines(figures, inf, None, metrics=("ttft",))
    text = "\n".join(lines)
    for absent in ("concurrency:", "configured", "goodput", "TPOT", "ITL"):
        assert absent not in text
    assert "P99 TTFT (ms):" in text


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        ("ttft:400", 2),
        ("ttft:99", 0),
        ("tpot:100", 2),  # One token has no TPOT and meets any.
        ("e2el:1000", 3),
        ("ttft:500,tpot:100,e2el:400", 1),
    ],
)
def test_goodput_counts_requests_within_all_limits(slo: str, met: int) -> None:
    outcomes = [
        outcome(0.0, [0.125, 0.25, 0.375], 3),  # TPOT 0.125 s
        outcome(0.0, [0.5, 1.0], 6),  # TPOT 0.1 s
        outcome(0.0, [0.375], 1),
        failed("cut off", ""),
    ]
    figures = summarize(outcomes, 4.0, slo=parse_slo(slo))
    assert figures["request_goodput"] == pytest.approx(met / 4.0)


def test_nothing_succeeded() -> None:
    figures = summarize([failed("HTTP 500", "x")], 1.0)
    assert (figures["completed"], figures["failed"]) == (0, 1)
    assert figures["mean_ttft_ms"] == 0.0
    assert report_lines(figures, inf, None)
    json.dumps(figures, allow_nan=False)


def test_overlaps() -> None:
    assert max_overlap([]) == 0
    assert max_overlap([(0, 2), (1, 3), (2, 4)]) == 2
    assert max_overlap([(0, 5), (1, 2), (3, 4), (3, 4)]) == 3


def test_tokens_by_second() -> None:
    lines = [RequestTimeline(10.5, [10.75, 11.6], 8), RequestTimeline(11.0, [11.75], 1)]
    assert tokens_by_second(lines) == {0: 4.0, 1: 5.0}


def test_failures_are_counted_and_the_first_are_shown() -> None:
    outcomes = [failed("HTTP 503", f"full {index % 5}") for index in range(10)]
    outcomes.append(failed("timeout", "slow"))
    assert failure_lines(outcomes) == [
        "10 failed: HTTP 503",
        "  full 0",
        "  full 1",
        "  full 2",
        "1 failed: timeout",
        "  slow",
    ]
    assert failure_lines(OUTCOMES[:3]) == []


def test_the_file_has_the_known_keys_and_not_the_key_to_the_server() -> None:
    config = ServeConfig(api_key="secret", load=LoadConfig(num_prompts=4))
    result = result_document(config, "m", Slo(0.005), FIGURES, datetime(2026, 1, 2, tzinfo=UTC))
    known = {
        "date",
        "backend",
        "model_id",
        "num_prompts",
        "request_rate",
        "burstiness",
        "max_concurrency",
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "request_goodput",
        "output_throughput",
        "total_token_throughput",
        "max_output_tokens_per_s",
        "max_concurrent_requests",
        *(
            f"{kind}_{name}_ms"
            for name in ("ttft", "tpot", "itl", "e2el")
            for kind in ("mean", "median", "std", "p50", "p99")
        ),
    }
    assert set(result) - known == {"goodput_slo_ms", "configuration"}
    assert known <= set(result)
    assert result["goodput_slo_ms"] == {"ttft": 5.0}
    assert (result["date"], result["request_rate"]) == ("20260102-000000", "inf")
    text = json.dumps(result, allow_nan=False)
    assert "secret" not in text


def test_details_are_lists_of_equal_length() -> None:
    lists: dict[str, list[Any]] = request_details(OUTCOMES)
    assert {len(values) for values in lists.values()} == {4}
    assert lists["start_times"] == [0.0, 0.5, 1.0, 0.0]
    assert lists["output_lens"] == [3, 6, 1, 0]
    assert lists["itls"][2:] == [[], []]
    assert lists["errors"] == ["", "", "", "HTTP 503: full"]


@pytest.mark.full
def test_plots(tmp_path: Path) -> None:
    for lines in ([o.timeline for o in OUTCOMES[:3]], [RequestTimeline(0.0, [1.0, 2.0], 2)], []):
        names = plot_load(lines, "a model", tmp_path / "plots")
        for name in names:
            assert (tmp_path / "plots" / name).stat().st_size > 1000


def test_plots_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["--plot", "anywhere"]) == 2
    assert "pip install '.[sim]'" in capsys.readouterr().err
