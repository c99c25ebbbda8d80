"""The page of docs/benchmarks: predictions beside measurements, and the statements about them."""

from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from benchmarks.planned_service.limits import SHIFT
from benchmarks.planned_service.planning import (
    LIMITS,
    LOAD_SHARE,
    MAX_NUM_SEQS,
    NUM_ENGINES,
    OUTPUT_TOKENS,
    WORKLOAD,
)
from benchmarks.weak_links.page import is_met
from gllm.sim.metrics.report import format_table, show_value

ATTAINMENT, TTFT, TPOT = "SLO attainment, %", "TTFT median, ms", "TPOT median, ms"
"""Names of figures of `gllm plan diff`."""
RATE = "requests/s"
FACTORS = {RATE: 1.0, ATTAINMENT: 100.0, TTFT: 1e3, TPOT: 1e3}
"""Multipliers of the table."""
MAX_DIFFERENCES = {ATTAINMENT: 0.05, TTFT: 0.15, TPOT: 0.15}
"""Largest difference to the plan: a share of the requests; else relative."""
SCALING_RANGE = (1.9, 2.1)
"""Highest rate of two engines over that of one."""
Row = dict[str, Any]


class ComparedFigure(NamedTuple):
    """A figure of the plan and its median over rounds."""

    name: str
    expected: float | None
    measured: float | None
    difference: float | None
    """Points for the attainment, else relative; None if a value is missing."""

    @property
    def is_within(self) -> bool:
        """True if the difference is known and within MAX_DIFFERENCES."""
        limit = MAX_DIFFERENCES[self.name]
        return self.difference is not None and abs(self.difference) <= limit


def compare_rounds(rounds: Sequence[Row]) -> list[ComparedFigure]:
    """Return each figure of FACTORS with its median over the rounds that have it."""
    figures = []
    for name in FACTORS:
        rows = [each["figures"][name] for each in rounds]
        expected = rows[0]["expected"]
        values = [row["measured"] for row in rows if row["measured"] is not None]
        measured = median(values) if values else None
        difference = None
        if measured is not None and expected is not None:
            difference = measured - expected
            if name != ATTAINMENT:
                difference = difference / expected if expected else None
        figures.append(ComparedFigure(name, expected, measured, difference))
    return figures


def format_page(setups: Sequence[Row]) -> str:
    """Format all setups: the judged ones have a minimum step time."""
    return "\n\n".join(map(_format_setup, setups))


def _format_setup(setup: Row) -> str:
    is_judged = bool(setup["step_seconds"])
    figures = compare_rounds(setup["rounds"])
    parts = [
        f"## Engines with a {setup['setup']}" if is_judged else "## Engines at full speed",
        _describe(setup),
        _format_figures(figures, setup["rounds"]),
    ]
    if is_judged:
        parts.append(judge(figures, setup))
    else:
        parts.append(
            "These differences are not judged: engines, router and client share two cores, which "
            "the profile of an engine does not contain."
        )
    return "\n\n".join(parts)


def _describe(setup: Row) -> str:
    step = setup["step_seconds"]
    lines = [
        f"`gllm plan search` predicts {setup['capacity']:.3g} requests/s of "
        f"{setup['num_engines']} engines within {LIMITS} (seconds); requests ({WORKLOAD}) arrive "
        f"at {LOAD_SHARE:.0%} of one engine's capacity times {NUM_ENGINES}, {setup['rate']:.3g}/s.",
        f"Limits of a request, from a simulation at this rate: {setup['limits']}. Latencies "
        f"{SHIFT:.0%} longer or shorter change the expected attainment to "
        f"{setup['shifted'][0]:.0%} or {setup['shifted'][1]:.0%}. The search: "
        f"`{setup['command']}`.",
    ]
    if step:
        limit = setup["num_engines"] * MAX_NUM_SEQS / (OUTPUT_TOKENS * step)
        lines.append(
            f"A step takes {step:g} s at least, so {MAX_NUM_SEQS} sequences of {OUTPUT_TOKENS} "
            f"tokens per engine cannot exceed {limit:.3g} requests/s together; no TPOT is below "
            f"{step * 1e3:g} ms, and no TTFT."
        )
    lines.append(f"Other programs used {setup['foreign_cores']:.2f} cores.")
    return " ".join(lines)


def _format_figures(figures: Sequence[ComparedFigure], rounds: Sequence[Row]) -> str:
    rows = []
    for each in figures:
        factor = FACTORS[each.name]
        measured = [row["figures"][each.name]["measured"] for row in rounds]
        rows.append(
            [
                each.name,
                show_value(each.expected, factor),
                show_value(each.measured, factor),
                format_difference(each),
                ", ".join(show_value(value, factor) for value in measured),
            ]
        )
    cores = [row["client_cores"] for row in rounds]
    rows.append(["client, cores", "", f"{median(cores):.2f}", "", _list(cores, ".2f")])
    for name, key in ((TTFT, "median_ttft_ms"), (TPOT, "median_tpot_ms")):
        values = [row[key] for row in rounds]
        title = f"{name}, at the client"
        rows.append([title, "", f"{median(values):.4g}", "", _list(values, ".4g")])
    header = ["", "expected", "measured", "difference", "rounds"]
    return format_table(header, rows)


def format_difference(figure: ComparedFigure) -> str:
    """Return a difference as text: points for the attainment."""
    if figure.difference is None:
        return ""
    if figure.name == ATTAINMENT:
        return f"{100 * figure.difference:+.1f} points"
    return f"{figure.difference:+.1%}"


def judge(figures: Sequence[ComparedFigure], setup: Row) -> str:
    """Return the statements about a setup, each met or missed."""
    failed = sum(row["failed"] for row in setup["rounds"])
    lines = [f"- Requests that failed: {failed} ({is_met(not failed)})."]
    if setup["scaling"]:
        one, two = setup["scaling"]
        low, high = SCALING_RANGE
        lines.insert(
            0,
            f"- One engine serves {one:.3g} requests/s at most, two serve {two:.3g}: "
            f"{two / one:.2f} times as many ({low} to {high}: {is_met(low <= two / one <= high)}).",
        )
    for each in figures:
        if each.name in MAX_DIFFERENCES:
            limit = f"{MAX_DIFFERENCES[each.name]:.0%}"
            if each.name == ATTAINMENT:
                limit = f"{100 * MAX_DIFFERENCES[each.name]:g} points"
            text = format_difference(each) or "unknown"
            lines.append(f"- {each.name}: {text} (at most {limit}: {is_met(each.is_within)}).")
    return "\n".join(lines)


def _list(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)
