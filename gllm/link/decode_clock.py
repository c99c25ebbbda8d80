"""Prediction of a stage's next decode step, from the begin and end of its earlier ones."""

from collections import deque

from gllm.pacing.slack import MAX_ROUNDS, StageClock

GAIN = 0.25
"""Weight of the latest duration in a mean."""
MAX_GAP_SECONDS = 5.0
"""Time after which a micro-batch that has not begun again has ended."""


class DecodeClock:
    """Feeds a StageClock with what the data mover sees of the decode lane's ring.

    The duration of a decode step, T_i(n) of the paper, is the time from its begin to its signal.
    Its round, T_o + T_m, is that from a signal to the next one of the same micro-batch.
    """

    def __init__(self) -> None:
        self._clock = StageClock()
        self._last_begin = -1
        """Turn whose begin was seen last."""
        self._begin_time: float | None = None
        """Begin of the step that is computed; None between two steps."""
        self._stage_seconds = self._gap_seconds = 0.0
        """Mean durations of a step, and from its signal to the micro-batch's next begin."""
        self._ends: deque[float] = deque(maxlen=MAX_ROUNDS)
        """Times of signals whose micro-batch has not begun again, oldest first."""

    def on_begin(self, turn: int, begin: float) -> None:
        """Note the begin of the latest decode step; ignored if it is known.

        Args:
            turn: number of the step in its lane.
            begin: in seconds, time.monotonic().
        """
        if turn <= self._last_begin:
            return
        self._last_begin, self._begin_time = turn, begin
        limit = min(MAX_GAP_SECONDS, 2 * self._round_seconds or MAX_GAP_SECONDS)
        while self._ends and begin - self._ends[0] > limit:
            self._ends.popleft()
        if self._ends:
            gap = begin - self._ends.popleft()
            self._gap_seconds += (GAIN if self._gap_seconds else 1.0) * (gap - self._gap_seconds)
        self._clock.on_decode_started(begin, self._stage_seconds)

    def on_end(self, now: float) -> None:
        """Note that the latest decode step has been signalled."""
        if self._begin_time is not None:
            seconds = now - self._begin_time
            mean = self._stage_seconds
            self._stage_seconds += (GAIN if mean else 1.0) * (seconds - mean)
        self._begin_time = None
        self._ends.append(now)
        self._clock.on_decode_finished(now, self._round_seconds)

    def slack_seconds(self, now: float) -> float | None:
        """Return the time until the next decode step is ready; None if none is under way."""
        return self._clock.slack_seconds(now)

    @property
    def _round_seconds(self) -> float:
        return self._gap_seconds + self._stage_seconds
