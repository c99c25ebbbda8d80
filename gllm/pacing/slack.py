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
    """Return the time in which a micro-batch of decodes passes all pipeline stages and links once.

    It is the time between two decode outputs of a stage for the same sequences (T_o + T_m in the
    paper), without waiting for other micro-batches.

    Args:
        stage_seconds: compute time of each stage for the micro-batch: T_j(n), n tokens.
        transfer_seconds: time of each message: latency + bytes / bandwidth of the activations after
            each stage (Lat_j + A n / Band_j), and of the sampled tokens back to the first stage.
    """
    return sum(stage_seconds) + sum(transfer_seconds)


class StageClock:
    """Predicts when the next decode output of a stage is ready to be sent (T_a in the paper).

    While a decode runs since t_s (cases 1 and 2), that is its predicted time less the time passed:
    T_a = T_i(n) - (t_c - t_s). Otherwise (case 3) it is the end of the oldest decode plus the time
    of one pass through the pipeline: T_a = t_p + T_o + T_m - t_c.

    Several micro-batches may be in flight, and no message says which decode follows which. A decode
    that starts in the second half of the oldest pass is taken for its successor, an earlier one for
    another micro-batch. A pass that is late by its own duration is dropped, as its sequences have
    finished.
    """

    def __init__(self) -> None:
        self._running: tuple[float, float] | None = None
        """Start and predicted seconds of the present decode run."""
        self._rounds: deque[tuple[float, float]] = deque(maxlen=MAX_ROUNDS)
        """End and round of each decode run whose next one has not started, oldest first."""

    def on_decode_started(self, now: float, stage_seconds: float) -> None:
        """Record the start of a decode step in the stage.

        Args:
            now: time in seconds (t_s).
            stage_seconds: predicted duration of the step (T_i(n)).
        """
        self._running = now, stage_seconds
        if self._rounds:
            end, round_seconds = self._rounds[0]
            if now - end >= round_seconds / 2:
                self._rounds.popleft()

    def on_decode_finished(self, now: float, round_seconds: float) -> None:
        """Record the end of a decode step in the stage.

        Args:
            now: time in seconds (t_p).
            round_seconds: time until the next decode of the same sequences ends, T_o + T_m, from
                `decode_round_seconds`.
        """
        self._running = None
        self._rounds.append((now, round_seconds))

    def slack_seconds(self, now: float) -> float | None:
        """Return the seconds until the next decode output (T_a); None if none is expected."""
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
