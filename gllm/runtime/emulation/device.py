"""Timeline of an emulated device: when its steps begin and end. Pure: times are arguments."""

import math

from gllm.recovery.clock_offset import MAX_DRIFT
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel

MAX_CLOCK_SECONDS = 1.0
"""Most seconds that activations may have been sent before they were received or after; beyond, the
sender's clock is not that of this machine, or the bytes are not a time."""


class SenderClock:
    """Converts times of another machine's clock to that of this one, by the fastest message.

    Its travel counts as no time. The least difference may grow by the drift of two clocks; a larger
    one than MAX_CLOCK_SECONDS is a jump.
    """

    def __init__(self) -> None:
        self._difference = math.inf
        """Own clock minus the sender's, and the least travel time of a message."""
        self._received_at = 0.0

    def to_own(self, sent_at: float, now: float) -> float:
        """Return the time by the own clock at which a message was sent.

        Args:
            sent_at: the time by the sender's clock.
            now: time at which this process has the message.
        """
        difference = now - sent_at
        if not math.isfinite(difference):
            return now
        known = self._difference + MAX_DRIFT * max(0.0, now - self._received_at)
        has_jumped = difference - known > MAX_CLOCK_SECONDS
        self._difference = difference if has_jumped else min(known, difference)
        self._received_at = now
        return sent_at + self._difference


class EmulatedDevice:
    """Steps of one stage in the time that a cost model predicts, one after another.

    A step begins when its plan and its activations have arrived and the step before has ended, as
    work in the queue of a GPU does. Times of the host after that are therefore hidden, unless the
    device waits for them.
    """

    def __init__(
        self,
        cost: CostModel,
        stage: int,
        speed: float = 1.0,
        sender_clock: SenderClock | None = None,
    ) -> None:
        """Create a device that is idle.

        Args:
            cost: cost model of the pipeline.
            stage: index of the stage.
            speed: all predicted times are divided by this.
            sender_clock: clock of the previous stage's machine; None if that is this machine.
        """
        self._cost, self._stage, self._speed = cost, stage, speed
        self._sender_clock = sender_clock
        self._free_at = self._link_free_at = self._return_free_at = float("-inf")

    def receive(self, sent_at: float, now: float, work: StageWork, is_remote: bool) -> float:
        """Return the time at which the activations of a step have arrived.

        Args:
            sent_at: end of the step on the stage before, by its own timeline and clock.
            now: time at which this process has the activations.
            work: work of the step.
            is_remote: True if the activations crossed a real link, whose time counts.
        """
        if self._sender_clock is not None:
            sent_at = self._sender_clock.to_own(sent_at, now)
        if is_remote or not abs(now - sent_at) <= MAX_CLOCK_SECONDS:
            return now
        transfer = self._cost.activation_transfer(self._stage - 1, work)
        begin = max(sent_at, self._link_free_at)
        self._link_free_at = begin + transfer.occupancy_seconds / self._speed
        return self._link_free_at + transfer.propagation_seconds / self._speed

    def run(self, work: StageWork, ready_at: float) -> tuple[float, float]:
        """Return the begin and the end of the next step.

        Args:
            work: work of the step.
            ready_at: time at which its plan and its activations have arrived.

        Raises:
            CostRangeError: the step is larger than those that the cost model was made for.
        """
        begin = max(self._free_at, ready_at)
        seconds = self._cost.stage_seconds(self._stage, work, begin)
        self._free_at = begin + seconds / self._speed
        return begin, self._free_at

    def returned_at(self, end: float, work: StageWork) -> float:
        """Return the time at which the driver has the result of the last stage's next step.

        Args:
            end: end of the step.
            work: work of the step.
        """
        transfer = self._cost.return_transfer(work)
        begin = max(end, self._return_free_at)
        self._return_free_at = begin + transfer.occupancy_seconds / self._speed
        return self._return_free_at + transfer.propagation_seconds / self._speed
