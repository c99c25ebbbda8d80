"""Compare a real run with its prediction.

The prediction simulates the same requests at the same times with the same configuration; the step
times come from a profile of another run.
"""

from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from gllm.observability.latency import percentile
from gllm.observability.logged_scheduler import to_scheduler_request
from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    StepLogEvent,
    read_step_log,
)
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, DelegatingCostModel
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import CostProfile, read_profile, split_sampling
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.hardware.stages import format_degrees
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord, build_run_record, measure_step_costs


class SpeedWindow(NamedTuple):
    """Time interval of a real run with the ratio of measured to predicted step time in it."""

    begin: float
    """Start in seconds; the interval ends at the start of the next one."""
    factor: float
    """Measured over predicted time of a step, above 0."""


class MachineSpeedCostModel(DelegatingCostModel):
    """Cost model wrapper that scales step times by a machine speed that changes over time.

    Used for shared machines. Times of steps, and of the driver and the sampler after them, are
    multiplied by the factor of the interval in which the step begins. Transfer times are unchanged.

    Args:
        cost: The wrapped cost model.
        windows: Slowdown factors of consecutive time intervals, in order of time; the first factor
            also applies before its interval.

    Raises:
        ValueError: There are no intervals, or a factor is not above 0.
    """

    def __init__(self, cost: CostModel, windows: Sequence[SpeedWindow]) -> None:
        super().__init__(cost)
        if not windows:
            raise ValueError("windows is empty: give at least one")
        for window in windows:
            if not window.factor > 0:
                raise ValueError(f"a window's factor is {window.factor}: it has to be above 0")
        self._windows = windows
        self._factor = windows[0].factor

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the wrapped model, multiplied by the speed factor at `now`."""
        after = bisect(self._windows, now, key=lambda window: window.begin)
        self._factor = self._windows[max(0, after - 1)].factor
        return self._factor * super().stage_seconds(stage, work, now)

    def plan_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model, multiplied by the factor of the last step."""
        return self._factor * super().plan_seconds(work)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model, multiplied by the factor of the last step."""
        return self._factor * super().sample_seconds(work)

    def return_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model, multiplied by the factor of the last step."""
        return self._factor * super().return_seconds(work)


METRICS = ("ttft", "tpot", "e2el")
WINDOW_SECONDS = 0.25
"""Least length of the windows in which the speed of the machine is measured."""


@dataclass(frozen=True)
class RunComparison:
    """A real run and two simulations of its requests: at the profiled and at the measured speed."""

    real: RunRecord
    predicted: RunRecord
    """Simulation with the step times of the profile."""
    slowdown: float
    """Measured over predicted time of all steps: slowdown of the machine, if the cost model is
    right."""
    at_speed: RunRecord
    """Simulation with step times scaled by the measured machine speed of each interval; its
    difference from the real run is the error of the simulator itself."""


def compare_with_profile(log: str | Path, profile: str | Path) -> RunComparison:
    """Simulate the requests of a step log with a cost profile, both read from files, and compare.

    Args:
        log: Step log of the real run, which records its requests, scheduler calls and step times.
        profile: Profile written by `gllm profile`.

    Raises:
        ValueError: A file is invalid, or the profile does not fit the run (`compare_runs`).
        OSError: A file cannot be read.
    """
    return compare_runs(list(read_step_log(log)), read_profile(profile))


def compare_runs(events: list[StepLogEvent], profile: CostProfile) -> RunComparison:
    """Simulate the requests of a logged run with the step times of a cost profile, and compare.

    The run may divide the layers into other stages than the profile, if the profile measured parts
    of the model.

    Args:
        events: Step log of the real run.
        profile: Measured step times of another run of the same model.

    Raises:
        ValueError: The profile does not cover the run's layers per stage, or has another tensor
            parallel size.
        CostRangeError: The run has micro-batches larger than the profile measured.
    """
    real = build_run_record(events)
    start = real.start
    if profile.layers != start.layers and not profile.spans:
        raise ValueError(
            f"the run had stages of {start.layers} layers, the profile of {profile.layers}: "
            "measure the profile at the same --pp, or again with `gllm profile`, for all cuts"
        )
    if set(profile.degrees or [1]) != set(start.degrees or [1]):
        raise ValueError(
            f"the run had --tp {format_degrees(start.degrees)}, the profile "
            f"--tp {format_degrees(profile.degrees)}: measure the profile at the same --tp"
        )
    cost = FittedCostModel(profile, start.layers)
    steps = list(_predict_steps(real, cost))
    at_speed_cost = MachineSpeedCostModel(cost, measure_speed(steps)) if steps else cost
    requests = read_requests(events, real)
    predicted, at_speed = (
        simulate_scheduler_requests(
            Deployment(start.model, start.layers, model, start.scheduler, degrees=start.degrees),
            requests,
        )[0]
        for model in (cost, at_speed_cost)
    )
    return RunComparison(real, predicted, _ratio(steps), at_speed)


class PredictedStep(NamedTuple):
    """Start time of one step of a real run, with its measured and predicted duration in seconds."""

    start: float
    """Start time on the first stage, in seconds of the run's clock."""
    measured_seconds: float
    """Measured seconds, summed over the stages."""
    predicted_seconds: float


def measure_speed(steps: Sequence[PredictedStep]) -> list[SpeedWindow]:
    """Return the ratio of measured to predicted step time in each interval of a real run.

    A shared machine may be slow for a second and fast in the next one, which a single factor for
    the run would count as an error of the simulator. Intervals last at least 0.25 s, so that the
    factor covers many steps and does not replace the prediction of each one.

    Args:
        steps: Measured and predicted step times, at least one.
    """
    parts: list[list[PredictedStep]] = []
    for step in sorted(steps):
        if not parts or step.start - parts[-1][0].start >= WINDOW_SECONDS:
            parts.append([])
        parts[-1].append(step)
    return [SpeedWindow(part[0].start, _ratio(part)) for part in parts]


def _ratio(steps: Sequence[PredictedStep]) -> float:
    """Return the measured seconds of some steps over the predicted ones; 1 without steps.

    A profile predicts mean times, and steps that other programs interrupt delay requests too, so
    sums are compared: the median step is shorter than the mean one.
    """
    predicted = sum(step.predicted_seconds for step in steps)
    return sum(step.measured_seconds for step in steps) / predicted if predicted else 1.0


def _predict_steps(run: RunRecord, cost: FittedCostModel) -> Iterator[PredictedStep]:
    """Return the complete steps of a run."""
    for costs in measure_step_costs(run):
        measured, _ = split_sampling(costs)
        first = costs.step.stage_times[0]
        assert first is not None, "costs have complete times"
        predicted = sum(
            cost.stage_seconds(stage, costs.step.work) + num_arrivals * cost.arrival_seconds(stage)
            for stage, num_arrivals in enumerate(costs.num_arrivals)
        )
        yield PredictedStep(first.start, sum(measured), predicted)


def read_requests(
    events: list[StepLogEvent], run: RunRecord
) -> list[tuple[float, SchedulerRequest]]:
    """Return the arrival times and requests of a step log, without warm-up requests.

    Each request is set to generate as many tokens as it did in the real run.

    Args:
        events: Events of the step log.
        run: Record of the same log, which has the output lengths.
    """
    requests = []
    for event in events:
        if isinstance(event, AddEvent) and event.seq in run.requests:
            seqs = range(event.seq, event.seq + event.n)
            tokens = max(1, *(run.requests[seq].line.num_tokens for seq in seqs))
            request = to_scheduler_request(event)._replace(
                max_tokens=tokens, stop_token_ids=frozenset()
            )
            requests.append((event.time, request))
    return requests


def read_aborts(events: list[StepLogEvent]) -> list[tuple[float, list[int]]]:
    """Return the time of each abort in a step log, with the ids of the aborted sequences."""
    return [(event.time, event.seqs) for event in events if isinstance(event, AbortEvent)]


def _values(run: RunRecord, metric: str) -> dict[int, float]:
    values = ((seq, getattr(served.line, metric)) for seq, served in run.requests.items())
    return {seq: value for seq, value in values if value is not None}


def median_request_error(comparison: RunComparison, metric: str) -> float:
    """Return the median over all requests of the relative error |predicted - real| / real.

    Args:
        comparison: The real and the simulated run.
        metric: Latency metric: ttft, tpot or e2el.
    """
    return median(request_errors(comparison, metric))


def request_errors(comparison: RunComparison, metric: str, at_speed: bool = False) -> list[float]:
    """Return the relative error |predicted - real| / real of each request's latency.

    Args:
        comparison: The real and the simulated run.
        metric: Latency metric: ttft, tpot or e2el.
        at_speed: True to use the simulation that was corrected for the measured machine speed.
    """
    predicted = comparison.at_speed if at_speed else comparison.predicted
    real, values = _values(comparison.real, metric), _values(predicted, metric)
    return [
        abs(values[seq] - value) / value for seq, value in real.items() if value and seq in values
    ]


def comparison_table(comparison: RunComparison) -> str:
    """Return a Markdown table of real and predicted latencies, busy and idle shares of stages."""
    rows = []
    for metric in METRICS:
        real = list(_values(comparison.real, metric).values())
        predicted = list(_values(comparison.predicted, metric).values())
        pairs = {
            "mean": (fmean(real), fmean(predicted)),
            **{f"p{p}": (percentile(real, p), percentile(predicted, p)) for p in (50, 90, 99)},
        }
        for name, (measured, expected) in pairs.items():
            label = f"{metric.upper()} {name}, ms"
            change = f"{expected / measured - 1:+.1%}"
            rows.append([label, show_value(measured, 1e3), show_value(expected, 1e3), change])
        error = median_request_error(comparison, metric)
        rows.append([f"{metric.upper()} median error of a request", "", "", f"{error:.1%}"])
    uses = comparison.real.stage_usages(), comparison.predicted.stage_usages()
    for label, name in (("stages busy, %", "busy_share"), ("bubbles, %", "bubble_share")):
        shares = [show_value([getattr(use, name) for use in stages], 100) for stages in uses]
        rows.append([label, *shares, ""])
    counts = len(comparison.real.micro_batches), len(comparison.predicted.micro_batches)
    rows.append(["micro-batches", *map(str, counts), f"{counts[1] / counts[0] - 1:+.1%}"])
    rows.append(["machine slower than in the profile", f"{comparison.slowdown:.2f} x", "", ""])
    return format_table(["", "real", "predicted", "error"], rows)
