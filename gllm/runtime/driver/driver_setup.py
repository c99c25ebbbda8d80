"""Parts of a stage instance for the driver: its scheduler with the step log, and its messages."""

import time

from gllm.messages.codec import AnyMessage
from gllm.messages.control import ResetPrefixCache
from gllm.messages.handoff import PrefetchKv, ReleaseKvHolds, RenewKvHolds
from gllm.messages.kv_cache import WatchKvCache
from gllm.messages.kv_transfer import KvFetched, KvFetchStarted, KvMoverGone, KvRevoked
from gllm.messages.measurement import LinkTimes
from gllm.messages.reports import StageTimes
from gllm.messages.requests import AbortSequences, RejectedRequest, SubmitRequest
from gllm.messages.steps import GrammarReady, StepDone
from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    RestartEvent,
    StartEvent,
    StepLogWriter,
    continue_step_log,
)
from gllm.runtime.driver.driver import Driver
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.node.machine import process_age_seconds
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.scheduler import Scheduler


def create_scheduler(
    assignment: StageAssignment, config: SchedulerConfig
) -> tuple[Scheduler, StepLogWriter | None]:
    """Create the scheduler of a generation.

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
        assignment.placement.generation,
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


def dispatch_to_driver(driver: Driver, message: AnyMessage) -> None:
    """Pass a message to the driver.

    Raises:
        ValueError: the driver handles no such messages.
    """
    match message:
        case SubmitRequest():
            driver.submit(message)
        case RejectedRequest():
            driver.reject(message)
        case AbortSequences():
            driver.abort(message)
        case ResetPrefixCache():
            driver.reset_prefix_cache(message)
        case WatchKvCache():
            driver.watch_kv_cache(message)
        case StepDone():
            driver.commit(message)
        case GrammarReady():
            driver.on_grammar_ready(message)
        case StageTimes():
            driver.on_stage_times(message)
        case LinkTimes():
            driver.on_link_times(message)
        case KvFetchStarted() | KvFetched() | KvRevoked() | KvMoverGone():
            driver.on_kv_message(message)
        case PrefetchKv() | ReleaseKvHolds() | RenewKvHolds():
            driver.on_kv_message(message)
        case _:
            raise ValueError(f"the driver has no use for {type(message).__name__}")
