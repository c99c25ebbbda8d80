"""Closed forms of one engine under a workload: bound of its request rate, estimates of latencies.

Bound: in a steady state micro-batches have equal shares of prefill and decode on average. No
schedule serves more requests than micro-batches of the size with the most work per second, among
all that the limits permit: tokens per micro-batch, sequences, KV cache. That is not always the
largest: times of matrix products rise in steps of a tile's rows, so 512 tokens may take 40 % less
time than 549. Limits of the time between tokens lower the bound: `max_decode_rate`.

Estimates of latencies at a request rate: the micro-batch that the rate needs gives the time between
tokens; the wait before a prefill is that of an M/D/1 queue whose service time is the time of the
slowest stage per request, or of an M/D/c queue where sequences, not tokens, limit the
micro-batches: each sequence is a server.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import ceil, floor, inf, log, sqrt
from statistics import fmean
from typing import NamedTuple

from gllm.observability.latency import percentile
from gllm.options.slo import NO_SLO, Slo
from gllm.plan.engine_times import EngineTimes, decode_step_work, make_work, prefill_work
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment
from gllm.sim.monotone_search import bisect_last
from gllm.sim.workloads.requests import WorkloadRequest, longest_job

DELAY_PERCENT = 99.0
"""Percentile of the scheduling delay that every capacity limits, as in CAPACITY_RULES."""
MAX_DELAY_SECONDS = 5.0
"""Default of that limit."""
MAX_UTILIZATION = 0.999
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "TBT"}
"""Metrics with an estimate, by their names in messages."""


class OperatingPoint(NamedTuple):
    """Estimated latencies of an engine at one request rate, by queueing formulas."""

    rate: float
    """Requests per second."""
    slowest_seconds: float
    """Mean seconds between two requests at the engine's highest rate: 1 / that rate."""
    prefill_seconds: float
    """Seconds in which a prompt of mean length passes all stages without other work."""
    step_seconds: float
    """Seconds in which a mean micro-batch passes all stages: the time per output token."""
    chunk_seconds: float
    """Seconds in which a micro-batch with as many prefill tokens as permitted passes all stages."""
    num_servers: float = 1.0
    """Servers in the queueing model: 1 if tokens per micro-batch are the limit, else sequences."""
    chunk_stage_seconds: float = 0.0
    """Seconds of that micro-batch on the slowest stage; 0 if there is only one stage."""
    chunks_per_request: float = 1.0
    """Number of prefill chunks of a prompt in the mean."""

    def wait(self, percent: float) -> float:
        """Return a percentile (0..100) of the queueing time before the prefill in seconds."""
        utilization = min(self.rate * self.slowest_seconds, MAX_UTILIZATION)
        share = wait_probability(utilization, self.num_servers) / max(1 - percent / 100, 1e-6)
        # Mean wait of those that wait; it does not depend on the number of servers.
        return self.slowest_seconds / (2 * (1 - utilization)) * log(share) if share > 1 else 0.0

    def ttft(self, percent: float = 50.0) -> float:
        """Return a percentile (0..100) of the time to first token in seconds."""
        return self.prefill_seconds + self.wait(percent)

    def itl(self, percent: float) -> float:
        """Return a percentile (0..100) of the time between two tokens in seconds.

        In a pipeline, a micro-batch of decodes waits for a micro-batch with a prefill that is on a
        stage before it. The share of gaps with such a wait is the rate of prefill chunks per step
        times the utilization of the stage; the wait is uniform up to the stage's time for the
        chunk.
        """
        share = min(1.0, self.rate * self.slowest_seconds)
        share *= min(1.0, self.rate * self.chunks_per_request * self.step_seconds)
        tail = 1 - percent / 100
        wait = self.chunk_stage_seconds * (1 - tail / share) if share > tail else 0.0
        return self.chunk_seconds + wait

    def between(self, lower: "OperatingPoint", rate: float) -> "OperatingPoint":
        """Return the estimates at `rate`, interpolated between this point and a lower one."""
        share = (rate - lower.rate) / (self.rate - lower.rate)

        def interpolate(low: float, high: float) -> float:
            return low + share * (high - low)

        return self._replace(
            rate=rate,
            step_seconds=interpolate(lower.step_seconds, self.step_seconds),
            chunk_seconds=interpolate(lower.chunk_seconds, self.chunk_seconds),
            chunk_stage_seconds=interpolate(lower.chunk_stage_seconds, self.chunk_stage_seconds),
        )

    def keeps(self, limits: Slo, max_delay_seconds: float = MAX_DELAY_SECONDS) -> bool:
        """Return True if the estimated latencies are within limits of TTFT, TPOT and TBT.

        The scheduling delay has to be within its limit as well. Limits of `e2el` are ignored.
        """
        return not self.missed_limit(limits, max_delay_seconds)

    def missed_limit(self, limits: Slo, max_delay_seconds: float = MAX_DELAY_SECONDS) -> str:
        """Return a message about the first limit that the estimates exceed; empty if none does."""
        for metric, name in NAMES.items():
            limit = limits.limit_of(metric)
            if limit is None:
                continue
            seconds = self._estimate(metric, limit[1])
            if seconds > limit[0]:
                return (
                    f"the estimate of {name} P{limit[1]:g} is {seconds:.3g} s at "
                    f"{self.rate:.3g} requests/s, above the limit of {limit[0]:g} s"
                )
        if self.wait(DELAY_PERCENT) > max_delay_seconds:
            return f"the scheduling delay is above {max_delay_seconds:g} s at any rate"
        return ""

    def _estimate(self, metric: str, percent: float) -> float:
        if metric == "ttft":
            return self.ttft(percent)
        return self.step_seconds if metric == "tpot" else self.itl(percent)


def wait_probability(utilization: float, num_servers: float = 1.0) -> float:
    """Return the probability that an arriving request has to queue because all servers are busy.

    Approximation for M/M/c queues. Source: Sakasegawa, "An approximation formula Lq = a rho^b / (1
    - rho)", 1977.

    Args:
        utilization: Mean share of the servers that are busy, 0..1.
        num_servers: Number of parallel servers of the queue, at least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0 <= utilization <= 1 or num_servers < 1:
        raise ValueError(
            f"utilization is {utilization}, num_servers {num_servers}: they must be in 0..1 and at "
            "least 1"
        )
    return utilization ** (sqrt(2 * (num_servers + 1)) - 1)


class WorkloadMoments(NamedTuple):
    """Statistics of a workload's prompt and output lengths in tokens: means, and sorted lengths."""

    num_requests: int
    prompt_tokens: float
    """Mean number of prompt tokens to prefill; prefixes that requests share are not counted."""
    square_prompt_tokens: float
    """Mean of the squared number of prompt tokens."""
    decode_steps: float
    """Mean number of output tokens without the first one, which the prefill samples."""
    context_tokens: float
    """Mean over requests of the context lengths of all decode steps, summed."""
    longest_tokens: int
    """Prompt and output tokens of the longest request."""
    prompts: tuple[int, ...]
    """Number of prompt tokens to prefill of each request, ascending."""
    steps: tuple[int, ...]
    """Number of decode steps of each request, ascending."""
    is_shared: bool = False
    """True if requests share prefixes, and therefore KV blocks."""

    @property
    def mean_context_tokens(self) -> float:
        """Mean KV tokens of a sequence over its decode steps; 0 without such steps."""
        return self.context_tokens / self.decode_steps if self.decode_steps else 0.0

    def prompt_percentile(self, percent: float) -> int:
        """Return a percentile (0..100) of the prompts' lengths, rounded down."""
        return max(1, int(percentile(self.prompts, percent)))

    def step_percentile(self, percent: float) -> float:
        """Return a percentile (0..100) of the decode steps per request."""
        return percentile(self.steps, percent)


def measure_workload(jobs: Sequence[WorkloadRequest]) -> WorkloadMoments:
    """Return the statistics of a workload's lengths, from which bounds of its rate are computed.

    Args:
        jobs: The requests; at least one.
    """
    prompts = [job.parts[-1].num_tokens if job.parts else job.num_prompt_tokens for job in jobs]
    steps = [job.num_output_tokens - 1 for job in jobs]
    contexts = [
        count * job.num_prompt_tokens + count * (count + 1) / 2
        for job, count in zip(jobs, steps, strict=True)
    ]
    return WorkloadMoments(
        len(jobs),
        fmean(prompts),
        fmean(tokens**2 for tokens in prompts),
        fmean(steps),
        fmean(contexts),
        longest_job(jobs),
        tuple(sorted(prompts)),
        tuple(sorted(steps)),
        any(job.parts for job in jobs),
    )


BOUND_SLACK = 1.1
"""Factor on the bound, because micro-batches are rounded to whole tokens, a run's lengths differ
from the mean, and measured times are not convex everywhere."""
SIZES_PER_OCTAVE = 8
"""Sizes of micro-batches between a number of tokens and its double; from 128 tokens on, among them
are all multiples of 16 up to 256, of 32 up to 512 and so on, so the ends of tiles are met."""
NUM_STEPS = 256
"""Rates between those of two sizes."""
LONG_REQUEST_PERCENT = 90.0
"""Percentile of the output lengths that a long request has."""


class EngineBounds:
    """Upper bound of one engine's request rate and estimates of its latencies, by formulas.

    The formulas use predicted step times of micro-batches; nothing is simulated.

    Args:
        deployment: Engine to assess: its predicted step times, scheduler options and KV cache size.
        moments: Mean, mean square and sorted prompt and output lengths of the workload.
    """

    def __init__(self, deployment: Deployment, moments: WorkloadMoments) -> None:
        self._cost = deployment.cost
        self._num_stages = len(deployment.layers)
        self._engine = EngineTimes(deployment.cost, self._num_stages)
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
        self._unknown_reason = ""
        """Reason why there are no estimates."""
        self._times: dict[int, tuple[StageWork, list[float]]] = {}
        """Micro-batches and their seconds on each stage, by number of tokens."""

    def max_rate(self) -> float:
        """Return an upper bound of the request rate per second; infinite if step times are unknown.

        Latency limits lower it: see `max_rate_of_run`.
        """
        try:
            # How unevenly micro-batches in flight share the sequences is free.
            sizes = self._sizes(self._max_tokens, self._max_seqs)
            return BOUND_SLACK * max(self._rate(size) for size in sizes)
        except CostRangeError:
            return inf

    def max_rate_of_run(
        self,
        num_requests: int,
        min_seconds: float,
        delay_seconds: float,
        limits: Slo = NO_SLO,
    ) -> float:
        """Return an upper bound of the request rate that a simulation of limited length sustains.

        Requests that have not finished when the last one arrives raise the rate: those that run
        then, as many as the engine holds, and those that wait for less than `delay_seconds`. A
        limit of TPOT or TBT lowers it through `max_decode_rate`, only for the share of decode steps
        that has to meet the limit.

        Args:
            num_requests: Smallest number of requests of a simulation.
            min_seconds: Shortest time in which they arrive.
            delay_seconds: Limit of the scheduling delay.
            limits: Latency limits; those of TTFT and E2EL are ignored.
        """
        steady, steps = self.max_rate(), self._moments.decode_steps
        rates = [(steady, 1.0)]
        for seconds, share in self._step_shares(limits, num_requests) if steps else ():
            highest = BOUND_SLACK * self.max_decode_rate(seconds) / (share * steps)
            rates.append((min(steady, highest), share))
        unfinished = self._max_seqs + steady * delay_seconds
        return min(
            _rate_of_run(rate, unfinished / share, num_requests, min_seconds)
            for rate, share in rates
        )

    def max_decode_rate(self, seconds: float) -> float:
        """Return the most decode steps per second if each takes at most `seconds`.

        Each token passes all stages, so a gap between two tokens is not shorter than the time of
        the later one's micro-batch on all stages and links in a row: T(b) >= sum_s t_s(b) + links
        for a micro-batch of b decodes. With the largest b for which T(b) is within the limit, a
        stage computes max b / t_s(b) decodes per second up to this b, and prompts in the same
        micro-batch make it slower only. A mean over the tokens of a request is limited in the same
        way, as t_s(b) / b is convex in T(b): shorter steps of some tokens cost more time than
        longer ones of others save. Contexts count as the shortest prompt. With one stage the time
        in which a result returns does not count, because it overlaps the next step.

        Args:
            seconds: Limit of the time between two tokens.

        Returns:
            Decode steps per second: 0 where a single token takes longer, infinite if unknown.
        """
        highest, least, size = 0.0, 0.0, 1
        while size <= self._max_seqs:
            next_size = size + max(1, (1 << size.bit_length() - 1) // SIZES_PER_OCTAVE)
            work = decode_step_work(size, self._moments.prompts[0] + 1)
            try:
                least = self._least_gap(work)
            except CostRangeError:
                # Larger micro-batches are not faster than the last one that was measured.
                return highest if least > seconds else inf
            if least <= seconds:
                # Sizes up to the next one may be within the limit, too.
                highest = max(highest, (next_size - 1) / max(self._engine.stages(work)))
            size = next_size
        return highest

    def _step_shares(self, limits: Slo, num_requests: int) -> Iterator[tuple[float, float]]:
        """Yield each limit of TPOT and TBT in seconds, with the share of decode steps it binds."""
        steps = self._moments.steps
        for limit in limits.percentiles:
            num_values = num_requests
            if limit.metric == "itl":
                num_values = max(1, int(num_requests * self._moments.decode_steps))
            # A percentile is interpolated between two values: the upper one may be any.
            share = limit.percent / 100 - 1 / num_values
            if limit.metric == "tpot" and share > 0:
                share = _least_sum_share(steps, share)
            if limit.metric in ("tpot", "itl") and share > 0:
                yield limit.limit, share
        if (
            limits.tpot_seconds is not None
            and (share := _least_sum_share(steps, limits.attainment)) > 0
        ):
            yield limits.tpot_seconds, share

    def best_point(
        self, limits: Slo, max_delay_seconds: float = MAX_DELAY_SECONDS
    ) -> OperatingPoint | None:
        """Return the estimates at the highest request rate within limits; None without such a rate.

        None also if the step times of the micro-batches were not measured.
        """
        kept = [point for point in self._points if point.keeps(limits, max_delay_seconds)]
        best = max(kept, key=lambda point: point.rate, default=None)
        if best is None:
            return None
        higher = [point.rate for point in self._points if point.rate > best.rate]
        step = (min(higher, default=best.rate) - best.rate) / NUM_STEPS
        points = {0: best}

        def keeps(index: int, *_: int) -> bool:
            point = self.point_at(points[0].rate + index * step)
            if point is None or not point.keeps(limits, max_delay_seconds):
                return False
            points[index] = point
            return True

        return points[bisect_last(keeps, 0, NUM_STEPS)]

    def point_at(self, rate: float) -> OperatingPoint | None:
        """Return the estimates at a request rate per second; None if it is too high or unknown."""
        lower: OperatingPoint | None = None
        for point in self._points:
            if point.rate >= rate:
                return point.between(lower, rate) if lower else point._replace(rate=rate)
            lower = point
        return None

    @cached_property
    def _points(self) -> list[OperatingPoint]:
        """Estimates of all sizes of micro-batches that were measured, rising; empty: of none.

        Micro-batches in flight share the sequences evenly.
        """
        sizes = self._sizes(self._token_limit, self._max_seqs / self._num_stages)
        points: list[OperatingPoint] = []
        try:
            prefill = self._prefill_seconds(max(1, round(self._moments.prompt_tokens)))
            for size in sizes:
                points.append(self._point(size, prefill))
        except CostRangeError as error:
            # The rates of the larger sizes are unknown.
            if not points:
                self._unknown_reason = f"outside of the profile: {error}"
                return []
        slowest = 1 / max(self._rate(size) for size in sizes[: len(points)])
        is_token_limited = sizes[-1] >= self._token_limit
        num_servers = 1.0 if is_token_limited else max(1.0, self._max_seqs)
        num_chunks = fmean(ceil(tokens / self._token_limit) for tokens in self._moments.prompts)
        return [
            point._replace(
                slowest_seconds=slowest, num_servers=num_servers, chunks_per_request=num_chunks
            )
            for point in points
        ]

    def missed_limit(self, limits: Slo, max_delay_seconds: float = MAX_DELAY_SECONDS) -> str:
        """Return the reason why no request rate is within limits; empty if some rate may be."""
        if not self._points:
            return self._unknown_reason
        return self._points[0].missed_limit(limits, max_delay_seconds)

    def request_seconds(
        self, limits: Slo = NO_SLO, max_delay_seconds: float = MAX_DELAY_SECONDS
    ) -> float:
        """Return the estimated duration of a long request at the engine's capacity, not queued.

        The prompt has the mean length, the output that of percentile LONG_REQUEST_PERCENT.

        Args:
            limits: Latency limits of the capacity; ignored if no rate is within them.
            max_delay_seconds: Limit of the scheduling delay.
        """
        point = self.best_point(limits, max_delay_seconds) or self.best_point(NO_SLO)
        steps = self._moments.step_percentile(LONG_REQUEST_PERCENT)
        if point is None:
            return steps * self.min_token_seconds()
        return point.prefill_seconds + steps * point.step_seconds

    def min_first_token_seconds(self, percent: float) -> float:
        """Return a lower bound of a percentile (0..100) of the TTFT in seconds."""
        tokens = self._moments.prompt_percentile(percent)
        try:
            return max(self._engine.stages(prefill_work([tokens])))
        except CostRangeError:
            return 0.0

    def min_token_seconds(self) -> float:
        """Return a lower bound of the time between two tokens of a request in seconds."""
        try:
            return self._least_gap(decode_step_work(1, self._moments.prompts[0] + 1))
        except CostRangeError:
            return 0.0

    def _least_gap(self, work: StageWork) -> float:
        """Return a time that no gap before a token of a micro-batch is below."""
        seconds = self._pass_seconds(work)
        if self._num_stages == 1:
            # The result of a single stage returns while the stage computes the next step.
            seconds -= self._cost.return_seconds(work)
        return seconds

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
            self._times[size] = work, self._engine.stages(work)
        return self._times[size]

    def _point(self, size: int, prefill_seconds: float) -> OperatingPoint:
        work, times = self._measured(size)
        step = chunk = self._pass_seconds(work)
        full = work
        room = max(0, self._chunk_tokens - work.num_decodes)
        if room > sum(tokens for _, tokens in work.prefill_chunks):
            context = work.num_decode_context_tokens
            full = make_work(work.num_decodes, context, self._chunks(room), work.num_sampled_rows)
            chunk = self._pass_seconds(full)
        rate = size / self._request_tokens / max(max(times), step / len(times))
        on_stage = max(self._engine.stages(full)) if len(times) > 1 else 0.0
        return OperatingPoint(rate, inf, prefill_seconds, step, chunk, chunk_stage_seconds=on_stage)

    def _prefill_seconds(self, tokens: int) -> float:
        starts = range(0, tokens, self._max_tokens)
        chunks = [(start, min(self._max_tokens, tokens - start)) for start in starts]
        return sum(self._pass_seconds(make_work(0, 0, [chunk], 1)) for chunk in chunks)

    def _pass_seconds(self, work: StageWork) -> float:
        """Return the time of a micro-batch on all stages one after the other, with transfers."""
        return self._engine.total(work) + self._cost.return_seconds(work)

    def _work(self, size: int) -> StageWork:
        """Return the micro-batch of this many tokens, but at least one of each kind."""
        moments = self._moments
        share = size / self._request_tokens
        num_decodes = max(1, round(share * moments.decode_steps)) if moments.decode_steps else 0
        chunks = self._chunks(max(1, size - num_decodes))
        context = round(num_decodes * moments.mean_context_tokens)
        return make_work(num_decodes, context, chunks, num_decodes + max(1, round(share)))

    def _chunks(self, tokens: int) -> list[tuple[int, int]]:
        """Return prefill chunks that together have as many query-key pairs as in the mean."""
        moments = self._moments
        length = max(1, round(moments.square_prompt_tokens / moments.prompt_tokens))
        num_whole, remainder = divmod(tokens, length)
        chunks = [(0, length)] * num_whole
        if remainder:
            chunks.append(((length - remainder) // 2, remainder))
        return chunks


def _rate_of_run(steady: float, unfinished: float, num_requests: int, min_seconds: float) -> float:
    """Return the highest rate per second of a run that may leave some requests unfinished.

    Args:
        steady: Requests per second that finish.
        unfinished: Number of requests that need not finish while others arrive.
        num_requests: Least number of requests.
        min_seconds: Least time in which they arrive.
    """
    if min_seconds:
        rate = steady + unfinished / min_seconds
        if rate * min_seconds >= num_requests:
            return rate
    if num_requests <= unfinished:
        return inf
    rate = steady * num_requests / (num_requests - unfinished)
    return min(rate, num_requests / min_seconds) if min_seconds else rate


def _least_sum_share(values: Sequence[int], share: float) -> float:
    """Return the share (0..1) of the sum that the smallest values have, a share of their number.

    Args:
        values: Rising.
        share: Of the number of values, 0..1.
    """
    return sum(values[: floor(share * len(values))]) / sum(values)
