"""Difference between the figures that a plan expects and those of its engines' step logs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline, collect_latencies, slo_attainment
from gllm.observability.step_log import AddEvent, CommitEvent, StartEvent, StepLogEvent
from gllm.options.slo import Slo
from gllm.plan.serving_plan import ExpectedFigures, PlanError, ServingPlan
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import build_run_record


@dataclass(frozen=True)
class LoggedRun:
    """Requests that one engine of a plan has served, read from its log of scheduler steps."""

    name: str
    role: str
    timelines: list[RequestTimeline]
    """Arrival and token times of each request."""
    startup_seconds: float | None
    """Seconds from the start of the process until it could serve; None in a simulation."""

    @property
    def serves_prefill(self) -> bool:
        """True if the engine computes prompts."""
        return self.role != "decode"

    @property
    def serves_decode(self) -> bool:
        """True if the engine decodes."""
        return self.role != "prefill"

    def measure_rate(self) -> float | None:
        """Return the rate between first and last arrival, per second; None for fewer than two."""
        arrivals = sorted(line.arrival for line in self.timelines)
        span = arrivals[-1] - arrivals[0] if arrivals else 0.0
        return (len(arrivals) - 1) / span if span else None


class FigureComparison(NamedTuple):
    """A quantity that a plan predicts, such as the median TTFT, and its measured value."""

    name: str
    expected: float | None
    """Predicted value; None if the plan has none."""
    measured: float | None
    """Measured value; None if the logs have none."""
    factor: float = 1.0
    """Multiplier for the table, such as 1000 for milliseconds."""
    is_share: bool = False
    """True for a share 0..1, whose difference is given in percentage points."""

    @property
    def difference(self) -> float | None:
        """Measured relative to predicted value minus 1, or their difference for a share.

        None if a value is missing.
        """
        if self.expected is None or self.measured is None:
            return None
        if self.is_share:
            return self.measured - self.expected
        return self.measured / self.expected - 1 if self.expected else None


def read_engine_run(plan: ServingPlan, name: str, events: Sequence[StepLogEvent]) -> LoggedRun:
    """Return the requests in an engine's log of scheduler steps, without warm-up requests.

    Args:
        plan: Plan of the engine.
        name: Name of the engine.
        events: Events of its step log.

    Raises:
        PlanError: The log is that of an engine with other stages.
        ValueError: The log does not begin with the start of the engine.
    """
    run = build_run_record(events)
    engine = plan.engines[name]
    layers = [stage.layers for stage in engine.stages]
    degrees = [stage.num_ranks for stage in engine.stages]
    log_degrees = run.start.degrees or [1] * len(run.start.layers)
    if run.start.layers != layers or log_degrees != degrees:
        raise PlanError(
            f"engines.{name}.stages: {layers} layers on {degrees} ranks, but its step log has "
            f"{run.start.layers} on {log_degrees}: give the log of a run of this plan"
        )
    timelines = [served.line for served in run.requests.values()]
    return LoggedRun(name, engine.role, timelines, measure_startup(events))


def measure_startup(events: Iterable[StepLogEvent]) -> float | None:
    """Return the seconds from the start of an engine process to the end of its warm-up.

    None if the log does not have them, as that of a simulation or of a run without warm-up.

    Args:
        events: Events of the engine's step log.
    """
    iterator = iter(events)
    start = next(iterator, None)
    if not isinstance(start, StartEvent) or not start.process_seconds:
        return None
    num_warm_ups = start.warm_ups
    ready: float | None = None
    for event in iterator:
        if isinstance(event, AddEvent):
            num_warm_ups -= 1
            if num_warm_ups < 0:
                break
        elif isinstance(event, CommitEvent):
            ready = event.time
    return None if ready is None else start.process_seconds + ready - start.time


def compare_with_plan(plan: ServingPlan, runs: Sequence[LoggedRun]) -> list[FigureComparison]:
    """Compare the predicted rate, latencies, SLO attainment and startup time with measured ones.

    Measured values are from the step logs of the plan's engines: TTFT from engines that prefill,
    TPOT from engines that decode. If two engines serve a request, their logs cannot be joined; the
    SLO attainment is then a lower bound.

    Args:
        plan: Plan with predicted values.
        runs: Requests of each of its engines.
    """
    expected = plan.expected or ExpectedFigures("", 0.0)
    arriving = [line for run in runs if run.serves_prefill for line in run.timelines]
    ending = [line for run in runs if run.serves_decode for line in run.timelines]
    ttft, tpot = collect_latencies(arriving)["ttft"], collect_latencies(ending)["tpot"]
    rates = [run.measure_rate() for run in runs if run.serves_prefill]
    known = [rate for rate in rates if rate is not None]
    startups = [run.startup_seconds for run in runs if run.startup_seconds is not None]
    return [
        FigureComparison("requests/s", expected.rate or None, sum(known) if known else None),
        FigureComparison(
            "SLO attainment, %",
            expected.attainment,
            measure_attainment(plan, arriving, ending),
            100,
            is_share=True,
        ),
        FigureComparison(
            "TTFT median, ms", expected.ttft_seconds, median(ttft) if ttft else None, 1e3
        ),
        FigureComparison(
            "TPOT median, ms", expected.tpot_seconds, median(tpot) if tpot else None, 1e3
        ),
        FigureComparison("startup, s", expected.startup_seconds, max(startups, default=None)),
    ]


def measure_attainment(
    plan: ServingPlan, arriving: Sequence[RequestTimeline], ending: Sequence[RequestTimeline]
) -> float | None:
    """Return the share (0..1) of requests that met the latency goals of a plan.

    A lower bound if separate engines prefill and decode. None without goals or requests.

    Args:
        plan: Plan with latency goals.
        arriving: Requests of the engines that prefill.
        ending: Requests of the engines that decode.
    """
    goals = plan.slo
    if (goals.ttft is None and goals.tpot is None) or not arriving or not ending:
        return None
    if all(engine.role == "mixed" for engine in plan.engines.values()):
        return slo_attainment(arriving, Slo(goals.ttft, goals.tpot))
    shares = (
        slo_attainment(arriving, Slo(goals.ttft)),
        slo_attainment(ending, Slo(tpot_seconds=goals.tpot)),
    )
    return max(0.0, sum(shares) - 1)


def find_exceeding_figures(figures: Iterable[FigureComparison], tolerance: float) -> list[str]:
    """Return the names of the quantities whose measured value is too far from the predicted one.

    Args:
        figures: Predicted and measured values.
        tolerance: Largest allowed relative difference; absolute for shares.
    """
    return [
        figure.name
        for figure in figures
        if figure.difference is not None and abs(figure.difference) > tolerance
    ]


def format_figures(figures: Sequence[FigureComparison]) -> str:
    """Return a text table with the predicted and the measured value of each quantity."""
    rows = []
    for figure in figures:
        cells = [show_value(value, figure.factor) for value in (figure.expected, figure.measured)]
        rows.append([figure.name, *cells, _format_difference(figure)])
    return format_table(["", "expected", "measured", "difference"], rows)


def format_runs(runs: Sequence[LoggedRun]) -> str:
    """Return a text table with number, rate and median latencies of each engine's requests."""
    rows = []
    for run in runs:
        latencies = collect_latencies(run.timelines)
        medians = [median(latencies[name]) if latencies[name] else None for name in LATENCIES]
        rows.append(
            [
                run.name,
                run.role,
                str(len(run.timelines)),
                show_value(run.measure_rate()),
                *(show_value(value, 1e3) for value in medians),
                show_value(run.startup_seconds),
            ]
        )
    header = ["engine", "role", "requests", "requests/s", "TTFT, ms", "TPOT, ms", "startup, s"]
    return format_table(header, rows)


LATENCIES = ("ttft", "tpot")
"""Latencies of the table of engines, of which it has the medians."""


def _format_difference(figure: FigureComparison) -> str:
    if figure.difference is None:
        return ""
    if figure.is_share:
        return f"{figure.difference * 100:+.1f} points"
    return f"{figure.difference:+.1%}"
