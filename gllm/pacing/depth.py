"""Depth of a pipeline whose links are slow: how many micro-batches are in flight, and how large.

A sequence decodes again only after its token has passed all stages and links and its result has
returned to the driver. During this cycle other micro-batches keep the stages busy. With T_i the
time of stage i for n decodes, lat_i and rate_i the latency and the rate of its link to the next
stage, A the bytes per token and #RD the sequences in decode:

    B* = ceil((sum T_i + sum(lat_i + A n / rate_i)) / max T_i),  n = #RD / B*

The link's own occupancy A n / rate_i may be the largest of the T_i: it is a resource like a stage.
Where micro-batches have prefill beside their decodes, T_i and the bytes on the links include it.

Everything here is pure: times are arguments, in seconds.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

CHANGE_INTERVAL_SECONDS = 5.0
"""Shortest time between two changes of the pace."""
CHECK_INTERVAL_SECONDS = 1.0
"""Shortest time between two comparisons of the pace with the best one."""
MIN_GAIN = 0.03
"""Predicted gain from which a change is worth its disturbance, relative."""
MIN_LATENCY_GAIN = 0.25
"""Predicted gain from which a change is worth it that makes nothing but full pipelines quicker."""
TIE_SHARE = 0.01
"""Predicted times that differ by less, relative, count as equal: the deeper pipeline is chosen."""
MIXED_LINK_SHARE, MAX_MIXED_LINK_SHARE = 0.5, 1.0
"""Time of a link in relation to that of a stage up to which micro-batches are mixed, and above
which mixed ones are separated again."""
MIN_CAP_CHANGE = 0.25
"""Change of the prefill cap, relative, from which it is applied without a change of the depth."""


class StageSeconds(NamedTuple):
    """Time of a pipeline stage for a micro-batch, linear in decodes and prefill tokens."""

    base_seconds: float
    """Time of a micro-batch without its tokens: the constant of the linear function."""
    seconds_per_decode: float = 0.0
    seconds_per_prefill_token: float = 0.0

    def decode_seconds(self, num_decodes: float, num_prefill_tokens: float = 0.0) -> float:
        """Return the seconds of a micro-batch of decodes, with prefill tokens beside them."""
        prefill_seconds = num_prefill_tokens * self.seconds_per_prefill_token
        return self.base_seconds + num_decodes * self.seconds_per_decode + prefill_seconds


class LinkSeconds(NamedTuple):
    """Latency and seconds per token of the link between two pipeline stages; 0 in one machine."""

    latency_seconds: float = 0.0
    """Propagation, one way. The link can send other messages during this time."""
    seconds_per_token: float = 0.0
    """Time to send the activations of one token: bytes per token / rate of the link."""
    max_seconds_per_token: float = 0.0
    """Upper limit of it by the rates seen so far, from the time on when little was sent; infinite
    before anything was."""


class PipelineSeconds(NamedTuple):
    """Times of a pipeline's stages and links, to choose the number of micro-batches in flight."""

    stages: Sequence[StageSeconds]
    links: Sequence[LinkSeconds]
    """Link from each stage, except the last one, to the next stage."""
    plan_latencies: Sequence[float]
    """Seconds from the driver (scheduler process) to each stage, one way, for a step's plan."""
    return_latency: float
    """Seconds from the last stage to the driver."""
    prefill_tokens: float = 0.0
    """Prefill tokens of a micro-batch beside its decodes, as a mean; as many at any depth."""

    def cycle_seconds(self, num_decodes: float) -> float:
        """Return the time from scheduling a micro-batch to its result, if no other runs.

        A stage starts when both the plan of the step and the activations have arrived.

        Args:
            num_decodes: decodes of the micro-batch.
        """
        num_tokens = num_decodes + self.prefill_tokens
        time = 0.0
        for index, stage in enumerate(self.stages):
            if index:
                link = self.links[index - 1]
                time += link.latency_seconds + num_tokens * link.seconds_per_token
            seconds = stage.decode_seconds(num_decodes, self.prefill_tokens)
            time = max(time, self.plan_latencies[index]) + seconds
        return time + self.return_latency

    def slowest_seconds(self, num_decodes: float) -> float:
        """Return the seconds that the slowest stage or link takes for a micro-batch."""
        num_tokens = num_decodes + self.prefill_tokens
        return max(
            *(stage.decode_seconds(num_decodes, self.prefill_tokens) for stage in self.stages),
            *(num_tokens * link.seconds_per_token for link in self.links),
            0.0,
        )

    def round_seconds(self, num_decoding: float, depth: int) -> float:
        """Return the predicted time in which every decoding sequence gets one token.

        It is the time of all micro-batches on the slowest stage or link, or of one micro-batch
        through the whole pipeline, whichever is longer.

        Args:
            num_decoding: number of decoding sequences (#RD), above 0 without prefill.
            depth: micro-batches in flight, at least 1.
        """
        num_batches = self._num_batches(num_decoding, depth)
        num_decodes = num_decoding / num_batches
        return max(
            self.cycle_seconds(math.ceil(num_decodes)),
            num_batches * self.slowest_seconds(num_decodes),
        )

    def seconds_per_token(self, num_decoding: float, depth: int) -> float:
        """Return the predicted time per token of a round, prefill tokens included.

        Args:
            num_decoding: number of decoding sequences (#RD), above 0 without prefill.
            depth: micro-batches in flight, at least 1.
        """
        num_prefill_tokens = self._num_batches(num_decoding, depth) * self.prefill_tokens
        return self.round_seconds(num_decoding, depth) / (num_decoding + num_prefill_tokens)

    def interval_seconds(self, num_decoding: float, depth: int) -> float:
        """Return the predicted time between two micro-batches under full load.

        Args:
            num_decoding: number of decoding sequences (#RD).
            depth: micro-batches in flight, at least 1.
        """
        num_decodes = _decodes_per_batch(num_decoding, depth)
        cycle = self.cycle_seconds(math.ceil(num_decodes))
        return max(cycle / depth, self.slowest_seconds(num_decodes))

    def _num_batches(self, num_decoding: float, depth: int) -> float:
        """Return the micro-batches of a round: without prefill each has a decode."""
        return float(depth) if self.prefill_tokens else min(float(depth), max(1.0, num_decoding))


def solve_depth(times: PipelineSeconds, num_decoding: float, max_depth: int) -> int:
    """Return the fewest micro-batches in flight with which the slowest stage or link is never idle.

    It is B* in the formula of the module: the smallest depth for which `depth * slowest_seconds`
    is at least `cycle_seconds` of the largest micro-batch. The former increases with the depth, and
    the latter decreases, because more micro-batches have fewer decodes each.

    Args:
        times: measured times of the pipeline.
        num_decoding: number of decoding sequences (#RD); a micro-batch has at least one.
        max_depth: upper limit, at least 1.
    """
    for depth in range(1, max_depth):
        num_decodes = _decodes_per_batch(num_decoding, depth)
        cycle = times.cycle_seconds(math.ceil(num_decodes))
        if depth * times.slowest_seconds(num_decodes) >= cycle:
            return depth
    return max_depth


def choose_depth(times: PipelineSeconds, num_decoding: float, max_depth: int) -> int:
    """Return the number of micro-batches in flight with the best predicted throughput.

    It is at most that of `solve_depth`, and less where a stage takes as long for few decodes as for
    many, so that more micro-batches only cost time. With prefill in the micro-batches they rarely
    do: an idle stage would compute more of it. Of equal depths the largest is returned, because it
    leaves the shortest idle times during prefill.

    Args:
        times: measured times of the pipeline.
        num_decoding: number of decoding sequences (#RD).
        max_depth: upper limit, at least 1.
    """
    limit = solve_depth(times, num_decoding, max_depth)
    if num_decoding <= 0 and not times.prefill_tokens:
        return limit
    seconds = [times.seconds_per_token(num_decoding, depth) for depth in range(1, limit + 1)]
    longest = (1 + TIE_SHARE) * min(seconds)
    return max(depth for depth, each in enumerate(seconds, start=1) if each <= longest)


def cap_prefill(times: PipelineSeconds, min_tokens: int, max_tokens: int) -> int:
    """Return the most prefill tokens per micro-batch that links send within a stage's compute time.

    With more tokens a link would be the bottleneck. It is the largest number for which
    tokens * A / rate <= base + p * tokens on all links; A is the bytes per token, and the right
    side the time of the slowest stage.

    Args:
        times: measured times of the pipeline.
        min_tokens: lower limit, even if a link takes longer.
        max_tokens: upper limit.
    """
    cap = float(max_tokens)
    for link in times.links:
        largest = 0.0
        for stage in times.stages:
            excess = link.seconds_per_token - stage.seconds_per_prefill_token
            tokens = stage.base_seconds / excess if excess > 0 else math.inf
            largest = max(largest, tokens)
        cap = min(cap, largest)
    return max(min_tokens, math.floor(cap))


def has_fast_links(times: PipelineSeconds, num_decodes: float, share: float) -> bool:
    """Return True if no link needs more than a share of the slowest stage's time for a micro-batch.

    Then decodes may wait for the prefill of their micro-batch on the links. In micro-batches of
    their own they would read all weights once more.

    Args:
        times: measured times of the pipeline, with the prefill tokens of a micro-batch.
        num_decodes: decodes of the micro-batch.
        share: largest time of a link, relative to that of the slowest stage.
    """
    num_tokens = num_decodes + times.prefill_tokens
    seconds = [stage.decode_seconds(num_decodes, times.prefill_tokens) for stage in times.stages]
    limit = share * max(seconds)
    return all(num_tokens * link.max_seconds_per_token <= limit for link in times.links)


class Pace(NamedTuple):
    """Number of micro-batches in flight, and what each of them may have."""

    depth: int
    """Micro-batches in flight (B); with two lanes, separate sequences of steps, in each lane."""
    max_prefill_tokens: int
    """Prefill tokens per micro-batch."""
    is_mixed: bool = False
    """With two lanes: micro-batches have decodes and prefill, as with one lane."""


class DepthController:
    """Chooses the number of micro-batches in flight (depth) and their limit of prefill tokens.

    Both change at most every CHANGE_INTERVAL_SECONDS, and the depth only for a predicted gain of at
    least MIN_GAIN.

    Args:
        pace: initial depth and prefill limit; the latter is also the upper limit.
        max_depth: upper limit of the depth.
        min_prefill_tokens: lower limit of the prefill tokens per micro-batch.
    """

    def __init__(self, pace: Pace, max_depth: int, min_prefill_tokens: int) -> None:
        self.pace = pace
        self._max_depth = max_depth
        self._min_prefill_tokens = min_prefill_tokens
        self._max_prefill_tokens = pace.max_prefill_tokens
        self._next_check = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True if enough time has passed for `update` to change depth or prefill limit."""
        return now >= self._next_check

    def update(
        self,
        times: PipelineSeconds,
        num_decoding: float,
        now: float,
        is_mixed: bool = False,
        min_depth: int = 1,
    ) -> Pace | None:
        """Return a better depth and prefill limit, if there are any, or the other `is_mixed`.

        Args:
            times: measured times of the pipeline.
            num_decoding: number of decoding sequences (#RD), as a mean over the last seconds.
            now: time in seconds.
            is_mixed: as in `Pace`.
            min_depth: lower limit of the depth, for what is not in `times`.

        Returns:
            The new values; None if nothing changes.
        """
        if not self.is_due(now):
            return None
        self._next_check = now + CHECK_INTERVAL_SECONDS
        min_depth = min(min_depth, self._max_depth)
        depth = max(min_depth, choose_depth(times, num_decoding, self._max_depth))
        is_enough = self.pace.depth >= min_depth
        if is_enough and not _is_better(times, num_decoding, depth, self.pace.depth):
            depth = self.pace.depth
        cap = cap_prefill(times, self._min_prefill_tokens, self._max_prefill_tokens)
        old_cap = self.pace.max_prefill_tokens
        is_cap_close = abs(cap - old_cap) < MIN_CAP_CHANGE * old_cap
        if depth == self.pace.depth and is_cap_close and is_mixed == self.pace.is_mixed:
            return None
        self.pace = Pace(depth, cap, is_mixed)
        self._next_check = now + CHANGE_INTERVAL_SECONDS
        return self.pace


def _decodes_per_batch(num_decoding: float, depth: int) -> float:
    """Return n = #RD / B; a micro-batch has at least one decode."""
    return max(1.0, num_decoding / depth)


def _is_better(times: PipelineSeconds, num_decoding: float, depth: int, present: int) -> bool:
    """Return True if another depth is predicted to be better than the present one by enough.

    First counts the time per token, then the throughput while work abounds, then the
    time of a micro-batch in flight meanwhile. What counts later must not cost what counts earlier.
    """
    figures = (
        _predict(times, num_decoding, present),
        _predict(times, num_decoding, depth),
        (MIN_GAIN, MIN_GAIN, MIN_LATENCY_GAIN),
    )
    for old, new, gain in zip(*figures, strict=True):
        if old > (1 + gain) * new:
            return True
        if new > (1 + TIE_SHARE) * old:
            return False
    return False


def _predict(times: PipelineSeconds, num_decoding: float, depth: int) -> tuple[float, float, float]:
    """Return the figures of a depth that `_is_better` compares, in seconds."""
    has_tokens = num_decoding > 0 or times.prefill_tokens > 0
    token_seconds = times.seconds_per_token(num_decoding, depth) if has_tokens else 0.0
    interval = times.interval_seconds(num_decoding, depth)
    return token_seconds, interval, depth * interval
