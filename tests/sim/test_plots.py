"""Pictures: written, readable, the same each time; and the intervals they are drawn from."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import StartEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.intervals import (
    BubbleInterval,
    TokenInterval,
    bin_token_intervals,
    bubble_intervals,
    fill_gaps,
    micro_batch_intervals,
    select_window,
    stage_usages_in,
    token_intervals,
)
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.plots import (
    ChartPanel,
    lay_out_labels,
    plot_bars,
    plot_gantt,
    plot_grid,
    plot_latencies,
    plot_tokens,
)
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import make_workload
from tests.support.full_cases import full_but

matplotlib = pytest.importorskip("matplotlib")

STAGES = 4
SERIES = {"throttle": [(1.0, 2.0), (2.0, 3.0)], "sarathi": [(2.0, 9.0), (1.0, 4.0)]}
BARS = {"14B": {"throttle": 3.0, "sarathi": 2.0}, "32B": {"throttle": 1.5}}
PANELS = [
    ChartPanel(title, "rate", "s", SERIES, title == "TTFT") for title in ("TTFT", "TPOT", "E2EL")
]


@pytest.fixture(scope="module")
def run() -> RunRecord:
    deployment = roofline_deployment("qwen2.5-14b", "L20", STAGES, 8192)
    return simulate(deployment, make_workload("azure-conv", 30, 4.0))


def step(
    number: int, *times: tuple[float, float] | None, decodes: int = 1, prefill: int = 0
) -> MicroBatch:
    work = StageWork(number, decodes + prefill, (), decodes, 0, 0)
    stages = [StepTime(number, *pair) if pair else None for pair in times]
    ends = [pair[1] for pair in times if pair]
    return MicroBatch(0.0, work, prefill, decodes, stages, max(ends, default=None))


def made(*steps: MicroBatch, parallelism: list[tuple[float, int]], end: float) -> RunRecord:
    """Two stages, one request that is there from 10 to `end`."""
    run = RunRecord(
        StartEvent(0.0, "m", [1, 1], SchedulerConfig(), "driver"),
        micro_batches=steps,
        parallelism=parallelism,
    )
    run.requests[0] = ServedRequest(1, 1, RequestTimeline(10.0, [end], 1))
    return run


PLOTS: dict[str, tuple[Callable[[RunRecord, Path], None], list[str]]] = {
    "latencies": (
        plot_latencies,
        ["time to first token (TTFT)", "p50", "p99", "percentile", "end-to-end latency (E2EL)"],
    ),
    "tokens": (plot_tokens, ["coefficient of variation", "prefill", "decode", "seconds since"]),
    "gantt": (plot_gantt, ["stage 0", "stage 3", "bubble", "% busy", "idle without work"]),
    "lines": (
        lambda _, path: plot_grid(
            [ChartPanel("costs in $ and $", "rate, 1/s", "ms", SERIES)], path, 1
        ),
        ["throttle", "sarathi", "rate, 1/s", "ms", "costs in $ and $"],
    ),
    "grid": (lambda _, path: plot_grid(PANELS, path), ["TTFT", "TPOT", "E2EL", "throttle"]),
    "bars": (
        lambda _, path: plot_bars(BARS, path, "tokens/s", "Throughput", {"14B": {"sarathi": 2.2}}),
        ["14B", "32B", "tokens/s", "Throughput", "ours", "paper"],
    ),
}


@pytest.mark.parametrize("name", full_but(["lines"], PLOTS))
def test_a_picture_has_its_labels_and_the_same_bytes_each_time(
    name: str, run: RunRecord, tmp_path: Path
) -> None:
    draw, labels = PLOTS[name]
    first, again = tmp_path / "first", tmp_path / "again.svg"
    draw(run, first)
    with matplotlib.rc_context({"font.size": 30}):
        settings = dict(matplotlib.rcParams)
        draw(run, again)
        assert dict(matplotlib.rcParams) == settings
    picture = first.with_suffix(".svg").read_bytes()
    text = " ".join(ElementTree.fromstring(picture).itertext())
    assert [label for label in labels if label not in text] == []
    assert picture == again.read_bytes()
    assert len(picture) < 300_000


@pytest.mark.full
def test_png_by_suffix(run: RunRecord, tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        plot_gantt(run, tmp_path / name)
    picture = (tmp_path / "a.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert picture == (tmp_path / "b.png").read_bytes()


@pytest.mark.full
def test_long_runs_stay_small(run: RunRecord, tmp_path: Path) -> None:
    assert len(run.micro_batches) > 1000
    plot_gantt(run, tmp_path / "gantt.svg", 0.0, run.end_time())
    plot_tokens(run, tmp_path / "tokens.svg")
    for path in tmp_path.iterdir():
        assert path.stat().st_size < 300_000


def test_more_lines_than_colours(tmp_path: Path) -> None:
    many = {f"policy {i}": [(0.0, float(i))] for i in range(12)}
    panel = ChartPanel("", "x", "y", many | {"none yet": []}, log_y=True)
    plot_grid([panel], tmp_path / "many.svg", columns=1)
    text = (tmp_path / "many.svg").read_text()
    assert "policy 11" in text
    assert "none yet" in text


def test_what_cannot_be_drawn_says_why(run: RunRecord, tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    empty = RunRecord(run.start)
    with pytest.raises(ValueError, match=r"\.svg or \.png"):
        plot_latencies(run, tmp_path / "x.pdf")
    with pytest.raises(ValueError, match="no micro-batch"):
        plot_tokens(empty, path)
    with pytest.raises(ValueError, match="no micro-batch"):
        plot_gantt(empty, path)
    with pytest.raises(ValueError, match="above 0"):
        plot_gantt(run, path, seconds=0)
    with pytest.raises(ValueError, match="no panels"):
        plot_grid([], path)
    with pytest.raises(ValueError, match="no bars"):
        plot_bars({}, path, "", "")
    assert not path.exists()
    plot_latencies(empty, path)
    assert "no values" in path.read_text()


def test_without_matplotlib_the_error_names_the_fix(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "from gllm.sim.metrics.plots import ChartPanel, plot_grid\n"
        f"plot_grid([ChartPanel('', '', '', {{}})], {str(tmp_path / 'x.svg')!r})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install '.[sim]'" in done.stderr.splitlines()[-1]


def test_a_run_has_a_bar_for_each_stage_of_a_micro_batch(run: RunRecord) -> None:
    assert len(micro_batch_intervals(run)) == len(run.micro_batches) * STAGES
    start, end = select_window(run)
    inside = [
        s for s in run.micro_batches if s.stage_times[0] and s.stage_times[0].start >= start
        and s.stage_times[-1] and s.stage_times[-1].end <= end
    ]  # fmt: skip
    assert len(inside) == 40
    bars = micro_batch_intervals(run, start, end)
    steps = {s.work.step for s in inside}
    assert sum(bar.step in steps for bar in bars) == 40 * STAGES
    assert all(bar.end > start and bar.start < end for bar in bars)
    assert len(bars) < 60 * STAGES


def test_a_window_as_asked(run: RunRecord) -> None:
    start, end = select_window(run)
    assert select_window(run, seconds=2.0) == (start, start + 2)
    begin = run.begin_time()
    assert select_window(run, begin=3.0) == (begin + 3, begin + 3 + (end - start))


def test_bubbles_add_up_to_the_stages_use(run: RunRecord) -> None:
    bubbles = bubble_intervals(run)
    begin, end = run.begin_time(), run.end_time()
    whole = stage_usages_in(run, micro_batch_intervals(run), bubbles, begin, end)
    for use, expected in zip(whole, run.stage_usages(), strict=True):
        assert use.bubble == pytest.approx(expected.bubble)
        assert use.busy == pytest.approx(expected.busy)
        assert use.span == expected.span
    halves = [*bubble_intervals(run, end=end / 2), *bubble_intervals(run, end / 2)]
    assert sum(b.seconds for b in halves) == pytest.approx(sum(b.seconds for b in bubbles))
    for stage in range(STAGES):
        bars = [bar for bar in micro_batch_intervals(run) if bar.stage == stage]
        for bubble in [bubble for bubble in bubbles if bubble.stage == stage][::20]:
            assert all(bar.end <= bubble.start or bar.start >= bubble.end for bar in bars)


def test_labels_of_bars_do_not_overlap() -> None:
    short = lay_out_labels(["LPLD", "LPHD"])
    assert short == (["LPLD", "LPHD"], 0, 0.0)
    loads = [
        f"{stages} stages, bursts of {size} requests" for stages in (1, 2) for size in range(5)
    ]
    wrapped = lay_out_labels(loads)
    assert wrapped.texts[0].splitlines() == ["1 stages,", "bursts of", "0 requests"]
    assert (wrapped.rotation, wrapped.extra_inches > 0) == (0, True)
    upright = lay_out_labels(3 * loads)
    assert (upright.texts, upright.rotation) == (3 * loads, 90)
    assert upright.extra_inches > 2


def test_titles_of_panels_stay_within_their_panels(tmp_path: Path) -> None:
    title = "llama-100b on 4 x A800-80G over the network, sharegpt-like"
    panel = ChartPanel(title, "requests/s", "%", {"throttle": [(1.0, 1.0)]})
    plot_grid([panel, panel], tmp_path / "two.svg")
    assert title not in (tmp_path / "two.svg").read_text()
    plot_grid([panel], tmp_path / "one.svg")
    assert title in (tmp_path / "one.svg").read_text()


def test_bubbles_of_a_run_by_hand() -> None:
    run = made(
        step(0, (10, 12), (12, 14)),
        step(1, (13, 14), (14, 15)),
        parallelism=[(10.0, 2), (14.0, 1), (15.0, 1)],
        end=17.0,
    )
    # From 14 on the work is enough for one stage; after 15 both are idle and share the loss, but
    # nothing was heard of the work since.
    run.parallelism.append((16.0, 0))
    assert bubble_intervals(run) == [
        BubbleInterval(1, 10, 12, 1.0),
        BubbleInterval(0, 12, 13, 1.0),
        BubbleInterval(0, 15, 16, 0.5),
        BubbleInterval(1, 15, 16, 0.5),
    ]
    assert bubble_intervals(run, 11.0, 12.5) == [
        BubbleInterval(1, 11, 12, 1.0),
        BubbleInterval(0, 12, 12.5, 1.0),
    ]
    assert [use.bubble for use in run.stage_usages()] == [1.5, 2.5]


def test_neighbouring_bubbles_of_one_share_are_one() -> None:
    run = made(step(0, (10, 14), None), parallelism=[(10, 2), (11, 2), (12, 2)], end=14.0)
    assert bubble_intervals(run) == [BubbleInterval(1, 10, 14, 1.0)]


def test_a_bar_of_no_length_ends() -> None:
    run = made(step(0, (10, 10), (10, 12)), parallelism=[(10, 1)], end=12.0)
    assert [
        use.busy for use in stage_usages_in(run, micro_batch_intervals(run), [], 10.0, 12.0)
    ] == [0.0, 2.0]
    assert bubble_intervals(run) == []


def test_tokens_lie_between_entries() -> None:
    run = made(
        step(0, (10, 11), (11, 12), prefill=3),
        step(1, (15, 16), (16, 18)),
        step(2, (16, 17), None, decodes=2),
        step(3, None, None),
        parallelism=[],
        end=20.0,
    )
    run.micro_batches[2].committed_time = None
    assert token_intervals(run) == [
        TokenInterval(0, 2, 3, 1, 4),  # until its commit
        TokenInterval(5, 6, 0, 1, 1),  # until the next one's entry
        TokenInterval(6, 6, 0, 2, 2),  # planned before, never entered: no time goes backward
        TokenInterval(6, 10, 0, 1, 1),
    ]
    assert [(s.start, s.end, s.max_batch_tokens) for s in fill_gaps(token_intervals(run))[:4]] == [
        (0, 0, 0), (0, 2, 4), (2, 5, 0), (5, 6, 1),
    ]  # fmt: skip


def test_bins_hold_what_reaches_into_them() -> None:
    stretches = [
        TokenInterval(0, 1, 3, 1, 4),
        TokenInterval(1, 5, 0, 2, 2),
        TokenInterval(7, 8, 8, 0, 8),
    ]
    assert bin_token_intervals(stretches, 4) == [
        TokenInterval(0, 2, 1.5, 1.5, 4),
        TokenInterval(2, 4, 0, 2, 2),
        TokenInterval(4, 6, 0, 2, 2),
        TokenInterval(6, 8, 8, 0, 8),
    ]
