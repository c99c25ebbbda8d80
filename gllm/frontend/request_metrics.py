"""Latencies, token counts and finish reasons of one request, for metrics, access log and traces."""

import time
from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import OutputDelta
from gllm.frontend.choices import UsageCounter
from gllm.frontend.metrics import Metrics
from gllm.observability.latency import RequestTimeline
from gllm.options.slo import NO_SLO, Slo


class RequestMetrics:
    """Records latencies and finish reasons of one prompt's choices in the Prometheus metrics.

    Args:
        metrics: Metrics of the server.
        arrival: Monotonic arrival time of the request, in seconds.
        prompt_tokens: Number of prompt tokens.
        choices: Number of choices.
        slo: Latency objectives of the request; None if it has none.
    """

    def __init__(
        self,
        metrics: Metrics,
        arrival: float,
        prompt_tokens: int,
        choices: int,
        slo: Slo | None = None,
    ) -> None:
        self._metrics = metrics
        self._slo = slo or NO_SLO
        self._num_prompt_tokens = prompt_tokens
        self._lines = [RequestTimeline(arrival) for _ in range(choices)]
        self.queue_seconds: float | None = None
        """Time from arrival to the first micro-batch; None before the first token."""
        self.finish_reasons = [""] * choices
        """Finish reason of each choice; empty while it runs."""
        metrics.prompt_tokens.inc(prompt_tokens)

    def on_delta(self, delta: OutputDelta) -> None:
        """Record the latencies of an output delta."""
        if count := len(delta.token_ids):
            line, output, now = self._lines[delta.index], self._metrics.output, time.monotonic()
            output.num_tokens += count
            if line.times:
                output.observe_gap(now - line.times[-1])
            line.record_output(now, count)
            if self.queue_seconds is None:
                self._record_first_token(delta)
        if delta.finish_reason is not None:
            self._end(delta.index, delta.finish_reason)

    def _record_first_token(self, delta: OutputDelta) -> None:
        """Record the latencies up to the prompt's first token."""
        ttft = self._lines[delta.index].ttft
        assert ttft is not None, "there is output"
        self.queue_seconds = delta.queue_seconds
        self._metrics.ttft.observe(ttft)
        self._metrics.queue.observe(delta.queue_seconds)
        self._metrics.prefill.observe(max(0.0, ttft - delta.queue_seconds))

    @property
    def ttft(self) -> float | None:
        """Time to the first token of any choice; None without one."""
        return min((line.ttft for line in self._lines if line.ttft is not None), default=None)

    def close(self) -> None:
        """Record choices that have not finished as aborted."""
        for index, reason in enumerate(self.finish_reasons):
            if not reason:
                self._end(index, "abort")

    def _end(self, index: int, reason: str) -> None:
        if not any(self.finish_reasons):
            self._metrics.request_prompt_tokens.observe(self._num_prompt_tokens)
        self.finish_reasons[index] = reason
        self._metrics.finished.count(reason)
        line = self._lines[index]
        self._metrics.request_generation_tokens.observe(line.num_tokens)
        if reason != "abort" and self._slo:
            self._count_objectives(line)
        if line.e2el is None or line.ttft is None:
            return
        self._metrics.e2el.observe(line.e2el)
        self._metrics.decode.observe(line.e2el - line.ttft)
        self._metrics.inference.observe(max(0.0, line.e2el - (self.queue_seconds or 0.0)))
        if line.tpot is not None:
            self._metrics.tpot.observe(line.tpot)

    def _count_objectives(self, line: RequestTimeline) -> None:
        """Count which objectives a choice has met; one without output has missed that of TTFT."""
        ttft, tpot = self._slo.ttft_seconds, self._slo.tpot_seconds
        count = self._metrics.objectives.count
        if ttft is not None:
            is_met = line.ttft is not None and line.ttft <= ttft
            count("ttft", "true" if is_met else "false")
        if tpot is not None and line.tpot is not None:
            count("tpot", "true" if line.tpot <= tpot else "false")


@dataclass
class RequestSummary:
    """Sampling parameters, token counts and latencies of an HTTP request, for log and traces.

    Updated while the request runs; complete when its handler has returned.
    """

    params: SamplingParams
    is_streaming: bool
    usage: UsageCounter
    prompt_metrics: list[RequestMetrics] = field(default_factory=list)
    """Metrics of each prompt, in the order of the prompts."""
    num_resumptions: int = 0
    """Number of times that the request was resubmitted after a recovery of the engine."""

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
