"""Plots of runs and experiments, as SVG or PNG by the suffix of the file.

matplotlib is imported lazily, and its global state is restored; output is reproducible.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from textwrap import fill, wrap
from typing import TYPE_CHECKING, Any, NamedTuple

from gllm.observability.latency import RequestTimeline, collect_latencies, percentile
from gllm.sim.metrics.intervals import (
    BubbleInterval,
    MicroBatchInterval,
    bin_token_intervals,
    bubble_intervals,
    fill_gaps,
    micro_batch_intervals,
    select_window,
    stage_usages_in,
    token_intervals,
)
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.statistics import coefficient_of_variation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

HEIGHT = 3.6
"""Inches, with labels of one line."""
LINE_CHARACTERS = 100
"""Characters of a label's size beside each other across the chart."""
MAX_LABEL_LINES = 4
LINE_INCHES = 0.15
CHARACTER_INCHES = 0.08

Point = tuple[float, float]

Bars = list[MicroBatchInterval]
Series = dict[str, list[tuple[float, float]]]
"""Points (x, y) by the name of their line."""

BLUE, SKY, VERMILION, GREY = "#0072B2", "#56B4E9", "#D55E00", "#666666"
COLOURS = (BLUE, VERMILION, "#009E73", "#CC79A7", "#E69F00", SKY, "#000000")
"""Okabe and Ito's colours for colour-blind readers, without yellow, which is too pale for lines."""
MARKERS = "osD^vPX"
DECODE = "#CBE6F7"
"""A pale SKY: micro-batches without prefill, the other end of the scale from BLUE."""

STYLE: dict[Any, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.grid": True,
    "axes.labelsize": 9,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.06,
    "font.size": 9,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.6,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "gllm",
    "text.parse_math": False,
    "xtick.color": GREY,
    "xtick.labelcolor": "black",
    "ytick.color": GREY,
    "ytick.labelcolor": "black",
}
WIDTH = 8.0
"""Inches."""
TITLE_CHARACTERS = 100
"""Characters of a title's size beside each other across a picture."""
DPI = 150
CURVE_POINTS = 400
"""A distribution of more values is drawn through this many of them."""
MOST_STEPS = 800
"""More micro-batches, about one a pixel, are drawn as means over bins of time."""
BINS = 400
MOST_SHAPES = 1200
"""More rectangles are drawn as pixels: each costs an SVG some 150 bytes."""
CROWD = 110
"""Bars in a row from which on they are drawn without edges."""
ROW = 0.76
"""Height of a stage's bars; rows are 1 apart."""


class ChartPanel(NamedTuple):
    """Data and labels of one chart in a grid of charts."""

    title: str
    x_label: str
    y_label: str
    series: Series
    log_y: bool = False


@contextmanager
def open_picture(path: str | Path, height: float) -> Iterator["Figure"]:
    """Yield a matplotlib figure and save it to a file, unless the block raised an error.

    Args:
        path: Picture to write, .svg or .png; .svg without a suffix.
        height: Height of the figure in inches.

    Raises:
        ValueError: The suffix is neither .svg nor .png.
        ImportError: matplotlib is missing.
    """
    path = Path(path)
    path = path if path.suffix else path.with_suffix(".svg")
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: pictures are .svg or .png: end the name in one of them")
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "pictures need matplotlib: pip install '.[sim]' in gllm's checkout"
        ) from error
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # a user's matplotlibrc must not change the picture
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=(WIDTH, height), dpi=DPI)
        yield figure
        undated = {"Date": None} if path.suffix == ".svg" else {"Software": None}
        figure.savefig(path, metadata=undated, facecolor="white")


def _caption(run: RunRecord) -> str:
    """Return model, policy and stages; a model in a folder has the folder's name."""
    model = run.start.model.rstrip("/").rpartition("/")[2]
    return f"{model}, {run.start.scheduler.policy}, {len(run.start.layers)} stages"


def plot_latencies(run: RunRecord, path: str | Path) -> None:
    """Plot the distributions of TTFT, TPOT, ITL and E2EL of a run; see `plot_distributions`.

    Args:
        run: Record of the run.
        path: Picture to write, .svg or .png.
    """
    plot_distributions([served.line for served in run.requests.values()], _caption(run), path)


def plot_distributions(lines: Sequence[RequestTimeline], caption: str, path: str | Path) -> None:
    """Plot the percentiles of TTFT, TPOT, ITL and E2EL over milliseconds or seconds.

    Args:
        lines: Arrival and token times of each request.
        caption: Title of the picture.
        path: Picture to write.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The suffix is neither .svg nor .png.
        OSError: The file cannot be written.
    """
    titles = ["time to first token", "time per output token"]
    titles += ["inter-token latency", "end-to-end latency"]
    with open_picture(path, 5.4) as figure:
        figure.suptitle(f"{caption}: {len(lines)} requests", fontsize=10)
        places = figure.subplots(2, 2, squeeze=False).flat
        for axes, title, (name, values) in zip(
            places, titles, collect_latencies(lines).items(), strict=True
        ):
            axes.set_title(f"{title} ({name.upper()})")
            _draw_distribution(axes, sorted(values))


def _draw_distribution(axes: "Axes", seconds: list[float]) -> None:
    """Percentile over value. `seconds` is sorted."""
    axes.set(ylim=(0, 116), yticks=range(0, 101, 25), ylabel="percentile")
    if not seconds:
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
        return
    unit, factor = ("s", 1.0) if percentile(seconds, 99) >= 1 else ("ms", 1e3)
    last = max(len(seconds) - 1, 1)
    points = min(CURVE_POINTS, last)
    places = [round(i * last / points) for i in range(points + 1)]
    values = [seconds[min(place, len(seconds) - 1)] * factor for place in places]
    axes.plot(values, [100 * place / last for place in places], color=BLUE)
    axes.set(xlim=(0, values[-1] * 1.05 or 1), xlabel=unit)
    for percent in (50, 99):
        value = percentile(seconds, percent) * factor
        axes.plot(value, percent, "o", color=VERMILION)
        # The curve rises: beside p50 there is room below it to the right and above it to the left.
        left = value > 0.6 * axes.get_xlim()[1]
        above = left or percent == 99
        axes.annotate(
            f"p{percent}  {value:.3g} {unit}",
            (value, percent),
            xytext=(-4 if left else 6, 5 if above else -3),
            textcoords="offset points",
            ha="right" if left else "left",
            va="bottom" if above else "top",
        )


def plot_tokens(run: RunRecord, path: str | Path) -> None:
    """Plot the prefill and decode tokens of the micro-batches of a run over time.

    If there are many micro-batches, means over equal intervals are plotted.

    Args:
        run: Record of the run.
        path: Picture to write.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The run has no micro-batches, or the suffix is neither .svg nor .png.
        OSError: The file cannot be written.
    """
    if not run.micro_batches:
        raise ValueError("the run has no micro-batches to draw")
    tokens = [step.work.num_tokens for step in run.micro_batches]
    many = len(tokens) > MOST_STEPS
    intervals = token_intervals(run)
    intervals = bin_token_intervals(intervals, BINS) if many else fill_gaps(intervals)
    edges = [interval.start for interval in intervals] + [intervals[-1].end]
    with open_picture(path, 3.6) as figure:
        axes = figure.subplots()
        layers = {
            "prefill": (BLUE, [s.num_prefill_tokens + s.num_decode_tokens for s in intervals])
        }
        layers["decode"] = (SKY, [s.num_decode_tokens for s in intervals])
        if many:
            label = f"largest in {edges[1] - edges[0]:.2g} s"
            layers = {label: ("#D0D0D0", [s.max_batch_tokens for s in intervals])} | layers
        for label, (colour, heights) in layers.items():
            axes.stairs(heights, edges, fill=True, color=colour, label=label)
        axes.axhline(fmean(tokens), color="black", lw=1, ls=(0, (4, 2)), label="mean per batch")
        axes.set_title(
            f"{_caption(run)}: {len(tokens)} micro-batches\n{fmean(tokens):.0f} tokens on average, "
            f"coefficient of variation {coefficient_of_variation(tokens):.2f}"
        )
        axes.set(xlabel="seconds since the first request", ylabel="tokens in a micro-batch")
        axes.set(xlim=(0, edges[-1] or 1), ylim=(0, None))
        figure.legend(loc="outside lower center", ncols=4)


def plot_gantt(
    run: RunRecord, path: str | Path, begin: float | None = None, seconds: float | None = None
) -> None:
    """Plot a Gantt chart of the pipeline stages: micro-batches and bubbles over time.

    Micro-batches are coloured by their share of prefill tokens; bubbles are hatched, and paler
    where there was work for only a part of the idle stages.

    Args:
        run: Record of the run.
        path: Picture to write.
        begin: Start of the plot in seconds since the first request; default: about 40 micro-batches
            from the middle of the run are plotted.
        seconds: Length of the plot; default: that of these 40 micro-batches.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: The run has no step times, `seconds` is not above 0, or the suffix is neither
            .svg nor .png.
        OSError: The file cannot be written.
    """
    start, end = select_window(run, begin, seconds)
    bars, bubbles = micro_batch_intervals(run, start, end), bubble_intervals(run, start, end)
    uses = stage_usages_in(run, bars, bubbles, start, end)
    stages = range(len(uses))
    with open_picture(path, 1.5 + 0.5 * len(uses)) as figure:
        axes = figure.subplots()
        origin = run.begin_time()
        _draw_shapes(axes, bars, bubbles, origin)
        count = len({bar.step for bar in bars})
        axes.set_title(f"{_caption(run)}: {count} micro-batches")
        axes.set(xlim=(start - origin, end - origin), ylim=(len(uses) - 0.5, -0.5))
        axes.set(xlabel="seconds since the first request", yticks=stages)
        axes.set_yticklabels([f"stage {stage}" for stage in stages])
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        sides = axes.secondary_yaxis("right")
        notes = (f"{use.busy_share:.0%} busy\n{use.bubble_share:.0%} bubbles" for use in uses)
        sides.set_yticks(stages, list(notes))
        sides.tick_params(length=0)
        sides.spines["right"].set_visible(False)
        figure.legend(handles=_gantt_legend(), loc="outside lower center", ncols=5)


def _mix(colour: str, other: str, share: float) -> tuple[float, ...]:
    """`share` of a colour in another."""
    from matplotlib.colors import to_rgb

    pairs = zip(to_rgb(colour), to_rgb(other), strict=True)
    return tuple(share * one + (1 - share) * two for one, two in pairs)


def _draw_shapes(axes: "Axes", bars: "Bars", bubbles: list[BubbleInterval], origin: float) -> None:
    """Draw bubbles, and bars over them; x counts seconds from `origin`."""
    pixels = len(bars) + len(bubbles) > MOST_SHAPES
    crowded = len(bars) > CROWD * len({bar.stage for bar in bars})
    plain = {"linewidth": 0, "hatch": None, "snap": False} if crowded else {}
    kinds: dict[tuple[bool, float], list[MicroBatchInterval | BubbleInterval]] = {}
    for bubble in bubbles:
        kinds.setdefault((False, bubble.share), []).append(bubble)
    for bar in bars:
        kinds.setdefault((True, round(bar.prefill_share, 1)), []).append(bar)
    for (is_bar, share), shapes in sorted(kinds.items()):
        look = (_bar_look if is_bar else _bubble_look)(share) | plain
        for stage in sorted({shape.stage for shape in shapes}):
            row = [shape for shape in shapes if shape.stage == stage]
            spans = [(shape.start - origin, shape.end - shape.start) for shape in row]
            axes.broken_barh(spans, (stage - ROW / 2, ROW), rasterized=pixels, **look)


def _bar_look(prefill_share: float) -> dict[str, Any]:
    face = _mix(BLUE, DECODE, prefill_share)
    return {"facecolor": face, "edgecolor": "#222222", "linewidth": 0.4}


def _bubble_look(share: float) -> dict[str, Any]:
    face = _mix(VERMILION, "white", 0.1 + 0.3 * share)
    hatch = _mix(VERMILION, "white", 0.3 + 0.7 * share)
    return {"facecolor": face, "edgecolor": hatch, "hatch": "//////", "linewidth": 0}


def _gantt_legend() -> "list[Patch]":
    from matplotlib.patches import Patch

    return [
        Patch(label="decode only", **_bar_look(0)),
        Patch(label="half prefill", **_bar_look(0.5)),
        Patch(label="prefill only", **_bar_look(1)),
        Patch(label="bubble", **_bubble_look(1)),
        Patch(label="idle without work", facecolor="white", edgecolor="#AAAAAA", linewidth=0.4),
    ]


def plot_grid(panels: Sequence[ChartPanel], path: str | Path, columns: int = 2) -> None:
    """Plot several line charts in a grid with one legend; a series has the same colour in all.

    Args:
        panels: Data and labels of each chart.
        path: Picture to write.
        columns: Number of charts in a row.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: There are no charts, or the suffix is neither .svg nor .png.
        OSError: The file cannot be written.
    """
    if not panels:
        raise ValueError("there are no panels to draw")
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    names = list(dict.fromkeys(name for panel in panels for name in panel.series))
    with open_picture(path, 0.4 + rows * (2.6 if columns > 1 else 3.8)) as figure:
        places = list(figure.subplots(rows, columns, squeeze=False).flat)
        handles: dict[str, Line2D] = {}
        for axes, panel in zip(places, panels, strict=False):
            title = fill(panel.title, TITLE_CHARACTERS // columns)
            axes.set(title=title, xlabel=panel.x_label, ylabel=panel.y_label)
            for name, points in panel.series.items():
                look = _line_look(names.index(name))
                x, y = zip(*sorted(points), strict=True) if points else ((), ())
                (handles[name],) = axes.plot(x, y, label=name, **look)
            if panel.log_y:
                _scale_log(axes)
            else:
                axes.set_ylim(bottom=0)
        for axes in places[len(panels) :]:
            axes.set_visible(False)
        ordered = [handles[name] for name in names]
        figure.legend(handles=ordered, loc="outside lower center", ncols=min(len(names), 5) or 1)


def _scale_log(axes: "Axes") -> None:
    """Set a logarithmic y axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _line_look(place: int) -> dict[str, Any]:
    """Return the style of a line: a colour, and dashes once all colours are in use."""
    turn, place = divmod(place, len(COLOURS))
    return {"color": COLOURS[place], "marker": MARKERS[place], "linestyle": "--" if turn else "-"}


def plot_scatter(
    groups: Mapping[str, Sequence[Point]],
    front: Sequence[Point],
    front_name: str,
    path: str | Path,
    x_label: str,
    y_label: str,
    title: str,
) -> None:
    """Plot a scatter chart of groups of points, with a line such as a Pareto front.

    Args:
        groups: Points (x, y) by name of their group.
        front: Points (x, y) of the line, by ascending x.
        front_name: Name of the line in the legend.
        path: Picture to write.
        x_label: Quantity and unit of x.
        y_label: Quantity and unit of y.
        title: Title of the picture.

    Raises:
        ValueError: The suffix is neither .svg nor .png.
        ImportError: matplotlib is missing.
    """
    with open_picture(path, 4.2) as figure:
        axes = figure.subplots()
        axes.set(title=title, xlabel=x_label, ylabel=y_label)
        axes.plot(*_columns(front), color=GREY, linestyle="--", label=front_name)
        for place, (name, points) in enumerate(groups.items()):
            axes.plot(*_columns(points), label=name, **_line_look(place) | {"linestyle": ""})
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        figure.legend(loc="outside lower center", ncols=min(len(groups) + 1, 5))


def _columns(points: Sequence[Point]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def plot_token_time(seconds_by_tokens: Mapping[str, float], path: str | Path) -> None:
    """Plot the cumulative share of the stages' time by number of tokens in the micro-batch.

    A bar for n tokens shows the share of time spent in micro-batches of at most n tokens, as in
    Figures 4 and 17 of "Splitwise" (ISCA 2024, arXiv 2311.18677).

    Args:
        seconds_by_tokens: Time in seconds by largest number of tokens, ascending
            (`BatchStatistics.seconds_by_tokens`).
        path: Picture to write.

    Raises:
        ValueError: The suffix is neither .svg nor .png.
        ImportError: matplotlib is missing.
    """
    total = sum(seconds_by_tokens.values()) or 1.0
    sums = accumulate(seconds_by_tokens.values())
    bars = {
        tokens: {"micro-batches of at most so many tokens": 100 * part / total}
        for tokens, part in zip(seconds_by_tokens, sums, strict=True)
    }
    plot_bars(bars, path, "stages' time, %", "Time over tokens per micro-batch")


class BarLabels(NamedTuple):
    """Texts and rotation of the labels below a bar chart, and the extra height that they take."""

    texts: list[str]
    rotation: int
    """Rotation in degrees."""
    extra_inches: float
    """Height beyond that of labels of one line."""


def lay_out_labels(labels: Sequence[str]) -> BarLabels:
    """Wrap or rotate the labels below a bar chart so that they do not overlap.

    Args:
        labels: One label per group of bars.
    """
    limit = max(1, LINE_CHARACTERS // len(labels))
    wrapped = [wrap(label, limit, break_long_words=False) or [""] for label in labels]
    num_lines = max(map(len, wrapped))
    if (
        num_lines <= MAX_LABEL_LINES
        and max(len(line) for lines in wrapped for line in lines) <= limit
    ):
        texts = ["\n".join(lines) for lines in wrapped]
        return BarLabels(texts, 0, LINE_INCHES * (num_lines - 1))
    return BarLabels(list(labels), 90, CHARACTER_INCHES * max(map(len, labels)))


def plot_bars(
    groups: dict[str, dict[str, float]],
    path: str | Path,
    y_label: str,
    title: str,
    reference: dict[str, dict[str, float]] | None = None,
) -> None:
    """Plot a grouped bar chart, with reference values such as a paper's as outlined bars.

    Args:
        groups: Values by name of the group, then by name of the bar.
        path: Picture to write.
        y_label: Quantity and unit of the values.
        title: Title of the picture.
        reference: Reference values in the same form; None: none.

    Raises:
        ImportError: matplotlib is missing.
        ValueError: There are no groups, or the suffix is neither .svg nor .png.
        OSError: The file cannot be written.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    if not names:
        raise ValueError("there are no bars to draw")
    kinds = [groups] if reference is None else [groups, reference]
    width = 0.8 / (len(names) * len(kinds))
    room_for_figures = width / len(groups) > 0.03  # of the chart: four small digits
    labels = lay_out_labels(list(groups))
    with open_picture(path, HEIGHT + labels.extra_inches) as figure:
        axes = figure.subplots()
        axes.set(title=title, ylabel=y_label, xticks=range(len(groups)), xticklabels=labels.texts)
        axes.grid(visible=False, axis="x")
        axes.tick_params(axis="x", length=0, rotation=labels.rotation)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.margins(y=0.1)
        for index, name in enumerate(names):
            for kind, values in enumerate(kinds):
                offset = (index * len(kinds) + kind + 0.5) * width - 0.4
                heights = {
                    place + offset: values[group][name]
                    for place, group in enumerate(groups)
                    if name in values.get(group, {})
                }
                look = _column_look(COLOURS[index % len(COLOURS)], outlined=kind == 1)
                bars = axes.bar(list(heights), list(heights.values()), width * 0.88, **look)
                if room_for_figures:
                    axes.bar_label(bars, fmt="{:.3g}", fontsize=7, padding=1.5)
        handles = _bars_legend(names, reference is not None)
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))


def _column_look(colour: str, outlined: bool) -> dict[str, Any]:
    face, line = ("white", "--") if outlined else (colour, "-")
    return {"facecolor": face, "edgecolor": colour, "linestyle": line, "linewidth": 1}


def _bars_legend(names: list[str], with_paper: bool) -> "list[Patch]":
    from matplotlib.patches import Patch

    patches = [
        Patch(label=name, **_column_look(COLOURS[index % len(COLOURS)], outlined=False))
        for index, name in enumerate(names)
    ]
    if with_paper:
        patches.append(Patch(label="ours", **_column_look(GREY, outlined=False)))
        patches.append(Patch(label="paper", **_column_look(GREY, outlined=True)))
    return patches
