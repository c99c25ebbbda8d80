"""Records of an engine's recovery: its state, its limits, its workers and their positions."""

import math
from dataclasses import dataclass
from enum import StrEnum
from random import Random

from gllm.recovery.backoff import backoff_seconds
from gllm.recovery.placement import LOCAL_NODE

FIRST_BACKOFF_SECONDS = 0.5
"""Delay before the second restart of a place without a committed step between; then it doubles."""
MAX_BACKOFF_SECONDS = 30.0
"""Longest delay before a restart, with jitter."""


STEADY_SECONDS = 300.0
"""Time for which an engine has to be ready before its earlier deaths no longer count."""


STANDBY_SECONDS = 5.0
"""Time after a recovery in which no standby worker is started: its imports would slow down the
requests that continue."""


class RecoveryState(StrEnum):
    """State of an engine's worker processes, from the start of processes to ready or dead."""

    NEW = "new"
    """Before `start`."""
    FORMING = "forming"
    """Some rank of a stage has no worker, or a worker that still has the KV cache of before the
    restart."""
    MEASURING = "measuring"
    """The workers measure their speed, by which the layers are divided."""
    LOADING = "loading"
    """The workers load their weights."""
    INITIALIZING = "initializing"
    """The workers allocate their KV caches."""
    WARMING = "warming"
    """The first token after the start is computed."""
    READY = "ready"
    DEAD = "dead"


@dataclass(frozen=True)
class RecoveryLimits:
    """Limits of worker restarts, and timeouts of a recovery in seconds."""

    max_restarts: int = 3
    """Restarts of one worker without a completed step or `STEADY_SECONDS` between; the next death
    ends the engine."""
    recovery_timeout: float = 60.0
    """Seconds after which requests that wait for the recovery end with an error."""
    num_standbys: int = 0
    """Standby worker processes per node, which replace dead workers."""
    spare_preloads: bool = False
    """True if standby workers of spare nodes load the layers of the costliest stage in advance."""
    standbys_map: bool = False
    """True if standby workers map the packed weights of all workers of their node in advance."""
    close_seconds: float = 5.0
    """Seconds in which a surviving worker has to free its KV cache; then it is killed."""
    phase_seconds: float = 900.0
    """Seconds in which each worker has to measure, load, initialize or warm up; progress of loading
    extends them. Then it is killed."""
    node_return_seconds: float | None = None
    """Seconds for which the stages of a lost node wait for it, if no spare takes them, before the
    other stages take over its layers; None for a prediction, see `choose_return_seconds`."""
    join_seconds: float = 300.0
    """Seconds for which an engine that has never been ready waits for a lost node; then it ends."""


class Activity(StrEnum):
    """Activity of a worker process: idle, assigned to a stage, closing its stage, or exiting."""

    IDLE = "idle"
    """It has no stage: it is new, or has closed its stage."""
    ASSIGNED = "assigned"
    """It has a stage in the running pipeline."""
    CLOSING = "closing"
    EXITING = "exiting"
    """It was killed; its exit follows."""


@dataclass(slots=True)
class WorkerRecord:
    """State of a worker process that has not exited: its stage and rank, activity and deadline."""

    sender: int
    """Id of the process."""
    place: int | None
    """Index of its (stage, rank) in the placement; None for a standby worker."""
    node: str = LOCAL_NODE
    """Name of the machine on which it runs."""
    activity: Activity = Activity.IDLE
    has_finished_phase: bool = False
    """True if it has finished what all workers do now: measure, load, allocate or warm up."""
    deadline: float = math.inf
    """Time at which it is killed, unless it closes or finishes the current phase."""
    has_connected: bool = False
    """False while the process may still import its modules, so that it cannot answer."""
    keeps_weights: bool = True
    """True if it can close its stage without losing its weights."""
    is_dropped: bool = False
    """True if it was killed because its stage or rank does not exist any more."""
    is_reserved: bool = False
    """True if it has no stage yet, and gets one by the planned change that is being prepared."""

    @property
    def may_return(self) -> bool:
        """True if the worker can have its stage again when its lost node returns."""
        is_living = self.activity is not Activity.EXITING
        return self.place is not None and is_living and self.keeps_weights

    def begin_phase(self, now: float, limits: RecoveryLimits) -> None:
        """Start a phase, which the worker has to finish before its deadline."""
        self.activity, self.has_finished_phase = Activity.ASSIGNED, False
        self.deadline = now + limits.phase_seconds

    def begin_closing(self, now: float, limits: RecoveryLimits) -> None:
        """Record that the worker has to free its KV cache before a deadline."""
        self.activity = Activity.CLOSING
        seconds = limits.close_seconds if self.has_connected else limits.phase_seconds
        self.deadline = now + seconds

    def mark_idle(self) -> None:
        """Record that the worker has no KV cache and no connections to other stages."""
        self.activity, self.deadline = Activity.IDLE, math.inf


@dataclass(slots=True)
class RankRecord:
    """Worker, number of deaths and time of the next restart for one rank of a stage."""

    sender: int | None = None
    """Worker process of the rank, until it has exited; None for none."""
    num_deaths: int = 0
    """Deaths since the last committed step."""
    respawn_at: float = 0.0
    """Earliest time of the next worker."""
    node: str = LOCAL_NODE
    """Name of the machine of its workers."""
    is_vacant: bool = False
    """True if that machine is lost, so that no worker can be started."""


@dataclass(slots=True)
class RetryRecord:
    """Number of failures of a repeated operation, and the earliest time of its next attempt."""

    num_failures: int = 0
    """Failures since the last success."""
    retry_at: float = 0.0
    """Earliest time of the next attempt."""

    def on_failure(self, now: float, jitter: Random, num_earlier: int = 0) -> None:
        """Count a failure; the delay is that after `num_earlier` failures more."""
        self.num_failures += 1
        self.retry_at = now + restart_delay(self.num_failures + num_earlier, jitter)


def restart_delay(num_deaths: int, jitter: Random) -> float:
    """Return the delay in seconds before a worker is restarted, by its number of deaths.

    Args:
        num_deaths: deaths since the last completed step.
        jitter: source of the random part.
    """
    if num_deaths <= 1:
        return 0.0
    seconds = backoff_seconds(num_deaths - 2, FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS)
    return seconds * jitter.uniform(0.75, 1.0)
