"""Replay a real run and check that the scheduler makes the same decisions.

Two checks that the simulator contains the production scheduler: the recorded calls return the
recorded plans, bit by bit; and the event loop, with recorded arrivals and step times, makes the
same plans. A log with restarts is replayed epoch by epoch.
`python -m gllm.sim.replay LOG` prints both.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from gllm.observability.logged_scheduler import replay_event, to_scheduler_request
from gllm.observability.step_log import (
    AddEvent,
    ScheduleEvent,
    StartEvent,
    StepLogEvent,
    read_step_log,
    split_epochs,
)
from gllm.scheduler.plan import StepPlan
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.compare import read_aborts
from gllm.sim.costs.base import CostModel, TransferCost
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.metrics.run_record import RunRecord, StepCosts, build_run_record, measure_step_costs


class RecordedCostModel(CostModel):
    """Cost model that returns the step times recorded in a run, by step number.

    A step beyond the recording takes as long as its last one.

    Args:
        run: Record of the run.
    """

    def __init__(self, run: RunRecord) -> None:
        """Read the step times of a run.

        Raises:
            ValueError: The run has no complete steps.
        """
        self._costs = list(measure_step_costs(run))
        if not self._costs:
            raise ValueError("the run has no step whose times are all there")

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the recorded seconds."""
        return self._at(work).stage_seconds[stage]

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the recorded time; 0 where the next stage was busy and the link cost nothing."""
        return TransferCost(self._at(work).link_seconds[stage] or 0.0)

    def plan_seconds(self, work: StageWork) -> float:
        """Return the recorded seconds; 0 where the first stage was busy."""
        return self._at(work).plan_seconds or 0.0

    def return_seconds(self, work: StageWork) -> float:
        """Return the recorded seconds."""
        return self._at(work).return_seconds

    def _at(self, work: StageWork) -> StepCosts:
        return self._costs[min(work.step, len(self._costs) - 1)]


@dataclass(frozen=True)
class ReplayResult:
    """Number of batches planned in a run, and how many of them its replay planned identically."""

    num_equal: int
    """Number of batches that the replay planned identically."""
    num_plans: int
    """Number of batches that were planned."""

    @property
    def share(self) -> float:
        """Share of equal plans, 0..1; 1 without plans."""
        return self.num_equal / self.num_plans if self.num_plans else 1.0


@dataclass(frozen=True)
class TimedReplayResult(ReplayResult):
    """Number of equally planned batches of a run and its simulation, and the latency errors.

    The simulation takes the step times that were recorded in the run.
    """

    latency_errors: dict[str, float]
    """Median of |simulated - real| / real over the requests since the last restart, by metric."""


def replay_calls(events: list[StepLogEvent]) -> ReplayResult:
    """Repeat the logged scheduler calls on a new scheduler and count how many plans are equal.

    The log is divided at restarts of the engine; each part has a new scheduler. Plans are compared
    in all fields.

    Args:
        events: Events of the step log, which records the scheduler calls and step times of a run.
    """
    return _sum_agreements(map(_replay_epoch_calls, split_epochs(events)))


def _replay_epoch_calls(events: list[StepLogEvent]) -> ReplayResult:
    start = events[0]
    assert isinstance(start, StartEvent), "split_epochs puts it there"
    scheduler = Scheduler(start.scheduler, output_lengths=start.output_lengths)
    equal = plans = 0
    for event in events[1:]:
        plan = replay_event(scheduler, event)
        recorded = event.plan if isinstance(event, ScheduleEvent) else None
        if plan is not None or recorded is not None:
            plans += 1
            equal += plan == recorded
    return ReplayResult(equal, plans)


def replay_step_times(events: list[StepLogEvent]) -> TimedReplayResult:
    """Simulate a logged run with its arrivals and step times; compare its plans and latencies.

    Plans are compared by their sequences and token ranges. The log is divided at restarts of the
    engine, and each part simulated on its own; parts without a complete step are left out.

    Args:
        events: Events of the step log.
    """
    *ended, last = split_epochs(events)
    agreements = [_replay_ended_epoch(epoch) for epoch in ended]
    run = build_run_record(last, warm_ups=True)
    simulated_run, simulated = _simulate_epoch(last, run)
    agreements.append(_compare_plans(_plans(last), _plans(simulated)))
    total = _sum_agreements(agreements)
    return TimedReplayResult(
        total.num_equal, total.num_plans, _median_latency_errors(run, simulated_run)
    )


def _replay_ended_epoch(events: list[StepLogEvent]) -> ReplayResult:
    run = build_run_record(events, warm_ups=True)
    if not any(measure_step_costs(run)):
        return ReplayResult(0, 0)
    _, simulated = _simulate_epoch(events, run)
    plans = _plans(events)
    return _compare_plans(plans, _plans(simulated)[: len(plans)])


def _compare_plans(real: list[StepPlan], simulated: list[StepPlan]) -> ReplayResult:
    pairs = zip(map(_content, real), map(_content, simulated), strict=False)
    equal = sum(one == other for one, other in pairs)
    return ReplayResult(equal, max(len(real), len(simulated)))


def _median_latency_errors(run: RunRecord, simulated: RunRecord) -> dict[str, float]:
    errors: dict[str, list[float]] = {"ttft": [], "e2el": []}
    for seq, served in run.requests.items():
        real, again = served.line, simulated.requests[seq].line
        if not (real.times and again.times):
            continue
        for metric, index in (("ttft", 0), ("e2el", -1)):
            latency = real.times[index] - real.arrival
            errors[metric].append(abs(again.times[index] - real.times[index]) / latency)
    return {metric: median(values) for metric, values in errors.items() if values}


def _simulate_epoch(
    events: list[StepLogEvent], run: RunRecord
) -> tuple[RunRecord, list[StepLogEvent]]:
    """Simulate an epoch with its own arrivals and step times."""
    requests = [
        _received_request(event, received_time)
        for event in events
        if isinstance(event, AddEvent) and (received_time := run.requests[event.seq].received_time)
    ]
    start = run.start
    deployment = Deployment(
        start.model,
        start.layers,
        RecordedCostModel(run),
        start.scheduler,
        start.output_lengths,
        start.degrees,
    )
    return simulate_scheduler_requests(
        deployment, requests, read_aborts(events), run.stage_reports, run.depth_changes
    )


def _received_request(event: AddEvent, time: float) -> tuple[float, SchedulerRequest]:
    """Return a request at the time at which the driver had all that came with it.

    Its age keeps its own arrival: policies order requests by it.
    """
    request = to_scheduler_request(event)
    return time, request._replace(age_seconds=request.age_seconds + time - event.time)


def _sum_agreements(agreements: Iterable[ReplayResult]) -> ReplayResult:
    pairs = [(agreement.num_equal, agreement.num_plans) for agreement in agreements]
    return ReplayResult(sum(equal for equal, _ in pairs), sum(plans for _, plans in pairs))


def _plans(events: list[StepLogEvent]) -> list[StepPlan]:
    return [e.plan for e in events if isinstance(e, ScheduleEvent) and e.plan is not None]


def _content(plan: StepPlan) -> list[tuple[int, int, int, int]]:
    return [(row.seq, row.num_preemptions, row.start, row.num_tokens) for row in plan.rows]


def main(argv: list[str]) -> int:
    """Replay the step log named by the first argument and print how many plans are equal.

    A step log records the scheduler calls and step times of a run. Two lines are printed: for
    repeated scheduler calls, and for a simulation with the recorded step times. The exit status is
    0 if all plans of the first and at least 95 % of the second are equal, otherwise 1.
    """
    events = list(read_step_log(argv[0]))
    calls, times = replay_calls(events), replay_step_times(events)
    print(f"recorded calls: {calls.num_equal} of {calls.num_plans} plans bit-identical")
    print(f"recorded times: {times.num_equal} of {times.num_plans} plans equal ({times.share:.1%})")
    return 0 if calls.num_equal == calls.num_plans and times.share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
