"""Parts of a stage instance for the driver: its scheduler with the step log, and its messages."""

import time

from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    RestartEvent,
    StartEvent,
    StepLogWriter,
    continue_step_log,
)
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.node.machine import process_age_seconds
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler


def create_scheduler(
    assignment: StageAssignment, config: SchedulerConfig
) -> tuple[Scheduler, StepLogWriter | None]:
    """Create the scheduler of an epoch.

    Args:
        assignment: of the first stage.
        config: resolved.

    Returns:
        The scheduler, and the step log that it writes if the engine has one.
    """
    engine = assignment.config
    if engine.step_log is None:
        return Scheduler(config, output_lengths=assignment.output_lengths), None
    now, layers = time.monotonic(), assignment.layer_counts
    degrees = list(assignment.degrees) if max(assignment.degrees) > 1 else []
    start = StartEvent(
        now,
        engine.model,
        layers,
        config,
        "driver",
        warm_ups=1,
        degrees=degrees,
        process_seconds=process_age_seconds(),
    )
    restart = RestartEvent(
        now,
        assignment.placement.epoch,
        assignment.restart_cause,
        assignment.num_resumed_requests,
        layers,
        config,
        warm_ups=1,
        output_lengths=assignment.output_lengths,
        degrees=degrees,
    )
    step_log = continue_step_log(engine.step_log, start, restart)
    scheduler = LoggedScheduler(config, step_log.write, time.monotonic, assignment.output_lengths)
    return scheduler, step_log
