"""Queues of prepared steps between the event loop, which fills them, and the compute thread.

With one lane steps leave in the order of their plans, and `receive` waits for their activations.
With two lanes a step leaves when its activations are there; decode steps leave first.
"""

import os
import queue
import select
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gllm.runtime.worker.batch import Batch
from gllm.scheduler.lanes import LaneOrder
from gllm.scheduler.plan import StepPlan
from gllm.transport.base import Receiver


class PreparedStep(NamedTuple):
    """A step whose inputs are built."""

    plan: StepPlan
    batch: Batch | str
    """The inputs, or the error of a plan that could not be prepared."""


class StepQueue(Protocol):
    """Prepared steps of one stage."""

    def put(self, step: PreparedStep) -> None:
        """Add a step, in the order of plans; called on the event loop."""

    def get(self) -> PreparedStep | None:
        """Wait for the next step without CPU load; None after `close`."""

    def close(self) -> None:
        """End a waiting `get` and all later ones."""

    def free(self) -> None:
        """Free descriptors; no other method runs at the same time or later."""


class OneLaneQueue:
    """Steps in the order of their plans."""

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[PreparedStep | None] = queue.SimpleQueue()

    def put(self, step: PreparedStep) -> None:
        """See StepQueue."""
        self._steps.put(step)

    def get(self) -> PreparedStep | None:
        """See StepQueue."""
        return self._steps.get()

    def close(self) -> None:
        """See StepQueue."""
        self._steps.put(None)

    def free(self) -> None:
        """See StepQueue."""


class TwoLaneQueue:
    """Steps of two lanes; each leaves when its activations have arrived.

    Args:
        receivers: of the lanes; none on the first stage, where steps need no activations.
    """

    def __init__(self, receivers: Sequence[Receiver]) -> None:
        self._receivers = receivers
        self._order = LaneOrder()
        self._steps: tuple[deque[PreparedStep], deque[PreparedStep]] = deque(), deque()
        """By lane; the compute thread removes steps."""
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        """Written for each new step, and by `close`."""
        self._is_closed = False

    def put(self, step: PreparedStep) -> None:
        """See StepQueue."""
        self._steps[step.plan.lane].append(step)
        os.eventfd_write(self._wake, 1)

    def get(self) -> PreparedStep | None:
        """See StepQueue."""
        while not self._is_closed:
            lane = self._order.choose(self._is_ready(0), self._is_ready(1))
            if lane is not None:
                return self._steps[lane].popleft()
            self._wait()
        return None

    def close(self) -> None:
        """See StepQueue."""
        self._is_closed = True
        os.eventfd_write(self._wake, 1)

    def free(self) -> None:
        """See StepQueue."""
        os.close(self._wake)

    def _is_ready(self, lane: int) -> bool:
        """Return True if the oldest step of a lane can be computed."""
        steps = self._steps[lane]
        if not steps or not self._receivers:
            return bool(steps)
        return self._receivers[lane].has_arrived(steps[0].plan.turn)

    def _wait(self) -> None:
        """Wait for a new step, or for activations of the oldest steps."""
        # Only of lanes with a step: an event that nobody reads would end every wait.
        waiting = {
            receiver.event: lane
            for lane, receiver in enumerate(self._receivers)
            if self._steps[lane]
        }
        sources = select.poll()
        for source in (self._wake, *waiting):
            sources.register(source, select.POLLIN)
        for source, _ in sources.poll():
            if source == self._wake:
                os.eventfd_read(self._wake)
            elif not self._is_ready(waiting[source]):
                # A data mover that was restarted writes events without a step.
                os.eventfd_read(source)


def create_step_queue(num_lanes: int, receivers: Sequence[Receiver]) -> StepQueue:
    """Return the queue of a stage; see TwoLaneQueue."""
    return TwoLaneQueue(receivers) if num_lanes > 1 else OneLaneQueue()
