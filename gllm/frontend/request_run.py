"""A job in the engine: its requests, and the deltas they bring as one stream.

Owns when deltas are taken. Knows nothing of JSON and of sockets.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineInterface, OutputDelta, RequestHandle
from gllm.frontend.fields.generation import BaseCompletionFields
from gllm.frontend.metrics import Metrics, RequestMetrics
from gllm.text.output.parser import PLAIN_TEXT, OutputFormat
from gllm.text.output.reasoning import ReasoningTokenCounter


@dataclass(frozen=True)
class PreparedRequest:
    """A request ready to run."""

    fields: BaseCompletionFields
    prompts: list[list[int]]
    params: SamplingParams
    generates: bool = True
    """If not, what is drawn is not shown: the prompt is all that matters."""
    output: OutputFormat = PLAIN_TEXT
    """What the choices may hold besides text."""
    reasoning: Callable[[], ReasoningTokenCounter] | None = None
    """Makes what counts a choice's tokens of reasoning, where they can be told apart."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.params.n


class RequestRun:
    """The requests of one job, a request for each prompt; the choices of prompt i are i * n ..
    i * n + n - 1. Has to be closed."""

    def __init__(
        self,
        engine: EngineInterface,
        metrics: Metrics,
        job: PreparedRequest,
        request_id: str,
        arrival: float,
    ) -> None:
        self._engine = engine
        self._job = job
        self._request_id = request_id
        n = job.params.n
        self.records = [RequestMetrics(metrics, arrival, len(ids), n) for ids in job.prompts]
        self._requests: Sequence[RequestHandle] = []
        self._left = job.choices
        self._push: Callable[[], bool] = bool
        self._stop: asyncio.Future[None] | None = None
        """Ends `pour`, where that runs."""
        self._has_news = False

    @property
    def ended(self) -> bool:
        """Whether all choices have been taken to their end."""
        return not self._left

    async def start(self) -> None:
        """Hand the requests to the engine. Raises what `submit` does."""
        fields = self._job.fields
        self._requests = await self._engine.submit(
            self._job.prompts,
            self._job.params,
            priority=fields.priority or 0,
            cache_salt=fields.cache_salt or "",
            request_id=self._request_id,
        )
        for request in self._requests:
            request.listen(self._news)

    async def pour(self, push: Callable[[], bool]) -> None:
        """Call `push` whenever there is something to take, within the step of the engine that
        brings it, until it says False, raises, or has taken everything.

        No task of this process runs for a token so. What comes before the next call waits, and
        is coalesced.
        """
        self._push, self._stop = push, asyncio.get_running_loop().create_future()
        if self._has_news:
            self._news()
        try:
            await self._stop
        finally:
            self._stop = None

    def take(self) -> list[OutputDelta]:
        """What came since the last call. Raises what the engine does."""
        self._has_news = False
        deltas: list[OutputDelta] = []
        for i, request in enumerate(self._requests):
            for delta in request.take():
                self.records[i].delta(delta)
                if delta.finish_reason is not None:
                    self._left -= 1
                deltas.append(self._shown(delta, i))
        return deltas

    def close(self) -> None:
        """Abort what still runs."""
        for request in self._requests:
            request.close()
        for record in self.records:
            record.close()

    def _shown(self, delta: OutputDelta, prompt: int) -> OutputDelta:
        """A prompt's delta as one of the job."""
        if prompt:
            delta = replace(delta, index=prompt * self._job.params.n + delta.index)
        if self._job.generates:
            return delta
        reason = "length" if delta.finish_reason == "stop" else delta.finish_reason
        return replace(
            delta, text="", token_ids=[], logprobs=[], finish_reason=reason, stop_reason=None
        )

    def _news(self) -> None:
        self._has_news = True
        stop = self._stop
        if stop is None or stop.done():
            return
        try:
            goes_on = self._push()
        except Exception as error:  # told to whoever pours
            stop.set_exception(error)
        else:
            if not goes_on or self.ended:
                stop.set_result(None)
