"""Just-in-time slack: the time until a stage's next decode output is ready for its link.

Source: "Distributed LLM Serving on Consumer-Grade GPUs by Reconciling Computation and
Communication" (MoLink), Findings of EMNLP 2025, the three cases of T_a. A chunk of `rate x slack`
bytes leaves the link free when that output comes.
"""

from collections import deque
from collections.abc import Iterable

MAX_ROUNDS = 256
"""Decode outputs under way that a StageClock follows: more than a pipeline has in flight."""


def decode_round_seconds(
    stage_seconds: Iterable[float], transfer_seconds: Iterable[float]
) -> float:
    """Return the time of a decode micro-batch through all stages and links.

    That is T_o + T_m of the paper's third case: from the end of one output of a stage to the end of
    the next one, without waiting for other micro-batches.

    Args:
        stage_seconds: T_j(n), time of each of the M stages for the n tokens of the micro-batch.
        transfer_seconds: Time of each message on its way: Lat_j + A n / Band_j behind a stage, with
            A bytes of activations per token, and the way of the sampled tokens from the last stage
            back to the first one.
    """
    return sum(stage_seconds) + sum(transfer_seconds)


class StageClock:
    """Predicts when the next decode output of a stage is ready.

    With a decode running since t_s (cases 1 and 2): T_a = T_i(n) - (t_c - t_s). With none (case 3):
    T_a = t_p + T_o + T_m - t_c, where t_p is the end of the oldest decode run that has not come
    around yet.

    Several micro-batches may be under way, and nothing tells which run continues which. A run that
    starts in the second half of the oldest round continues that; an earlier one is of another
    micro-batch. A round that is late by its own length has ended: its sequences have finished.
    """

    def __init__(self) -> None:
        self._running: tuple[float, float] | None = None
        """Start and predicted seconds of the present decode run."""
        self._rounds: deque[tuple[float, float]] = deque(maxlen=MAX_ROUNDS)
        """End and round of each decode run whose next one has not started, oldest first."""

    def on_decode_started(self, now: float, stage_seconds: float) -> None:
        """Record the start of a decode step.

        Args:
            now: t_s.
            stage_seconds: T_i(n), predicted time of the run.
        """
        self._running = now, stage_seconds
        if self._rounds:
            end, round_seconds = self._rounds[0]
            if now - end >= round_seconds / 2:
                self._rounds.popleft()

    def on_decode_finished(self, now: float, round_seconds: float) -> None:
        """Record the end of a decode step.

        Args:
            now: t_p.
            round_seconds: T_o + T_m (`decode_round_seconds`).
        """
        self._running = None
        self._rounds.append((now, round_seconds))

    def slack_seconds(self, now: float) -> float | None:
        """Return the time T_a until the next decode output; None if no decode is under way."""
        if self._running is not None:
            start, stage_seconds = self._running
            return stage_seconds - (now - start)
        while self._rounds:
            end, round_seconds = self._rounds[0]
            slack = end + round_seconds - now
            if slack >= -round_seconds:
                return slack
            self._rounds.popleft()
        return None
