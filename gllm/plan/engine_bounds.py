"""Closed forms of one engine under a workload: bound of its request rate, estimates of latencies.

Bound: in a steady state micro-batches have equal shares of prefill and decode on average. No
schedule serves more requests than micro-batches of the size with the most work per second, among
all that the limits permit: tokens per micro-batch, sequences, KV cache. That is not always the
largest: times of matrix products rise in steps of a tile's rows, so 512 tokens may take 40 % less
time than 549.

Estimates: the micro-batch that a rate needs gives the time between tokens; the wait before a
prefill is that of an M/D/1 queue whose service time is that of the slowest stage per request; of an
M/D/c queue where sequences, not tokens, limit the micro-batches: each sequence is a server.
"""

from functools import cached_property
from itertools import count
from math import inf, log
from typing import NamedTuple

from gllm.plan.latency_limits import NO_LIMITS, LatencyLimits
from gllm.plan.workload_moments import WorkloadMoments
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment
from gllm.sim.queueing import wait_probability

BOUND_SLACK = 1.1
"""Factor on the bound, because micro-batches are rounded to whole tokens, a run's lengths differ
from the mean, and measured times are not convex everywhere."""
SIZES_PER_OCTAVE = 8
"""Sizes of micro-batches between a number of tokens and its double; from 128 tokens on, among them
are all multiples of 16 up to 256, of 32 up to 512 and so on, so the ends of tiles are met."""
NUM_HALVINGS = 8
"""Bisections between the rates of two sizes."""
DELAY_PERCENT = 99.0
"""Percentile of the scheduling delay that every capacity limits, as in CAPACITY_RULES."""
MAX_DELAY_SECONDS = 5.0
"""Default of that limit."""
MAX_UTILIZATION = 0.999
LONG_REQUEST_PERCENT = 90.0
"""Percentile of the output lengths that a long request has."""


class OperatingPoint(NamedTuple):
    """Estimates at one request rate."""

    rate: float
    """Requests per second."""
    slowest_seconds: float
    """Seconds between two requests at the highest rate."""
    prefill_seconds: float
    """Seconds of a mean prompt on all stages, alone."""
    step_seconds: float
    """Seconds of a mean micro-batch on all stages: the time per output token."""
    chunk_seconds: float
    """The same of a micro-batch with as many prefill tokens as are permitted."""
    num_servers: float = 1.0
    """Requests that are served at once before one has to wait: 1 where tokens are the limit."""

    def wait(self, percent: float) -> float:
        """Return a percentile (0..100) of the wait before the prefill, with an exponential tail."""
        utilization = min(self.rate * self.slowest_seconds, MAX_UTILIZATION)
        share = wait_probability(utilization, self.num_servers) / max(1 - percent / 100, 1e-6)
        # Mean wait of those that wait; it does not depend on the number of servers.
        return self.slowest_seconds / (2 * (1 - utilization)) * log(share) if share > 1 else 0.0

    def ttft(self, percent: float = 50.0) -> float:
        """Return a percentile (0..100) of the time to the first token."""
        return self.prefill_seconds + self.wait(percent)

    def between(self, lower: "OperatingPoint", rate: float) -> "OperatingPoint":
        """Return the estimates at a rate between that of a point with smaller steps and this."""
        share = (rate - lower.rate) / (self.rate - lower.rate)
        step, chunk = (
            low + share * (high - low)
            for low, high in (
                (lower.step_seconds, self.step_seconds),
                (lower.chunk_seconds, self.chunk_seconds),
            )
        )
        return self._replace(rate=rate, step_seconds=step, chunk_seconds=chunk)

    def keeps(self, limits: LatencyLimits, max_delay_seconds: float = MAX_DELAY_SECONDS) -> bool:
        """Return True if the estimates are within the limits and the scheduling delay is bounded.

        Limits of `e2el` are not estimated.
        """
        for metric in ("ttft", "tpot", "itl"):
            limit = limits.limit_of(metric)
            if limit is not None and self._estimate(metric, limit[1]) > limit[0]:
                return False
        return self.wait(DELAY_PERCENT) <= max_delay_seconds

    def _estimate(self, metric: str, percent: float) -> float:
        if metric == "ttft":
            return self.ttft(percent)
        return self.step_seconds if metric == "tpot" else self.chunk_seconds


class EngineBounds:
    """Closed forms of one engine under a workload.

    Args:
        deployment: The engine.
        moments: The workload.
    """

    def __init__(self, deployment: Deployment, moments: WorkloadMoments) -> None:
        self._cost = deployment.cost
        self._stages = range(len(deployment.layers))
        self._moments = moments
        config = deployment.scheduler
        assert config.max_num_batched_tokens is not None, "the configuration is resolved"
        self._token_limit = config.max_num_batched_tokens
        # Policies that do not cut prompts run a longer one alone.
        self._max_tokens = max(self._token_limit, moments.prompts[-1])
        self._chunk_tokens = min(self._token_limit, moments.prompts[-1])
        self._max_seqs = float(config.max_num_seqs)
        if moments.mean_context_tokens and not moments.is_shared:
            kv_tokens = config.num_blocks * config.block_size
            self._max_seqs = min(self._max_seqs, kv_tokens / moments.mean_context_tokens)
        self._times: dict[int, tuple[StageWork, list[float]]] = {}
        """Micro-batches and their seconds on each stage, by number of tokens."""

    def max_rate(self) -> float:
        """Return requests per second that the engine cannot exceed; infinite if unknown."""
        try:
            # How unevenly micro-batches in flight share the sequences is free.
            sizes = self._sizes(self._max_tokens, self._max_seqs)
            return BOUND_SLACK * max(self._rate(size) for size in sizes)
        except CostRangeError:
            return inf

    def max_rate_of_run(self, num_requests: int, min_seconds: float, delay_seconds: float) -> float:
        """Return the rate per second that no run with bounded delays can exceed.

        In a run, the requests that have not finished when the last one arrives do not count: those
        that run by then, as many as the engine holds, and those that wait for less than the delay.

        Args:
            num_requests: Least number of requests of a run.
            min_seconds: Least time in which they arrive.
            delay_seconds: Limit of the scheduling delay.
        """
        steady = self.max_rate()
        unfinished = self._max_seqs + steady * delay_seconds
        if min_seconds:
            rate = steady + unfinished / min_seconds
            if rate * min_seconds >= num_requests:
                return rate
        if num_requests <= unfinished:
            return inf
        rate = steady * num_requests / (num_requests - unfinished)
        return min(rate, num_requests / min_seconds) if min_seconds else rate

    def best_point(
        self, limits: LatencyLimits, max_delay_seconds: float = MAX_DELAY_SECONDS
    ) -> OperatingPoint | None:
        """Return the estimates at the highest rate within limits; None: no rate, or unknown."""
        kept = [each for each in self._points if each.keeps(limits, max_delay_seconds)]
        best = max(kept, key=lambda point: point.rate, default=None)
        if best is None:
            return None
        higher = [each.rate for each in self._points if each.rate > best.rate]
        low, high = best.rate, min(higher, default=best.rate)
        for _ in range(NUM_HALVINGS):
            point = self.point_at((low + high) / 2)
            if point and point.keeps(limits, max_delay_seconds):
                low, best = point.rate, point
            else:
                high = (low + high) / 2
        return best

    def point_at(self, rate: float) -> OperatingPoint | None:
        """Return the estimates at a rate per second; None: the rate is too high, or unknown."""
        lower: OperatingPoint | None = None
        for point in self._points:
            if point.rate >= rate:
                return point.between(lower, rate) if lower else point._replace(rate=rate)
            lower = point
        return None

    @cached_property
    def _points(self) -> list[OperatingPoint]:
        """Estimates of all sizes of micro-batches, rising; empty: they are unknown.

        Micro-batches in flight share the sequences evenly.
        """
        sizes = self._sizes(self._token_limit, self._max_seqs / len(self._stages))
        try:
            slowest = 1 / max(self._rate(size) for size in sizes)
            prefill = self._prefill_seconds(max(1, round(self._moments.prompt_tokens)))
            is_token_limited = sizes[-1] >= self._token_limit
            num_servers = 1.0 if is_token_limited else max(1.0, self._max_seqs)
            return [
                self._point(size, slowest, prefill)._replace(num_servers=num_servers)
                for size in sizes
            ]
        except CostRangeError:
            return []

    def request_seconds(
        self,
        limits: LatencyLimits = NO_LIMITS,
        max_delay_seconds: float = MAX_DELAY_SECONDS,
        percent: float = LONG_REQUEST_PERCENT,
    ) -> float:
        """Return the estimated duration of a long request at the capacity, without its wait.

        Args:
            limits: Latency limits of the capacity; where no rate keeps them they do not count.
            max_delay_seconds: Limit of the scheduling delay.
            percent: Percentile (0..100) of the output lengths; the prompt is a mean one.
        """
        point = self.best_point(limits, max_delay_seconds) or self.best_point(NO_LIMITS)
        steps = self._moments.step_percentile(percent)
        if point is None:
            return steps * self.least_token_seconds()
        return point.prefill_seconds + steps * point.step_seconds

    def least_first_token_seconds(self, percent: float) -> float:
        """Return a time that this percentile of the TTFT is not below."""
        tokens = self._moments.prompt_percentile(percent)
        work = _make_work(0, 0, [(0, tokens)], 1)
        try:
            return max(self._cost.stage_seconds(stage, work) for stage in self._stages)
        except CostRangeError:
            return 0.0

    def least_token_seconds(self) -> float:
        """Return a time that no gap between two tokens of a request is below."""
        try:
            return self._pass_seconds(_make_work(1, self._moments.prompts[0] + 1, [], 1))
        except CostRangeError:
            return 0.0

    def _sizes(self, max_tokens: int, max_seqs: float) -> list[int]:
        """Return numbers of tokens of micro-batches, rising, up to the largest permitted one."""
        moments, most = self._moments, max_tokens
        if moments.decode_steps:
            most = min(most, int(max_seqs / moments.decode_steps * self._request_tokens))
        sizes, size = [], 1
        while size < most:
            sizes.append(size)
            size += max(1, (1 << size.bit_length() - 1) // SIZES_PER_OCTAVE)
        return [*sizes, max(1, most)]

    @property
    def _request_tokens(self) -> float:
        """Tokens of a mean request."""
        return self._moments.prompt_tokens + self._moments.decode_steps

    def _rate(self, size: int) -> float:
        """Return requests per second with micro-batches of this many tokens."""
        seconds = self._measured(size)[1]
        rate = size / self._request_tokens / max(seconds)
        if self._moments.decode_steps:
            # Each sequence passes all stages once per token.
            rate = min(rate, self._max_seqs / (self._moments.decode_steps * sum(seconds)))
        return rate

    def _measured(self, size: int) -> tuple[StageWork, list[float]]:
        """Return the micro-batch of this many tokens, and its seconds on each stage."""
        if size not in self._times:
            work = self._work(size)
            self._times[size] = work, self._stage_times(work)
        return self._times[size]

    def _point(self, size: int, slowest: float, prefill_seconds: float) -> OperatingPoint:
        work, times = self._measured(size)
        step = chunk = self._pass_seconds(work)
        room = max(0, self._chunk_tokens - work.num_decodes)
        if room > sum(tokens for _, tokens in work.prefill_chunks):
            context = work.num_decode_context_tokens
            full = _make_work(work.num_decodes, context, self._chunks(room), work.num_sampled_rows)
            chunk = self._pass_seconds(full)
        rate = size / self._request_tokens / max(max(times), step / len(times))
        return OperatingPoint(rate, slowest, prefill_seconds, step, chunk)

    def _prefill_seconds(self, tokens: int) -> float:
        chunks = []
        for start in range(0, tokens, self._max_tokens):
            chunks.append((start, min(self._max_tokens, tokens - start)))
        return sum(self._pass_seconds(_make_work(0, 0, [chunk], 1)) for chunk in chunks)

    def _pass_seconds(self, work: StageWork) -> float:
        """Return the time of a micro-batch on all stages one after the other, with transfers."""
        total = sum(self._stage_times(work)) + self._cost.return_seconds(work)
        for stage in self._stages[:-1]:
            transfer = self._cost.activation_transfer(stage, work)
            total += transfer.occupancy_seconds + transfer.propagation_seconds
        return total

    def _stage_times(self, work: StageWork) -> list[float]:
        return [self._cost.stage_seconds(stage, work) for stage in self._stages]

    def _work(self, size: int) -> StageWork:
        """Return the micro-batch of this many tokens, but at least one of each kind."""
        moments = self._moments
        share = size / self._request_tokens
        num_decodes = max(1, round(share * moments.decode_steps)) if moments.decode_steps else 0
        chunks = self._chunks(max(1, size - num_decodes))
        context = round(num_decodes * moments.mean_context_tokens)
        return _make_work(num_decodes, context, chunks, num_decodes + max(1, round(share)))

    def _chunks(self, tokens: int) -> list[tuple[int, int]]:
        """Return prefill chunks that together have as many query-key pairs as in the mean."""
        moments = self._moments
        length = max(1, round(moments.square_prompt_tokens / moments.prompt_tokens))
        num_whole, remainder = divmod(tokens, length)
        chunks = [(0, length)] * num_whole
        if remainder:
            chunks.append(((length - remainder) // 2, remainder))
        return chunks


_steps = count(1)


def _make_work(
    num_decodes: int, context: int, chunks: list[tuple[int, int]], num_sampled: int
) -> StageWork:
    """Return a micro-batch; steps differ because cost models keep results by step."""
    num_tokens = num_decodes + sum(tokens for _, tokens in chunks)
    return StageWork(next(_steps), num_tokens, tuple(chunks), num_decodes, context, num_sampled)
