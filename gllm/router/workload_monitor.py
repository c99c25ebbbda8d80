"""Workload of a router: lengths and arrivals of its requests, and lasting shifts of their means.

Requests count in the order of their arrival, once all earlier ones have ended: finished requests in
the order of their ends would be short ones first.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gllm.engine.fleet_control import WorkloadMeans, WorkloadShiftStatus, WorkloadStatus
from gllm.routing.scaling.workload_shifts import (
    RequestSample,
    ShiftConfig,
    ShiftDetector,
    WindowMeans,
    WorkloadShift,
)
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_client import RequestClient

PENDING_WINDOWS = 4
"""Windows of requests that wait for the end of an earlier one; then it counts as far as it is."""
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _PendingRequest:
    """A request that has not been counted."""

    arrival_seconds: float
    num_prompt_tokens: int
    entry: JournalEntry | None
    """None once it has ended."""
    num_output_tokens: int = 0
    """Tokens of all its choices, once it has ended."""


class WorkloadMonitor:
    """Detects lasting changes of a router's mean prompt length, output length and request rate.

    A request without a token, such as one that was refused or has failed, counts for the rate only.
    """

    def __init__(
        self, config: ShiftConfig, client: RequestClient, is_leader: Callable[[], bool]
    ) -> None:
        """Create a monitor that has seen no request.

        Args:
            config: conditions of a lasting change.
            client: client of the engines, which has the requests.
            is_leader: returns True if this router may decide for all engines.
        """
        self._is_on = config.detect_shifts
        if self._is_on:
            client.on_submitted, client.on_ended = self.on_arrival, self.on_end
        self._is_leader = is_leader
        rule = config.rule
        self._detector = ShiftDetector(rule)
        self._max_pending = PENDING_WINDOWS * rule.window
        self._pending: deque[_PendingRequest] = deque()
        self._running: dict[JournalEntry, _PendingRequest] = {}
        self._recent: deque[RequestSample] = deque(maxlen=rule.num_windows * rule.window)
        """Samples of the latest windows: after a shift those that have shown it."""
        self._num_arrivals = 0
        """Arrivals since the latest sample."""
        self._num_samples = 0
        self._num_shifts = 0
        self._shift: WorkloadShift | None = None

    def on_arrival(self, entry: JournalEntry) -> None:
        """Add a submitted request."""
        pending = _PendingRequest(entry.arrival, len(entry.prompt), entry)
        self._pending.append(pending)
        self._running[entry] = pending
        if len(self._pending) > self._max_pending:
            oldest = self._pending[0].entry
            assert oldest is not None, "requests that have ended are not kept at the front"
            self.on_end(oldest)

    def on_shed(self, now: float, num_prompts: int) -> None:
        """Add requests that were refused because no engine could meet their SLO."""
        if self._is_on:
            self._pending += [_PendingRequest(now, 0, None) for _ in range(num_prompts)]
            self._count_ended()

    def on_end(self, entry: JournalEntry) -> None:
        """Record the output length of a request that has ended."""
        pending = self._running.pop(entry, None)
        if pending is None:
            return
        pending.entry, pending.num_output_tokens = None, entry.num_output_tokens
        self._count_ended()

    def status(self) -> WorkloadStatus | None:
        """Return the measured workload and its latest shift; None if this is off."""
        if not self._is_on:
            return None
        profile, shift = self._detector.profile, self._shift
        return WorkloadStatus(
            is_leader=self._is_leader(),
            num_samples=self._num_samples,
            num_shifts=self._num_shifts,
            profile=None if profile is None else _figures(profile),
            shift=None if shift is None else WorkloadShiftStatus(
                list(shift.quantities), _figures(shift.before), _figures(shift.after)
            ),
        )  # fmt: skip

    def lengths(self) -> list[tuple[int, int]] | None:
        """Return prompt and output tokens of recent requests; None if this is off."""
        if not self._is_on:
            return None
        return [(request.num_prompt_tokens, request.num_output_tokens) for request in self._recent]

    def reset_profile(self) -> bool:
        """Measure the reference workload anew; return False if this is off."""
        self._detector.reset()
        return self._is_on

    def _count_ended(self) -> None:
        """Count the requests before which none runs."""
        while self._pending and self._pending[0].entry is None:
            ended = self._pending.popleft()
            self._num_arrivals += 1
            if ended.num_output_tokens:
                sample = RequestSample(
                    ended.arrival_seconds,
                    ended.num_prompt_tokens,
                    ended.num_output_tokens,
                    self._num_arrivals,
                )
                self._num_arrivals = 0
                self._observe(sample)

    def _observe(self, sample: RequestSample) -> None:
        self._num_samples += 1
        self._recent.append(sample)
        shift = self._detector.observe(sample)
        if shift is None:
            return
        self._num_shifts += 1
        self._shift = shift
        log.warning(
            "the workload has shifted (%s): %s before, %s now; a plan is worth a new search with "
            "the lengths of GET /workload",
            ", ".join(shift.quantities), _describe(shift.before), _describe(shift.after),
        )  # fmt: skip


def _figures(means: WindowMeans) -> WorkloadMeans:
    return WorkloadMeans(means.rate, means.prompt_tokens, means.output_tokens)


def _describe(means: WindowMeans) -> str:
    return (
        f"{means.rate:.3g} requests/s of {means.prompt_tokens:.0f} + {means.output_tokens:.0f} "
        "tokens"
    )
