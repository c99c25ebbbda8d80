"""Render server metrics as lines of text of a given width and height, without escape codes."""

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain

from gllm.commands.top.figures import Latency, RouterMetrics, ServerMetrics, StageTimeShares

LABEL = 15
"""Columns of the label at the beginning of a line."""
NAME_COLUMNS = 14
"""Columns of the name of an engine."""
ENGINE_COLUMNS = ("requests", "waiting", "tokens/s", "KV used", "cached", "weight")
"""Headings of the numbers of an engine."""
FULL, EMPTY = "█", "·"
LEVELS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


def render(
    figures: ServerMetrics,
    rates: Sequence[float],
    source: str,
    width: int,
    height: int | None = None,
) -> list[str]:
    """Return the screen of `gllm top` as at most `height` lines of at most `width` columns.

    Args:
        figures: current metrics of the server.
        rates: generated tokens per second over time; the last one is current.
        source: URL of the server.
        width: columns per line.
        height: maximum number of lines; None for no limit.
    """
    lines = [
        format_headline(f"gllm top: {figures.model}{_state(figures)}", source, width),
        "",
        _labeled_line("requests", f"{figures.running:.0f} running, {figures.waiting:.0f} waiting"),
        _labeled_line(
            "tokens/s",
            f"{format_number(figures.prompt_rate)} prompt, "
            f"{format_number(figures.output_rate)} generated",
        ),
        _labeled_line("", format_sparkline(rates, width - LABEL)),
        _labeled_line("TTFT", _latency(figures.ttft)),
        _labeled_line("ITL", _latency(figures.itl)),
        _bar_line("KV cache", figures.kv_usage, " used", width),
        _labeled_line(
            "prefix cache", f"{format_share(figures.prefix_hits)} of prompt tokens cached"
        ),
        _labeled_line("preemptions", f"{figures.preemptions:.0f}"),
        *(_engine_part(figures, width) if figures.router is None else _router_part(figures.router)),
    ]
    return fit_lines(lines, width, height)


def _engine_part(figures: ServerMetrics, width: int) -> list[str]:
    """Return the lines that an engine has and a router has not."""
    return [
        *_state_lines(figures),
        *_machine_lines(figures),
        _labeled_line("recoveries", _recoveries(figures)),
        _labeled_line(
            "micro-batches",
            f"{figures.in_flight:.0f} in flight, {format_number(figures.step_rate)}/s, "
            f"{format_number(figures.step_tokens)} tokens each",
        ),
        *_speculation_lines(figures),
        *chain.from_iterable(
            _stage_lines(number, stage, width) for number, stage in enumerate(figures.stages)
        ),
    ]


def _state_lines(figures: ServerMetrics) -> list[str]:
    """Return the line of the state slots; none for a model without recurrent layers."""
    if not figures.state_slots:
        return []
    text = f"{figures.used_state_slots:.0f} of {figures.state_slots:.0f} used"
    return [_labeled_line("state slots", text)]


def _speculation_lines(figures: ServerMetrics) -> list[str]:
    """Return a line about guessed tokens; none without speculation."""
    if not figures.has_speculation:
        return []
    text = (
        f"{format_share(figures.accepted_share)} of guesses right, "
        f"{format_number(figures.tokens_per_window)} tokens per window"
    )
    return [_labeled_line("speculation", text)]


def _machine_lines(figures: ServerMetrics) -> list[str]:
    """Return the line of an engine's machines; none if it has one machine only."""
    if sum(figures.node_counts.values()) <= 1:
        return []
    counts = ", ".join(f"{n:.0f} {state}" for state, n in figures.node_counts.items() if n)
    return [_labeled_line("machines", f"{counts}; losses: {figures.node_losses:.0f}")]


def _router_part(router: RouterMetrics) -> list[str]:
    """Return the lines that a router has and an engine has not: its counters and its engines."""
    counts = Counter(engine.state for engine in router.engines)
    states = ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))
    return [
        _labeled_line("parked", f"{router.parked:.0f}"),
        _labeled_line(
            "migrations",
            f"{router.migrations:.0f}; engines lost: {router.lost_engines:.0f}; "
            f"requests shed: {router.shed:.0f}",
        ),
        _labeled_line("engines", states or "none"),
        "",
        _engine_row("engine", "state", *ENGINE_COLUMNS),
        *(
            _engine_row(
                engine.name,
                engine.state,
                f"{engine.num_requests:.0f}",
                f"{engine.waiting:.0f}",
                format_number(engine.output_rate),
                format_share(engine.kv_usage),
                format_share(engine.prefix_hits),
                f"{engine.weight:.2f}",
            )
            for engine in router.engines
        ),
    ]


def _engine_row(name: str, state: str, *cells: str) -> str:
    """Return a row of the table of engines; a long name is cut in the middle."""
    if len(name) > NAME_COLUMNS:
        half = (NAME_COLUMNS - 1) // 2
        name = f"{name[: NAME_COLUMNS - 1 - half]}~{name[-half:]}"
    return f"{name:{NAME_COLUMNS}} {state:10}" + "".join(f"{cell:>9}" for cell in cells)


def fit_lines(lines: list[str], width: int, height: int | None) -> list[str]:
    """Cut lines to the given size and replace unprintable characters by question marks."""
    lines = ["".join(c if c.isprintable() else "?" for c in line)[:width] for line in lines]
    if height is None or len(lines) <= height:
        return lines
    omitted = f"... {len(lines) - height + 1} more lines: enlarge the terminal"
    return [*lines[: height - 1], omitted[:width]]


def format_headline(left: str, right: str, width: int) -> str:
    """Return a line with left- and right-aligned text; only the left one if both do not fit."""
    num_spaces = width - len(left) - len(right)
    return f"{left}{' ' * num_spaces}{right}" if num_spaces >= 2 else left


def format_bar(share: float, columns: int) -> str:
    """Return a share in [0, 1] as a bar of block characters; empty for NaN."""
    filled_share = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    full = round(filled_share * columns)
    return FULL * full + EMPTY * (columns - full)


def format_sparkline(values: Sequence[float], columns: int) -> str:
    """Return the last values as a row of vertical bars scaled by their maximum; NaN is blank."""
    shown = list(values)[-columns:] if columns > 0 else []
    highest = max((value for value in shown if value > 0), default=1.0)

    def column(value: float) -> str:
        if math.isnan(value):
            return " "
        return LEVELS[min(int(value / highest * len(LEVELS)), len(LEVELS) - 1)]

    return "".join(map(column, shown))


def format_number(value: float) -> str:
    """Format a rate or a mean as text with one decimal place; `-` for NaN."""
    return UNKNOWN if math.isnan(value) else f"{value:.1f}"


def format_share(share: float) -> str:
    """Format a share in [0, 1] as a percentage; `-` for NaN."""
    return UNKNOWN if math.isnan(share) else f"{100 * share:.1f} %"


def format_seconds(seconds: float) -> str:
    """Format seconds as text, in milliseconds below one second; `-` for NaN."""
    if math.isnan(seconds):
        return UNKNOWN
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _labeled_line(label: str, text: str) -> str:
    return f"{label:{LABEL}}{text}"


def _state(figures: ServerMetrics) -> str:
    return " (recovering)" if figures.recovering_seconds else ""


def _recoveries(figures: ServerMetrics) -> str:
    if not figures.recovering_seconds:
        return f"{figures.recoveries:.0f}"
    return f"{figures.recoveries:.0f}, recovering for {format_seconds(figures.recovering_seconds)}"


def _latency(latency: Latency) -> str:
    return f"p50 {format_seconds(latency.p50)}, p99 {format_seconds(latency.p99)}"


def _bar_line(label: str, share: float, text: str, width: int) -> str:
    columns = min(max(width - LABEL - 36, 4), 60)
    return _labeled_line(label, f"{format_bar(share, columns)} {format_share(share):>7}{text}")


def _stage_lines(number: int, stage: StageTimeShares, width: int) -> list[str]:
    """Return the line of a stage, and one for each of several ranks."""
    text = f" busy, {format_share(stage.bubble)} bubble"
    ranks = (
        _bar_line(f"  rank {number}.{rank}", busy, " busy", width)
        for rank, busy in enumerate(stage.ranks)
    )
    return [_bar_line(f"stage {number}", stage.busy, text, width), *ranks]
