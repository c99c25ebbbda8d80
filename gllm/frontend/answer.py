"""Run a prepared request and send its HTTP response, streamed or complete.

An endpoint passes a writer, which formats the output for its API.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import msgspec
from aiohttp import web
from msgspec.structs import replace

from gllm.config.sampling import SamplingParams
from gllm.engine.interface import EngineUnavailableError, OutputDelta, PoisonRequestError
from gllm.engine.request_checks import contradiction_error
from gllm.frontend.answer_writer import AnswerWriter, WholeAnswerWriter
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import ARRIVAL, CLIENT_ID, CONTEXT, REQUEST_ID, RETRY_AFTER_SECONDS
from gllm.frontend.errors import ApiError, to_api_error
from gllm.frontend.handoffs.registry import open_handoff
from gllm.frontend.json_encoding import encode_json_in_pieces
from gllm.frontend.request_metrics import SUMMARY, RequestSummary
from gllm.frontend.request_run import PreparedRequest, RequestRun, Submitter
from gllm.frontend.routing_hints import read_routing_hints
from gllm.frontend.sse import EventStream
from gllm.messages.sampling import ALL_TOKENS_BANNED

MAX_INLINE_LOGPROBS = 2048
"""Log-probabilities encoded at once on the event loop; more are encoded in a thread."""


async def send_answer(
    http_request: web.Request,
    request: PreparedRequest,
    writer: AnswerWriter,
) -> web.StreamResponse:
    """Run a generation request and send its HTTP response, streamed if the client set `stream`.

    A stream consists of server-sent events. The writer formats the output for the endpoint.
    """
    if not request.fields.stream:
        return await send_whole_answer(http_request, request, writer)
    with _run_request(http_request, request, writer) as (run, usage):
        return await _send_stream(http_request, run, request, writer, usage)


async def send_whole_answer(
    http_request: web.Request,
    request: PreparedRequest,
    writer: WholeAnswerWriter,
) -> web.Response:
    """Run a generation request to its end and return the HTTP response with the complete JSON body.

    The writer formats the output for the endpoint.
    """
    with _run_request(http_request, request, writer) as (run, usage):
        await run.start()
        choices = await _collect_choices(run, request, usage)
        if num_logprobs(choices) > MAX_INLINE_LOGPROBS:
            body = await asyncio.to_thread(
                lambda: encode_json_in_pieces(writer.build_answer(choices, usage))
            )
        else:
            body = msgspec.json.encode(writer.build_answer(choices, usage))
    return web.Response(body=body, content_type="application/json")


@contextmanager
def _run_request(
    http_request: web.Request,
    request: PreparedRequest,
    writer: WholeAnswerWriter,
) -> Iterator[tuple[RequestRun, UsageCounter]]:
    """Yield the run of a request and its token counts; store the request's summary."""
    fields, context = request.fields, http_request.app[CONTEXT]
    client = http_request.get(CLIENT_ID) or ""
    hints = read_routing_hints(http_request.headers, fields, context.config.slo, client)
    with ExitStack() as stack:
        engine: Submitter = context.engine
        bootstrap = (fields.bootstrap_room, fields.bootstrap_host, fields.bootstrap_port)
        if fields.kv_transfer_params or bootstrap != (None, None, None):
            engine = stack.enter_context(open_handoff(http_request, request, writer))
        usage = UsageCounter(
            sum(map(len, request.prompts)), request.params.n, request.new_reasoning_counter
        )
        request_id, arrival = fields.request_id or http_request[REQUEST_ID], http_request[ARRIVAL]
        run = RequestRun(engine, context.metrics, request, request_id, arrival, hints)
        stack.enter_context(closing(run))
        summary = http_request[SUMMARY] = RequestSummary(
            request.params, bool(fields.stream), usage, run.prompt_metrics
        )
        try:
            yield run, usage
        finally:
            num_resumptions = (handle.num_resumptions for handle in run.handles)
            summary.num_resumptions = max(num_resumptions, default=0)


def num_logprobs(parts: Sequence[OutputDelta] | Sequence[CollectedChoice]) -> int:
    """Return the number of log-probabilities in output deltas or collected choices.

    Counts those of prompt and output tokens: the token itself and the most likely tokens at its
    position.
    """
    return sum(
        len(entries) * (len(entries[0].top_ids) + 1)
        for part in parts
        for entries in (part.logprobs, part.prompt_logprobs)
        if entries
    )


async def _collect_choices(
    run: RequestRun, request: PreparedRequest, usage: UsageCounter
) -> list[CollectedChoice]:
    """Return all choices once they have finished. Raises ApiError if one failed."""
    choices = [CollectedChoice(index) for index in range(request.num_choices)]

    def collect() -> bool:
        for delta in run.pop_deltas():
            if delta.finish_reason == "error":
                raise _generation_error(delta, request.params)
            usage.add(delta)
            choices[delta.index].add(delta)
        return True

    await run.stream_to(collect)
    return choices


async def _send_stream(
    http_request: web.Request,
    run: RequestRun,
    request: PreparedRequest,
    writer: AnswerWriter,
    usage: UsageCounter,
) -> web.StreamResponse:
    """Send the choices as events.

    An error before the headers are sent becomes a status code, a later one an event.
    """
    stream = EventStream(http_request, http_request.app[CONTEXT].config.write_timeout)
    with stream.monitored():
        try:
            await run.start()
            await _send_events(stream, run, request, writer, usage)
        except ConnectionError:
            return stream.response  # the client has disconnected; closing the run aborts it
        except Exception as error:
            if not stream.response.prepared:
                raise
            stream.write_events(writer.error_events(to_api_error(error)))
        await stream.flush()
        await stream.response.write_eof()
    return stream.response


async def _send_events(
    stream: EventStream,
    run: RequestRun,
    request: PreparedRequest,
    writer: AnswerWriter,
    usage: UsageCounter,
) -> None:
    events = writer.start_events(usage)
    """Not written yet: the stream's monitor writes comments until there is output."""
    large_deltas: list[OutputDelta] = []

    def build_events(deltas: list[OutputDelta]) -> None:
        for delta in deltas:
            has_failed = delta.finish_reason == "error"
            shown = replace(delta, finish_reason=None) if has_failed else delta
            usage.add(shown)
            events.extend(writer.delta_events(shown, usage))
            if has_failed:
                raise _generation_error(delta, request.params)

    def send_output() -> bool:
        deltas = run.pop_deltas()
        if run.has_logprobs and num_logprobs(deltas) > MAX_INLINE_LOGPROBS:
            large_deltas.extend(deltas)
            return False
        try:
            build_events(deltas)
        finally:
            # Output before a failure is sent before the error.
            stream.write_events(events)
            events.clear()
        return stream.is_caught_up

    while run.num_running:
        await run.stream_to(send_output)
        if large_deltas:
            try:
                await asyncio.to_thread(build_events, large_deltas)
            finally:
                stream.write_events(events)
                events.clear()
                large_deltas.clear()
        await stream.flush()
    stream.write_events(writer.end_events(usage))


def _generation_error(delta: OutputDelta, params: SamplingParams) -> ApiError:
    """Return the error of a choice that failed."""
    if delta.error == ALL_TOKENS_BANNED and (error := contradiction_error(params)) is not None:
        return to_api_error(error)
    match delta.error_kind:
        case "unavailable":
            unavailable = EngineUnavailableError("recovering", delta.error, RETRY_AFTER_SECONDS)
            return to_api_error(unavailable)
        case "poison":
            return to_api_error(PoisonRequestError(delta.error))
        case _:
            return ApiError(500, delta.error or "generation failed", code="generation_failed")
