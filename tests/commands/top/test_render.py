"""The view as text."""

import math
from dataclasses import replace

import pytest

from gllm.commands.top.figures import Latency, ServerMetrics, StageTimeShares
from gllm.commands.top.render import fit_lines, format_bar, format_seconds, format_sparkline, render

FIGURES = ServerMetrics(
    model="fake/model",
    running=3,
    waiting=1,
    kv_usage=0.25,
    in_flight=2,
    preemptions=4,
    recoveries=2,
    recovering_seconds=0,
    prompt_rate=512.04,
    output_rate=84.2,
    ttft=Latency(0.12, 1.5),
    itl=Latency(0.0125, math.nan),
    prefix_hits=0.4,
    step_rate=45,
    step_tokens=17.25,
    stages=(StageTimeShares(0.75, 0.05), StageTimeShares(math.nan, math.nan)),
)

VIEW = """\
gllm top: fake/model                                       http://127.0.0.1:8000

requests       3 running, 1 waiting
tokens/s       512.0 prompt, 84.2 generated
               ▅█
TTFT           p50 120.0 ms, p99 1.50 s
ITL            p50 12.5 ms, p99 -
KV cache       ███████······················  25.0 % used
prefix cache   40.0 % of prompt tokens cached
preemptions    4
recoveries     2
micro-batches  2 in flight, 45.0/s, 17.2 tokens each
stage 0        ██████████████████████·······  75.0 % busy, 5.0 % bubble
stage 1        ·····························       - busy, - bubble"""


def test_the_view() -> None:
    assert "\n".join(render(FIGURES, [50, 100], "http://127.0.0.1:8000", 80)) == VIEW


def test_models_with_states_have_a_line_of_their_slots() -> None:
    hybrid = replace(FIGURES, state_slots=64, used_state_slots=3)
    lines = render(hybrid, [50, 100], "http://127.0.0.1:8000", 80)
    assert lines[10] == "state slots    3 of 64 used"
    assert lines[:10] + lines[11:] == VIEW.splitlines()


def test_speculation_has_a_line() -> None:
    figures = replace(FIGURES, has_speculation=True, accepted_share=0.625, tokens_per_window=2.5)
    lines = render(figures, [50, 100], "http://127.0.0.1:8000", 80)
    assert lines[12] == "speculation    62.5 % of guesses right, 2.5 tokens per window"
    assert [*lines[:12], *lines[13:]] == VIEW.splitlines()


def test_several_machines_have_a_line() -> None:
    counts = {"member": 2, "spare": 1, "lost": 0}
    several = replace(FIGURES, node_counts=counts, node_losses=3)
    lines = render(several, [50, 100], "http://127.0.0.1:8000", 80)
    assert "machines       2 member, 1 spare; losses: 3" in lines
    alone = replace(FIGURES, node_counts={"member": 1, "lost": 0})
    assert render(alone, [50, 100], "http://127.0.0.1:8000", 80) == VIEW.splitlines()


def test_ranks_have_lines_under_their_stage() -> None:
    stages = (StageTimeShares(0.75, 0.05, (0.75, 0.5)), StageTimeShares(0.25, 0.5))
    lines = render(replace(FIGURES, stages=stages), [50, 100], "http://127.0.0.1:8000", 80)
    assert lines[12:] == [
        "stage 0        ██████████████████████·······  75.0 % busy, 5.0 % bubble",
        "  rank 0.0     ██████████████████████·······  75.0 % busy",
        "  rank 0.1     ██████████████···············  50.0 % busy",
        "stage 1        ███████······················  25.0 % busy, 50.0 % bubble",
    ]


def test_a_recovery_is_shown_with_its_duration() -> None:
    recovering = replace(FIGURES, recoveries=3, recovering_seconds=2.25)
    lines = render(recovering, [50, 100], "http://127.0.0.1:8000", 80)
    assert lines[0].startswith("gllm top: fake/model (recovering) ")
    assert "recoveries     3, recovering for 2.25 s" in lines


@pytest.mark.parametrize("width", [1, 20, 40, 80, 300])
@pytest.mark.parametrize("height", [1, 5, 14, 50])
def test_it_fits_wherever_it_is_shown(width: int, height: int) -> None:
    lines = render(FIGURES, [1.0] * 500, "http://127.0.0.1:8000", width, height)
    assert len(lines) <= height
    assert all(len(line) <= width for line in lines)
    if width >= 80 and height >= 14:
        assert "5.0 % bubble" in lines[12]


def test_no_escape_of_a_name_reaches_the_terminal() -> None:
    assert fit_lines(["a\x1b[2Jb\u202e"], 80, None) == ["a?[2Jb?"]


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "····"), (0.5, "██··"), (1, "████"), (2, "████"), (-1, "····"), (math.nan, "····")],
)
def test_bars(share: float, drawn: str) -> None:
    assert format_bar(share, 4) == drawn


def test_sparklines() -> None:
    assert format_sparkline([0, 1, 2, 4, 8], 5) == "▁▂▃▅█"
    assert format_sparkline([8, 1, math.nan, 2], 3) == "▅ █"
    assert format_sparkline([0, 0], 9) == "▁▁"
    assert format_sparkline([1], 0) == ""


def test_durations() -> None:
    assert [format_seconds(s) for s in (0.0004, 0.9994, 12.5, math.nan)] == [
        "0.4 ms",
        "999.4 ms",
        "12.50 s",
        "-",
    ]
