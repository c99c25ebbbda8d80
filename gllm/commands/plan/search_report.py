"""Tables and picture of `gllm plan search`."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from gllm.plan.best_first import BestFirstOutcome
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.fleet import FleetForecast
from gllm.plan.search.objectives import OBJECTIVES, AssessedDesign
from gllm.sim.metrics.plots import plot_scatter
from gllm.sim.metrics.report import format_table, show_value

Outcome = BestFirstOutcome[EngineDesign, AssessedDesign]
NUM_ROWS = 20
"""Most designs in a table."""
NUM_UNTRIED = 5
"""Most designs that were not tried and are named."""


def describe_search(
    outcome: Outcome, problem: ServiceProblem, num_designs: int, is_closed: bool
) -> str:
    """Return a table of the evaluated engine designs, best first, and counts of all others.

    Args:
        outcome: result of the search; a design is a device, parallelism and scheduling policy.
        problem: objective and workload of the search.
        num_designs: number of designs that the flags allow.
        is_closed: True if designs were estimated by formulas, False if they were simulated.
    """
    results = sorted((result for _, result in outcome.evaluated), key=lambda result: -result.score)
    front = find_pareto_set(outcome)
    shown = results[:NUM_ROWS] + [result for result in front if result not in results[:NUM_ROWS]]
    rows = [_row(result, result in front) for result in shown]
    header = ["design", "requests/s", "engines", OBJECTIVES[problem.objective].unit]
    table = format_table([*header, "TTFT p90, s", "TPOT p50, s", "TBT p99, s", "Pareto"], rows)
    word = "estimated" if is_closed else "simulated"
    lines = [table, "", f"{len(results)} of {num_designs} designs {word}"]
    lines += _count_lines("ruled out by closed forms", outcome.pruned)
    lines += _count_lines("left out", outcome.left_out)
    if outcome.untried:
        names = "; ".join(map(str, outcome.untried[:NUM_UNTRIED]))
        more = len(outcome.untried) - NUM_UNTRIED
        lines.append(f"not tried: {names}" + (f"; and {more} more" if more > 0 else ""))
    failures = Counter(result.note for result in results if result.note)
    lines += _count_lines(f"{word} without a capacity", failures)
    return "\n".join(lines)


def find_pareto_set(outcome: Outcome) -> list[AssessedDesign]:
    """Return the engine designs that are Pareto-optimal in objective, TTFT p90 and TBT p99."""
    served = [result for _, result in outcome.evaluated if result.num_engines and not result.note]

    def costs(result: AssessedDesign) -> tuple[float, ...]:
        latencies = result.latencies
        return (-result.score, latencies.ttft_p90 or 0.0, latencies.itl_p99 or 0.0)

    return pareto_set(served, costs)


def describe_result(result: AssessedDesign, problem: ServiceProblem) -> str:
    """Return the number of engines of a design and the value of the objective as text."""
    engines = f"{result.num_engines} engine{'s' * (result.num_engines > 1)}"
    unit = OBJECTIVES[problem.objective].unit
    return f"{engines} of {result.design}, {show_value(result.value)} {unit}"


def describe_bound(best: AssessedDesign, outcome: Outcome, problem: ServiceProblem) -> str:
    """Return the bound of the objective over all designs, and how far the best one is from it.

    Args:
        best: chosen design.
        outcome: result of the search, with the bounds of the designs by closed forms.
        problem: objective of the search.
    """
    objective = OBJECTIVES[problem.objective]
    sign = -1 if objective.is_least else 1

    def describe(bound: float) -> str:
        value = sign * max(bound, best.score)
        gap = abs(value / best.value - 1)
        return f"{show_value(value)} {objective.unit}, {show_value(100 * gap)} % better"

    side = "at least" if objective.is_least else "at most"
    lines = [f"bound by closed forms, of equal engines: {side} {describe(outcome.bound)}"]
    if outcome.untried:
        lines.append(f"designs that were not tried: {side} {describe(outcome.open_bound)}")
    return "\n".join(lines)


def format_forecast(
    best: AssessedDesign, forecast: FleetForecast, outcome: Outcome, problem: ServiceProblem
) -> str:
    """Return the best engine design with its predicted figures and the bound of all as text.

    Args:
        best: chosen design.
        forecast: figures of its engines.
        outcome: result of the search.
        problem: objective of the search.
    """
    expected = forecast.expected
    figures = [
        *(
            f"{name} {show_value(value, factor)} {unit}"
            for name, value, factor, unit in (
                ("capacity", expected.capacity, 1.0, "requests/s"),
                ("TTFT p50", expected.ttft_seconds, 1.0, "s"),
                ("TPOT p50", expected.tpot_seconds, 1.0, "s"),
                ("within the limits", expected.attainment, 100.0, "%"),
            )
            if value is not None
        ),
    ]
    lines = [
        f"\nbest: {describe_result(best, problem)}",
        describe_bound(best, outcome, problem),
        f"at {show_value(expected.rate)} requests/s: {', '.join(figures)}",
    ]
    if not forecast.is_within:
        lines.append("this misses the limits: the fleet has no further devices, or no --rate")
    return "\n".join(lines)


def plot_search(outcome: Outcome, problem: ServiceProblem, path: Path) -> None:
    """Plot the objective over TTFT p90 of all evaluated designs.

    Args:
        outcome: result of the search.
        problem: objective and workload of the search.
        path: file of the plot, .svg or .png.

    Raises:
        ValueError: the file has another suffix.
        ImportError: matplotlib is not installed.
    """

    def point(result: AssessedDesign) -> tuple[float, float]:
        return result.latencies.ttft_p90 or 0.0, result.value

    groups: dict[str, list[tuple[float, float]]] = {}
    for design, result in outcome.evaluated:
        if result.num_engines and not result.note:
            groups.setdefault(design.device or "cores", []).append(point(result))
    front = sorted(point(result) for result in find_pareto_set(outcome))
    plot_scatter(
        groups,
        front,
        "Pareto set (with TBT)",
        path,
        "TTFT p90 at the capacity, s",
        OBJECTIVES[problem.objective].unit,
        f"{problem.objective}, {problem.workload}",
    )


def _row(result: AssessedDesign, is_optimal: bool) -> list[str]:
    has_value = result.num_engines > 0
    return [
        str(result.design),
        show_value(result.capacity),
        str(result.num_engines) if has_value else "",
        show_value(result.value) if has_value else "",
        *(show_value(latency) for latency in result.latencies),
        "yes" if is_optimal else "",
    ]


def _count_lines(title: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    return [f"{title}:", *(f"  {count:5} {reason}" for reason, count in counts.most_common())]


Item = TypeVar("Item")


def pareto_set(items: Sequence[Item], costs: Callable[[Item], tuple[float, ...]]) -> list[Item]:
    """Return the items that no other item dominates, sorted by their first cost.

    An item dominates another one if none of its costs is higher and one is lower. Of items with
    equal costs the first is kept.

    Args:
        items: the candidates.
        costs: returns the quantities of an item of which less is better, the same number for each.
    """
    chosen: list[tuple[tuple[float, ...], Item]] = []
    for cost, item in sorted(((costs(item), item) for item in items), key=lambda pair: pair[0]):
        # In this order, only an earlier item can dominate.
        if not any(all(a <= b for a, b in zip(other, cost, strict=True)) for other, _ in chosen):
            chosen.append((cost, item))
    return [item for _, item in chosen]
