"""Prediction of a stage's next decode step, from the begin and end of its earlier ones."""

from gllm.pacing.slack import StageClock

GAIN = 0.25
"""Weight of the latest duration in a mean."""
MAX_GAP_SECONDS = 5.0
"""Longest time between two decode steps that counts: later ones belong to other requests."""


class DecodeClock:
    """Feeds a StageClock with what the data mover sees of the decode lane's ring.

    The duration of a decode step, T_i(n) of the paper, is the time from its begin to its signal.
    Its round, T_o + T_m, is taken to be the time from a signal to the next one: with several
    micro-batches under way their outputs alternate, and the next one counts.
    """

    def __init__(self) -> None:
        self._clock = StageClock()
        self._last_begin = -1
        """Turn whose begin was seen last."""
        self._begin_time: float | None = None
        """Begin of the step that is computed; None between two steps."""
        self._end_time: float | None = None
        """End of the latest step; None before the first one."""
        self._stage_seconds: float | None = None
        """Mean duration of a step; None before the first one."""
        self._gap_seconds: float | None = None
        """Mean time from a signal to the next begin; None before the second step."""

    def on_begin(self, turn: int, begin: float) -> None:
        """Note the begin of the latest decode step; ignored if it is known.

        Args:
            turn: number of the step in its lane.
            begin: in seconds, time.monotonic().
        """
        if turn <= self._last_begin:
            return
        self._last_begin, self._begin_time = turn, begin
        if self._end_time is not None and begin - self._end_time <= MAX_GAP_SECONDS:
            self._gap_seconds = _mean(self._gap_seconds, max(0.0, begin - self._end_time))
        self._clock.on_decode_started(begin, self._stage_seconds or 0.0)

    def on_end(self, now: float) -> None:
        """Note that the latest decode step has been signalled; `on_begin` may have missed it."""
        if self._begin_time is not None:
            self._stage_seconds = _mean(self._stage_seconds, now - self._begin_time)
        self._begin_time, self._end_time = None, now
        round_seconds = (self._gap_seconds or 0.0) + (self._stage_seconds or 0.0)
        # Rounds of earlier steps predict nothing that this one does not.
        self._clock = StageClock()
        self._clock.on_decode_finished(now, round_seconds)

    def slack_seconds(self, now: float) -> float | None:
        """Return the time until the next decode step is ready; None if none is under way."""
        return self._clock.slack_seconds(now)


def _mean(mean: float | None, value: float) -> float:
    """Return a moving mean after another value."""
    return value if mean is None else mean + GAIN * (value - mean)
