"""Run the engine requests of one HTTP request and merge their deltas."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import OutputDelta, RequestHandle
from gllm.frontend.fields.generation import BaseCompletionFields
from gllm.frontend.metrics import Metrics
from gllm.frontend.request_metrics import RequestMetrics
from gllm.frontend.routing_hints import NO_HINTS, RoutingHints
from gllm.options.slo import Slo
from gllm.text.output.parser import PLAIN_TEXT, OutputFormat
from gllm.text.output.reasoning import ReasoningCounter


class Submitter(Protocol):
    """Interface to submit requests to: an engine, or a wrapper that also transfers KV blocks."""

    async def submit(
        self,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        *,
        priority: int,
        cache_salt: str,
        request_id: str,
        slo: Slo | None,
        session: str,
        client: str,
    ) -> Sequence[RequestHandle]:
        """Start one request per prompt, as `EngineInterface.submit`."""


@dataclass
class PreparedRequest:
    """A validated and tokenized generation request, ready to submit to the engine."""

    fields: BaseCompletionFields
    prompts: list[list[int]]
    """Token ids of each prompt."""
    params: SamplingParams
    """Sampling parameters; the prefill side of disaggregated prefill limits them to one token."""
    returns_output: bool = True
    """False for `max_tokens` 0: the response has the echoed prompt and its log-probabilities only.
    """
    output_format: OutputFormat = PLAIN_TEXT
    """Format by which reasoning and tool calls are parsed from the output text."""
    new_reasoning_counter: Callable[[], ReasoningCounter] | None = None
    """Factory of a choice's counter of reasoning tokens; None if they are not counted."""

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts together."""
        return len(self.prompts) * self.params.n


class RequestRun:
    """Runs one HTTP request: submits a request per prompt to the engine and collects their output.

    Has to be closed. The choices of prompt i have the indices i * n to i * n + n - 1.

    Args:
        engine: Submits the requests.
        metrics: Metrics of the server.
        request: The prepared request.
        request_id: Id of the request, for logs.
        arrival: Monotonic arrival time, in seconds.
        hints: Latency objectives, session and client.
    """

    def __init__(
        self,
        engine: Submitter,
        metrics: Metrics,
        request: PreparedRequest,
        request_id: str,
        arrival: float,
        hints: RoutingHints = NO_HINTS,
    ) -> None:
        self._engine = engine
        self._request = request
        self._request_id = request_id
        self._hints = hints
        n = request.params.n
        self.prompt_metrics = [
            RequestMetrics(metrics, arrival, len(ids), n, hints.slo) for ids in request.prompts
        ]
        """Metrics of each prompt."""
        self.handles: Sequence[RequestHandle] = []
        """Requests of the engine, one per prompt; none before `start`."""
        self.num_running = request.num_choices
        """Choices whose last delta has not been returned by `pop_deltas`."""
        params = request.params
        self.has_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        """True if deltas have log-probabilities."""
        self._on_output: Callable[[], bool] = bool
        self._stopped: asyncio.Future[None] | None = None
        """Result of the running `stream_to`; None if none runs."""
        self._has_output = False

    async def start(self) -> None:
        """Submit the requests to the engine. Raises the errors of `EngineInterface.submit`."""
        request, fields = self._request, self._request.fields
        self.handles = await self._engine.submit(
            request.prompts,
            request.params,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            request_id=self._request_id,
            slo=self._hints.slo,
            session=self._hints.session,
            client=self._hints.client,
        )
        for handle in self.handles:
            handle.set_listener(self._notify)

    async def stream_to(self, on_output: Callable[[], bool]) -> None:
        """Call `on_output` whenever output is pending, until it returns False or raises an error.

        `on_output` reads the output with `pop_deltas`. It is called in the event-loop iteration
        that receives the output, so that no task has to wake per token. Returns when all choices
        have finished. Output that arrives between two calls of `stream_to` is stored and merged per
        choice.
        """
        self._on_output, self._stopped = on_output, asyncio.get_running_loop().create_future()
        if self._has_output:
            self._notify()
        try:
            await self._stopped
        finally:
            self._stopped = None

    def pop_deltas(self) -> list[OutputDelta]:
        """Return the output deltas since the last call. Raises the errors of the engine."""
        self._has_output = False
        deltas: list[OutputDelta] = []
        for prompt, handle in enumerate(self.handles):
            for delta in handle.pop_deltas():
                self.prompt_metrics[prompt].on_delta(delta)
                if delta.finish_reason is not None:
                    self.num_running -= 1
                if prompt or not self._request.returns_output:
                    delta = self._to_answer(delta, prompt)
                deltas.append(delta)
        return deltas

    def close(self) -> None:
        """Abort the choices that have not finished."""
        for handle in self.handles:
            handle.close()
        for metrics in self.prompt_metrics:
            metrics.close()

    def _to_answer(self, delta: OutputDelta, prompt: int) -> OutputDelta:
        """Return a prompt's delta with the answer's choice index, and without hidden output."""
        if prompt:
            delta = replace(delta, index=prompt * self._request.params.n + delta.index)
        if self._request.returns_output:
            return delta
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        return replace(
            delta, text="", token_ids=[], logprobs=[], finish_reason=reason, stop_reason=None
        )

    def _notify(self) -> None:
        self._has_output = True
        stopped = self._stopped
        if stopped is None or stopped.done():
            return
        try:
            should_continue = self._on_output()
        except Exception as error:  # raised by stream_to
            stopped.set_exception(error)
        else:
            if not should_continue or not self.num_running:
                stopped.set_result(None)
