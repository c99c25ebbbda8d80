"""Depth of a pipeline whose links are slow: how many micro-batches are in flight, and how large.

A sequence decodes again only after its token has passed all stages and links and its result has
returned to the driver. During this cycle other micro-batches keep the stages busy. With T_i the
time of stage i for n decodes, lat_i and rate_i the latency and the rate of its link to the next
stage, A the bytes per token and #RD the sequences in decode:

    B* = ceil((sum T_i + sum(lat_i + A n / rate_i)) / max T_i),  n = #RD / B*

The link's own occupancy A n / rate_i may be the largest of the T_i: it is a resource like a stage.

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
MIN_CAP_CHANGE = 0.25
"""Change of the prefill cap, relative, from which it is applied without a change of the depth."""


class StageSeconds(NamedTuple):
    """Time of a stage for a micro-batch, linear in its rows."""

    base_seconds: float
    """Time of a micro-batch, however small."""
    seconds_per_decode: float = 0.0
    seconds_per_prefill_token: float = 0.0

    def decode_seconds(self, num_decodes: float) -> float:
        """Return the time of a micro-batch of decodes."""
        return self.base_seconds + num_decodes * self.seconds_per_decode


class LinkSeconds(NamedTuple):
    """Times of a link between two stages; zeros within a machine."""

    latency_seconds: float = 0.0
    """Propagation, one way. The link is free for other messages meanwhile."""
    seconds_per_token: float = 0.0
    """Time in which the link carries the activations of one token and nothing else: A / rate."""


class PipelineSeconds(NamedTuple):
    """Measured times of the stages and links of a pipeline."""

    stages: Sequence[StageSeconds]
    links: Sequence[LinkSeconds]
    """From each stage but the last one to the next one."""
    plan_latencies: Sequence[float]
    """Seconds from the driver to each stage, one way: plans travel beside the activations."""
    return_latency: float
    """Seconds from the last stage to the driver."""

    def cycle_seconds(self, num_decodes: float) -> float:
        """Return the time from a plan of decodes to its result, if nothing else is in flight.

        A stage starts when its plan and the activations have arrived, so a plan's latency counts
        only where it is longer than the way of the activations.
        """
        time = 0.0
        for index, stage in enumerate(self.stages):
            if index:
                link = self.links[index - 1]
                time += link.latency_seconds + num_decodes * link.seconds_per_token
            time = max(time, self.plan_latencies[index]) + stage.decode_seconds(num_decodes)
        return time + self.return_latency

    def slowest_seconds(self, num_decodes: float) -> float:
        """Return the time in which the slowest resource, stage or link, serves a micro-batch."""
        return max(
            *(stage.decode_seconds(num_decodes) for stage in self.stages),
            *(num_decodes * link.seconds_per_token for link in self.links),
            0.0,
        )

    def round_seconds(self, num_decoding: float, depth: int) -> float:
        """Return the predicted time in which every sequence in decode gets one token.

        The slowest resource serves all micro-batches of the round, or waits for the cycle of one.

        Args:
            num_decoding: #RD, above 0.
            depth: micro-batches in flight, at least 1.
        """
        num_batches = min(float(depth), max(1.0, num_decoding))
        num_decodes = num_decoding / num_batches
        return max(
            self.cycle_seconds(math.ceil(num_decodes)),
            num_batches * self.slowest_seconds(num_decodes),
        )

    def interval_seconds(self, num_decoding: float, depth: int) -> float:
        """Return the predicted time between two micro-batches under full load."""
        num_decodes = _decodes_per_batch(num_decoding, depth)
        cycle = self.cycle_seconds(math.ceil(num_decodes))
        return max(cycle / depth, self.slowest_seconds(num_decodes))


def solve_depth(times: PipelineSeconds, num_decoding: float, max_depth: int) -> int:
    """Return B*: the smallest depth at which the slowest resource never waits for a result.

    It is the fixed point of the formula above, because more micro-batches have fewer decodes each:
    `depth * slowest_seconds` increases with the depth, and `cycle_seconds` decreases. The cycle is
    that of the largest micro-batch, of ceil(n) decodes.

    Args:
        times: of the pipeline.
        num_decoding: #RD; below one decode per micro-batch, each has one.
        max_depth: upper limit, at least 1.
    """
    for depth in range(1, max_depth):
        num_decodes = _decodes_per_batch(num_decoding, depth)
        cycle = times.cycle_seconds(math.ceil(num_decodes))
        if depth * times.slowest_seconds(num_decodes) >= cycle:
            return depth
    return max_depth


def choose_depth(times: PipelineSeconds, num_decoding: float, max_depth: int) -> int:
    """Return the depth, at most B*, with the best predicted throughput of decodes.

    Rounding up costs up to one micro-batch's time per round where a stage takes as long for few
    decodes as for many, because it then serves one micro-batch more for the same tokens. Of equal
    depths the largest is returned: it leaves the fewest gaps to prefill.

    Args:
        times: of the pipeline.
        num_decoding: #RD.
        max_depth: upper limit, at least 1.
    """
    limit = solve_depth(times, num_decoding, max_depth)
    if num_decoding <= 0:
        return limit
    rounds = [times.round_seconds(num_decoding, depth) for depth in range(1, limit + 1)]
    longest = (1 + TIE_SHARE) * min(rounds)
    return max(depth for depth, seconds in enumerate(rounds, start=1) if seconds <= longest)


def cap_prefill(times: PipelineSeconds, min_tokens: int, max_tokens: int) -> int:
    """Return the largest prefill of a micro-batch that no link carries for longer than a stage.

    It is the minimum over the edges of rate * T / A, with T the time of the slowest stage for that
    very prefill: T = base + p * tokens and A / rate * p <= T.

    Args:
        times: of the pipeline.
        min_tokens: lower limit, which wins.
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


class Pace(NamedTuple):
    """Number of micro-batches in flight and their prefill limit."""

    depth: int
    """B: micro-batches in flight, per lane."""
    max_prefill_tokens: int
    """Prefill tokens per micro-batch."""


class DepthController:
    """Chooses the pace of one pipeline, with hysteresis.

    The pace changes at most every CHANGE_INTERVAL_SECONDS, and the depth only for a predicted gain
    of at least MIN_GAIN.

    Args:
        pace: the first pace.
        max_depth: upper limit of the depth.
        min_prefill_tokens: lower limit of the prefill cap.
    """

    def __init__(self, pace: Pace, max_depth: int, min_prefill_tokens: int) -> None:
        self.pace = pace
        self._max_depth = max_depth
        self._min_prefill_tokens = min_prefill_tokens
        self._most_prefill_tokens = pace.max_prefill_tokens
        self._next_check = -math.inf

    def is_due(self, now: float) -> bool:
        """Return True if `update` may change the pace."""
        return now >= self._next_check

    def update(self, times: PipelineSeconds, num_decoding: float, now: float) -> Pace | None:
        """Return a better pace, if there is one.

        Args:
            times: measured times.
            num_decoding: #RD, as a mean over the last seconds.
            now: time in seconds.

        Returns:
            The new pace; None if it stays.
        """
        if not self.is_due(now):
            return None
        self._next_check = now + CHECK_INTERVAL_SECONDS
        depth = choose_depth(times, num_decoding, self._max_depth)
        if not _is_better(times, num_decoding, depth, self.pace.depth):
            depth = self.pace.depth
        cap = cap_prefill(times, self._min_prefill_tokens, self._most_prefill_tokens)
        old_cap = self.pace.max_prefill_tokens
        is_cap_close = abs(cap - old_cap) < MIN_CAP_CHANGE * old_cap
        if depth == self.pace.depth and is_cap_close:
            return None
        self.pace = Pace(depth, cap)
        self._next_check = now + CHANGE_INTERVAL_SECONDS
        return self.pace


def _decodes_per_batch(num_decoding: float, depth: int) -> float:
    """Return n = #RD / B; a micro-batch has at least one decode."""
    return max(1.0, num_decoding / depth)


def _is_better(times: PipelineSeconds, num_decoding: float, depth: int, present: int) -> bool:
    """Return True if another depth is predicted to be better than the present one by enough.

    First counts the time per token of the decodes, then the throughput while work abounds, then the
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
    decode_seconds = times.round_seconds(num_decoding, depth) if num_decoding > 0 else 0.0
    interval = times.interval_seconds(num_decoding, depth)
    return decode_seconds, interval, depth * interval
