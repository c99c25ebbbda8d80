"""Estimates of the latencies of one engine at a request rate.

The micro-batch that the rate needs gives the time between tokens; the wait before a prefill is that
of an M/D/1 queue whose service time is that of the slowest stage per request; of an M/D/c queue
where sequences, not tokens, limit the micro-batches: each sequence is a server.
"""

from math import log, sqrt
from typing import NamedTuple

from gllm.options.slo import Slo

DELAY_PERCENT = 99.0
"""Percentile of the scheduling delay that every capacity limits, as in CAPACITY_RULES."""
MAX_DELAY_SECONDS = 5.0
"""Default of that limit."""
MAX_UTILIZATION = 0.999
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "TBT"}
"""Metrics with an estimate, by their names in messages."""


class OperatingPoint(NamedTuple):
    """Estimated latencies of an engine at one request rate."""

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
    chunk_stage_seconds: float = 0.0
    """Seconds of that micro-batch on the slowest of several stages; 0 with one stage, which has no
    other micro-batch in flight."""
    chunks_per_request: float = 1.0
    """Micro-batches among which a mean prompt is divided."""

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

        In a pipeline a micro-batch of decodes waits for one with a prompt that is on a stage before
        it. So many gaps pass that a prompt as chunks of prompts arrive in a step, and the stage is
        busy for its utilization; the wait is uniform up to the time of the prompt on the stage.
        """
        share = min(1.0, self.rate * self.slowest_seconds)
        share *= min(1.0, self.rate * self.chunks_per_request * self.step_seconds)
        tail = 1 - percent / 100
        wait = self.chunk_stage_seconds * (1 - tail / share) if share > tail else 0.0
        return self.chunk_seconds + wait

    def between(self, lower: "OperatingPoint", rate: float) -> "OperatingPoint":
        """Return the estimates at `rate`, interpolated between this point and a lower one."""
        share = (rate - lower.rate) / (self.rate - lower.rate)
        step, chunk, chunk_stage = (
            low + share * (high - low)
            for low, high in (
                (lower.step_seconds, self.step_seconds),
                (lower.chunk_seconds, self.chunk_seconds),
                (lower.chunk_stage_seconds, self.chunk_stage_seconds),
            )
        )
        return self._replace(
            rate=rate, step_seconds=step, chunk_seconds=chunk, chunk_stage_seconds=chunk_stage
        )

    def keeps(self, limits: Slo, max_delay_seconds: float = MAX_DELAY_SECONDS) -> bool:
        """Return True if the estimates are within the limits and the scheduling delay is bounded.

        Limits of `e2el` are not estimated.
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
    """Return the probability that an arriving request finds all servers busy.

    Source: Sakasegawa, "An approximation formula Lq = a rho^b / (1 - rho)", 1977.

    Args:
        utilization: Share of the servers that are busy in the mean, 0..1.
        num_servers: At least 1.

    Raises:
        ValueError: An argument is out of range.
    """
    if not 0 <= utilization <= 1 or num_servers < 1:
        raise ValueError(
            f"utilization is {utilization}, num_servers {num_servers}: they must be in 0..1 and at "
            "least 1"
        )
    return utilization ** (sqrt(2 * (num_servers + 1)) - 1)
