"""The view as lines of text.

Owns the layout. Knows nothing of terminals: width and height are given, and no escape is in a line.
"""

import math
from collections.abc import Sequence

from gllm.commands.top.figures import Figures, Latency, Stage

LABEL = 15
"""Columns of what a line is about."""
FULL, EMPTY = "█", "·"
LEVELS = "▁▂▃▄▅▆▇█"
UNKNOWN = "-"


def draw(
    figures: Figures, rates: Sequence[float], source: str, width: int, height: int | None = None
) -> list[str]:
    """The view: at most `height` lines of at most `width` columns.

    rates: tokens per second over time, the last one now. source: where the figures are from.
    """
    one = figures
    lines = [
        headline(f"gllm top: {one.model}", source, width),
        "",
        _line("requests", f"{one.running:.0f} running, {one.waiting:.0f} waiting"),
        _line("tokens/s", f"{number(one.prompt_rate)} prompt, {number(one.output_rate)} generated"),
        _line("", sparkline(rates, width - LABEL)),
        _line("TTFT", _latency(one.ttft)),
        _line("ITL", _latency(one.itl)),
        _bar_line("KV cache", one.kv_usage, " used", width),
        _line("prefix cache", f"{percent(one.prefix_hits)} of prompt tokens found"),
        _line("preemptions", f"{one.preemptions:.0f}"),
        _line(
            "micro-batches",
            f"{one.in_flight:.0f} in flight, {number(one.step_rate)}/s, "
            f"{number(one.step_tokens)} tokens each",
        ),
        *(_stage(i, stage, width) for i, stage in enumerate(one.stages)),
    ]
    return fit(lines, width, height)


def fit(lines: list[str], width: int, height: int | None) -> list[str]:
    """Lines cut to the room there is; characters that are none to look at are replaced."""
    shown = ["".join(c if c.isprintable() else "?" for c in line)[:width] for line in lines]
    if height is None or len(shown) <= height:
        return shown
    left_out = f"... {len(shown) - height + 1} more lines: make the terminal higher"
    return [*shown[: height - 1], left_out[:width]]


def headline(left: str, right: str, width: int) -> str:
    """Two texts at the ends of a line; the right one only where both fit."""
    room = width - len(left) - len(right)
    return f"{left}{' ' * room}{right}" if room >= 2 else left


def bar(share: float, columns: int) -> str:
    """A share (0..1) as a bar; empty for one that is not known."""
    known = 0.0 if math.isnan(share) else min(max(share, 0.0), 1.0)
    full = round(known * columns)
    return FULL * full + EMPTY * (columns - full)


def sparkline(values: Sequence[float], columns: int) -> str:
    """The last values as columns, scaled by the highest of them; unknown ones are blank."""
    shown = list(values)[-columns:] if columns > 0 else []
    highest = max((value for value in shown if value > 0), default=1.0)

    def column(value: float) -> str:
        if math.isnan(value):
            return " "
        return LEVELS[min(int(value / highest * len(LEVELS)), len(LEVELS) - 1)]

    return "".join(map(column, shown))


def number(value: float) -> str:
    """A rate or a mean."""
    return UNKNOWN if math.isnan(value) else f"{value:.1f}"


def percent(share: float) -> str:
    """A share in percent."""
    return UNKNOWN if math.isnan(share) else f"{100 * share:.1f} %"


def duration(seconds: float) -> str:
    """Seconds, in milliseconds where they are few."""
    if math.isnan(seconds):
        return UNKNOWN
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _line(label: str, text: str) -> str:
    return f"{label:{LABEL}}{text}"


def _latency(latency: Latency) -> str:
    return f"p50 {duration(latency.p50)}, p99 {duration(latency.p99)}"


def _bar_line(label: str, share: float, text: str, width: int) -> str:
    columns = min(max(width - LABEL - 36, 4), 60)
    return _line(label, f"{bar(share, columns)} {percent(share):>7}{text}")


def _stage(number: int, stage: Stage, width: int) -> str:
    text = f" busy, {percent(stage.bubble)} bubble"
    return _bar_line(f"stage {number}", stage.busy, text, width)
