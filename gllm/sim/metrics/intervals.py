"""Time intervals of a run for plots: micro-batches, bubbles and tokens in flight."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate, pairwise
from math import inf
from statistics import fmean
from typing import NamedTuple

from gllm.sim.metrics.run_record import RunRecord, StageUsage

WINDOW_STEPS = 40
"""Micro-batches in the default window: more are not distinguishable at 800 pixels."""


class MicroBatchInterval(NamedTuple):
    """Start and end time of one micro-batch on one stage, in seconds of the run's clock."""

    stage: int
    step: int
    start: float
    end: float
    prefill_share: float
    """Fraction of the micro-batch's tokens that are prefill, 0..1."""


class BubbleInterval(NamedTuple):
    """Pipeline bubble: start and end of a stage's idle time despite available work, in seconds."""

    stage: int
    start: float
    end: float
    share: float
    """Fraction of the idle stages for which there was enough work, above 0 and at most 1."""

    @property
    def seconds(self) -> float:
        """Lost time of the stage in seconds."""
        return (self.end - self.start) * self.share


class TokenInterval(NamedTuple):
    """Prefill and decode tokens of one micro-batch, with its start and end time in seconds.

    It ends when the next micro-batch starts on the first stage, or at its own commit. For plots,
    the mean of several micro-batches.
    """

    start: float
    """Seconds since the first request."""
    end: float
    num_prefill_tokens: float = 0.0
    num_decode_tokens: float = 0.0
    max_batch_tokens: float = 0.0
    """Tokens of the largest micro-batch, prefill and decode together."""


def select_window(
    run: RunRecord, begin: float | None = None, seconds: float | None = None
) -> tuple[float, float]:
    """Return the begin and end of the part of a run to plot, in seconds of the run's clock.

    Args:
        run: Record of the run.
        begin: Seconds since the first request; None: about 40 micro-batches from the middle of the
            run are selected.
        seconds: Length of the part; None: that of these 40 micro-batches.

    Raises:
        ValueError: The run has no step times, or `seconds` is not above 0.
    """
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds is {seconds}, but has to be above 0")
    timed = [step for step in run.micro_batches if any(step.stage_times)]
    if not timed:
        raise ValueError("the run has no micro-batch with a stage's time: was it cut off early?")
    # The middle by tokens: by time or by count it often lies in the last requests' long decode.
    tokens = list(accumulate(step.work.num_tokens for step in timed))
    middle = bisect_left(tokens, tokens[-1] / 2)
    first = max(0, min(middle - WINDOW_STEPS // 2, len(timed) - WINDOW_STEPS))
    times = [
        time for step in timed[first : first + WINDOW_STEPS] for time in step.stage_times if time
    ]
    start = min(time.start for time in times)
    length = max(time.end for time in times) - start
    if begin is not None:
        start = run.begin_time() + begin
    return start, start + (length if seconds is None else seconds)


def micro_batch_intervals(
    run: RunRecord, begin: float = -inf, end: float = inf
) -> list[MicroBatchInterval]:
    """Return start and end of each micro-batch on each stage that overlaps a part of a run.

    Args:
        run: Record of the run.
        begin: Begin of the part in seconds of the run's clock.
        end: End of the part; intervals that exceed it are not shortened.
    """
    return [
        MicroBatchInterval(
            stage,
            step.work.step,
            time.start,
            time.end,
            step.num_prefill_tokens / step.work.num_tokens,
        )
        for step in run.micro_batches
        for stage, time in enumerate(step.stage_times)
        if time is not None and time.start < end and time.end > begin
    ]


def bubble_intervals(run: RunRecord, begin: float = -inf, end: float = inf) -> list[BubbleInterval]:
    """Return the pipeline bubbles (idle time despite available work) in a part of a run.

    For a whole run they add up to the bubble times of `RunRecord.stage_usages`.

    Args:
        run: Record of the run.
        begin: Begin of the part in seconds of the run's clock.
        end: End of the part; bubbles that exceed it are shortened.
    """
    found: list[BubbleInterval] = []
    latest: dict[int, int] = {}
    """By stage, where in `found` its newest bubble is."""
    for interval in run.iterate_intervals(begin, end):
        share = interval.bubble_share
        for stage in interval.idle if share else ():
            last = found[latest[stage]] if stage in latest else None
            if last and last.end == interval.begin and last.share == share:
                found[latest[stage]] = last._replace(end=interval.end)
            else:
                latest[stage] = len(found)
                found.append(BubbleInterval(stage, interval.begin, interval.end, share))
    return found


def stage_usages_in(
    run: RunRecord,
    bars: Iterable[MicroBatchInterval],
    bubbles: Iterable[BubbleInterval],
    begin: float,
    end: float,
) -> list[StageUsage]:
    """Return the busy and bubble time of each stage in a part of a run, in seconds.

    Args:
        run: Record of the run.
        bars: Micro-batches that overlap the part (`micro_batch_intervals`).
        bubbles: Bubbles within the part (`bubble_intervals`).
        begin: Begin of the part in seconds of the run's clock.
        end: End of the part.
    """
    uses = [StageUsage(span=end - begin) for _ in range(run.max_stages())]
    for bar in bars:
        uses[bar.stage].busy += max(0.0, min(bar.end, end) - max(bar.start, begin))
    for bubble in bubbles:
        uses[bubble.stage].bubble += bubble.seconds
    return uses


def token_intervals(run: RunRecord) -> list[TokenInterval]:
    """Return prefill and decode tokens of each micro-batch with start and end times, for a plot.

    A micro-batch counts from its start on the first stage until the next one starts there, or until
    its own commit if that is earlier.

    Args:
        run: Record of the run.
    """
    begin, end_of_run = run.begin_time(), run.end_time()
    # Several may be planned at one moment, but the first stage takes one after another.
    entries = [
        step.stage_times[0].start if step.stage_times[0] else step.planned_time
        for step in run.micro_batches
    ]
    # A log cut off has plans at its end that the first stage never came to.
    entries = list(accumulate((max(entry - begin, 0.0) for entry in entries), max))
    spans = pairwise([*entries, max([*entries[-1:], end_of_run - begin])])
    found = []
    for step, (start, end) in zip(run.micro_batches, spans, strict=True):
        if step.committed_time is not None:
            end = max(start, min(end, step.committed_time - begin))
        prefill, decode = step.num_prefill_tokens, step.num_decode_tokens
        found.append(TokenInterval(start, end, prefill, decode, prefill + decode))
    return found


def fill_gaps(stretches: list[TokenInterval]) -> list[TokenInterval]:
    """Insert intervals without tokens for idle times, so that intervals are gapless from time 0.

    Args:
        stretches: Intervals in order of time.
    """
    found = [TokenInterval(0.0, 0.0)]
    for stretch in stretches:
        if stretch.start > found[-1].end:
            found.append(TokenInterval(found[-1].end, stretch.start))
        found.append(stretch)
    return found


def bin_token_intervals(stretches: list[TokenInterval], count: int) -> list[TokenInterval]:
    """Return the mean and maximum tokens of the micro-batches in equal bins of time.

    Args:
        stretches: Intervals in order of time.
        count: Number of bins from time 0 to the last end.

    Raises:
        ValueError: There are no intervals.
    """
    width = (max(stretch.end for stretch in stretches) or 1.0) / count
    bins: list[list[TokenInterval]] = [[] for _ in range(count)]
    for stretch in stretches:
        first = min(int(stretch.start / width), count - 1)
        last = min(int(stretch.end / width), count - 1)
        for place in range(first, last + 1):
            bins[place].append(stretch)
    return [
        TokenInterval(
            place * width,
            (place + 1) * width,
            fmean([stretch.num_prefill_tokens for stretch in inside] or [0.0]),
            fmean([stretch.num_decode_tokens for stretch in inside] or [0.0]),
            max((stretch.max_batch_tokens for stretch in inside), default=0.0),
        )
        for place, inside in enumerate(bins)
    ]
