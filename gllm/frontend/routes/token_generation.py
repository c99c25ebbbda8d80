"""POST /inference/v1/generate: token ids in, token ids out."""

from typing import cast

from aiohttp import web
from msgspec import UNSET

from gllm.engine.interface import OutputDelta
from gllm.engine.request_checks import check_request
from gllm.frontend.answer import send_answer
from gllm.frontend.answer_writer import AnswerWriter
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.generation import to_sampling_params
from gllm.frontend.fields.parsing import read_fields, rename_error_fields, run_off_loop
from gllm.frontend.fields.token_generation import (
    CLIENT_FIELD_NAMES,
    GenerateFields,
    convert_to_completion,
)
from gllm.frontend.logprobs import chat_logprobs, prompt_logprobs
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.response_schemas import (
    FinishReason,
    GeneratedTokens,
    GenerateEvent,
    GenerateResponse,
)
from gllm.frontend.sse import DONE, ServerSentEvent
from gllm.messages.sampling import TokenLogprobs
from gllm.text.tokenizer import Tokenizer


async def generate_tokens(request: web.Request) -> web.StreamResponse:
    """Generate the continuation of token ids as token ids, in the format of vLLM."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, GenerateFields)
    context.check_model(fields.model)
    token_ids, model = fields.token_ids, context.engine.model
    assert token_ids is not None  # `token_ids` is required.
    completion = await run_off_loop(request, convert_to_completion, fields)
    with rename_error_fields(CLIENT_FIELD_NAMES):
        params = to_sampling_params(
            completion,
            model.defaults,
            context.config.max_choices,
            max_tokens=completion.max_tokens,
            logprobs=completion.logprobs,
            prompt_logprobs=completion.prompt_logprobs,
        )
        check_request(token_ids, params, model)
        with context.admit():
            prepared = PreparedRequest(completion, [token_ids], params)
            request_id = completion.request_id or request[REQUEST_ID]
            writer = TokenWriter(context.engine.tokenizer, prepared, request_id)
            return await send_answer(request, context, prepared, writer)


class TokenWriter(AnswerWriter):
    """AnswerWriter of token ids: choices without text."""

    def __init__(self, tokenizer: Tokenizer, request: PreparedRequest, request_id: str) -> None:
        options = request.fields.stream_options
        self._tokenizer = tokenizer
        self._request_id = request_id
        self._num_top_logprobs = request.params.logprobs
        """Number of most likely tokens to return per output token; None: no log-probabilities."""
        self._num_prompt_logprobs = request.params.prompt_logprobs
        """The same for prompt tokens."""
        self._usage_at_end = options is not None and bool(options.include_usage)
        self._usage_always = options is not None and bool(options.continuous_usage_stats)

    def delta_events(self, delta: OutputDelta, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the event of a delta, if it has tokens or the finish reason."""
        if not delta.token_ids and delta.finish_reason is None:
            return []
        choice = self._choice(delta.index, delta.token_ids, delta.logprobs, delta.finish_reason)
        event = GenerateEvent(self._request_id, [choice])
        if self._usage_always:
            event.usage = usage.to_openai()
        return [ServerSentEvent(event)]

    def end_events(self, usage: UsageCounter) -> list[ServerSentEvent]:
        """Return the token counts and the fields of a hand-off, if any, and the stream's end."""
        if self.transfer_params is UNSET and not self._usage_at_end:
            return [DONE]
        event = GenerateEvent(self._request_id, [], self.transfer_params)
        if self._usage_at_end:
            event.usage = usage.to_openai()
        return [ServerSentEvent(event), DONE]

    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> GenerateResponse:
        """Return the whole answer."""
        top = self._num_prompt_logprobs
        prompt = None
        if top is not None:
            prompt = prompt_logprobs(self._tokenizer, choices[0].prompt_logprobs, top)
        return GenerateResponse(
            request_id=self._request_id,
            choices=[
                self._choice(c.index, c.token_ids, c.logprobs, c.finish_reason) for c in choices
            ],
            prompt_logprobs=prompt,
            kv_transfer_params=None if self.transfer_params is UNSET else self.transfer_params,
            usage=usage.to_openai(),
        )

    def _choice(
        self,
        index: int,
        token_ids: list[int],
        entries: list[TokenLogprobs],
        finish_reason: str | None,
    ) -> GeneratedTokens:
        top, logprobs = self._num_top_logprobs, None
        if top is not None:
            logprobs = chat_logprobs(self._tokenizer, entries, top)
        return GeneratedTokens(
            index, logprobs, cast("FinishReason | None", finish_reason), token_ids
        )
