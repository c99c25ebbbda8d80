"""What a request that generated came to.

Owns the figures that log lines and traces tell. Knows nothing of either, and nothing of texts.
"""

from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.sampling import SamplingParams
from gllm.frontend.choices import UsageCounter
from gllm.frontend.metrics import RequestMetrics


@dataclass
class RequestSummary:
    """Filled while the request runs; complete when its handler has ended."""

    params: SamplingParams
    streams: bool
    tally: UsageCounter
    records: list[RequestMetrics] = field(default_factory=list)
    """One for each prompt."""

    @property
    def finish_reasons(self) -> list[str]:
        """Of the choices, in their order; of those that have one."""
        return [reason for record in self.records for reason in record.reasons if reason]

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None without one."""
        return min((r.ttft for r in self.records if r.ttft is not None), default=None)

    @property
    def queue_seconds(self) -> float | None:
        """From arrival to the first micro-batch; None before the first token."""
        known = (r.queue_seconds for r in self.records if r.queue_seconds is not None)
        return min(known, default=None)


SUMMARY = web.RequestKey("outcome", RequestSummary)
