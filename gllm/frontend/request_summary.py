"""Summary of a generating request, read by the access log and by traces."""

from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.sampling import SamplingParams
from gllm.frontend.choices import UsageCounter
from gllm.frontend.request_metrics import RequestMetrics


@dataclass
class RequestSummary:
    """Parameters, token counts and latencies of one request.

    Updated while the request runs; complete when its handler has returned.
    """

    params: SamplingParams
    is_streaming: bool
    usage: UsageCounter
    prompt_metrics: list[RequestMetrics] = field(default_factory=list)
    """Metrics of each prompt, in the order of the prompts."""
    num_resumptions: int = 0
    """Number of recoveries after which the request was submitted again; known at its end."""

    @property
    def finish_reasons(self) -> list[str]:
        """Finish reasons of the choices that have finished, in the order of the choices."""
        return [reason for m in self.prompt_metrics for reason in m.finish_reasons if reason]

    @property
    def ttft_seconds(self) -> float | None:
        """Time from arrival to the first token; None if there is no token."""
        return min((m.ttft for m in self.prompt_metrics if m.ttft is not None), default=None)

    @property
    def queue_seconds(self) -> float | None:
        """Time from arrival to the first micro-batch; None before the first token."""
        times = (m.queue_seconds for m in self.prompt_metrics if m.queue_seconds is not None)
        return min(times, default=None)


SUMMARY = web.RequestKey("summary", RequestSummary)
"""Key of a request's summary; absent if the request does not generate."""
