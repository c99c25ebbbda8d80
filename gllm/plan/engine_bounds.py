"""Closed forms of one engine under a workload: bound of its request rate, estimates of latencies.

Bound: in a steady state each micro-batch has equal shares of prefill and decode. Steps of equal
size are the fastest for a given amount of work, and larger ones are faster per token, as long as
the time of a step is convex and has a fixed part (weights, launches). So no schedule serves more
requests than micro-batches that are as large as the limits permit: tokens per micro-batch,
sequences, KV cache.

Estimates: the micro-batch that a rate needs gives the time between tokens; the wait before a
prefill is that of an M/D/1 queue whose service time is that of the slowest stage per request; of an
M/D/c queue where sequences, not tokens, limit the micro-batches: each sequence is a server.
"""

from collections.abc import Callable, Iterator
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
NUM_HALVINGS = 16
"""Bisections in the search for the micro-batch of a rate."""
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
        # Policies that do not cut prompts run a longer one alone.
        self._max_tokens = max(config.max_num_batched_tokens, moments.prompts[-1])
        self._chunk_tokens = min(config.max_num_batched_tokens, moments.prompts[-1])
        self._max_seqs = float(config.max_num_seqs)
        if moments.mean_context_tokens and not moments.is_shared:
            kv_tokens = config.num_blocks * config.block_size
            self._max_seqs = min(self._max_seqs, kv_tokens / moments.mean_context_tokens)

    def max_rate(self) -> float:
        """Return requests per second that the engine cannot exceed; infinite if unknown."""
        try:
            return BOUND_SLACK * max(self._rate(share) for share in self._largest_shares())
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
        return self._bisect(lambda point: point.keeps(limits, max_delay_seconds))

    def point_at(self, rate: float) -> OperatingPoint | None:
        """Return the estimates at a rate per second; None: the rate is too high, or unknown."""
        point = self._bisect(lambda point: point.rate <= rate)
        return None if point is None else point._replace(rate=rate)

    def _bisect(self, holds: Callable[[OperatingPoint], bool]) -> OperatingPoint | None:
        """Return the point with the largest micro-batch for which a condition holds."""
        try:
            shares = list(self._largest_shares())
            largest = max(shares, key=self._rate)
            slowest = 1 / self._rate(largest)
            prefill = self._prefill_seconds(max(1, round(self._moments.prompt_tokens)))
            num_servers = max(1.0, self._max_seqs) if largest < self._token_share else 1.0
            low, high, best = 0.0, largest, None
            for _ in range(NUM_HALVINGS):
                middle = (low + high) / 2
                point = self._point(middle, slowest, prefill)._replace(num_servers=num_servers)
                if holds(point):
                    low, best = middle, point
                else:
                    high = middle
        except CostRangeError:
            return None
        return best

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

    def _largest_shares(self) -> Iterator[float]:
        """Yield sizes of micro-batches between which the largest permitted one is.

        A size is a number of requests' work. With several stages, micro-batches in flight share the
        sequences; how unevenly is free, so sizes up to all sequences count.
        """
        moments, by_tokens = self._moments, self._token_share
        if not moments.decode_steps:
            yield by_tokens
            return
        most = self._max_seqs / moments.decode_steps
        least = most / len(self._stages)
        num_sizes = 1 if len(self._stages) == 1 else 6
        for index in range(num_sizes):
            size = least * (most / least) ** (index / max(1, num_sizes - 1))
            yield min(by_tokens, size)

    @property
    def _token_share(self) -> float:
        """Requests' work in a micro-batch with as many tokens as are permitted."""
        return self._max_tokens / (self._moments.prompt_tokens + self._moments.decode_steps)

    def _rate(self, share: float) -> float:
        """Return requests per second with micro-batches of this size."""
        seconds = self._stage_times(self._work(share))
        rate = share / max(seconds)
        if self._moments.decode_steps:
            # Each sequence passes all stages once per token.
            rate = min(rate, self._max_seqs / (self._moments.decode_steps * sum(seconds)))
        return rate

    def _point(self, share: float, slowest: float, prefill_seconds: float) -> OperatingPoint:
        work = self._work(share)
        times = self._stage_times(work)
        step = chunk = self._pass_seconds(work)
        room = max(0, self._chunk_tokens - work.num_decodes)
        if room > sum(tokens for _, tokens in work.prefill_chunks):
            context = work.num_decode_context_tokens
            full = _make_work(work.num_decodes, context, self._chunks(room), work.num_sampled_rows)
            chunk = self._pass_seconds(full)
        rate = share / max(max(times), step / len(times))
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

    def _work(self, share: float) -> StageWork:
        """Return the micro-batch that has this many requests' work."""
        moments = self._moments
        num_decodes = max(1, round(share * moments.decode_steps)) if moments.decode_steps else 0
        chunks = self._chunks(max(1, round(share * moments.prompt_tokens)))
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
