"""POST /inference/v1/generate: token ids in, token ids out."""

from typing import cast

from aiohttp import web

from gllm.engine.interface import OutputDelta
from gllm.engine.request_checks import check_request
from gllm.frontend import response_schemas as schemas
from gllm.frontend.answer import send_answer
from gllm.frontend.choice_writer import ChoiceWriter
from gllm.frontend.choices import CollectedChoice
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.fields.base import JsonObject
from gllm.frontend.fields.generation import to_sampling_params
from gllm.frontend.fields.parsing import read_fields, rename_error_fields, run_off_loop
from gllm.frontend.fields.token_generation import (
    CLIENT_FIELD_NAMES,
    GenerateFields,
    convert_to_completion,
)
from gllm.frontend.logprobs import chat_logprobs, prompt_logprobs
from gllm.frontend.request_run import PreparedRequest
from gllm.text.tokenizer import Tokenizer


async def generate_tokens(request: web.Request) -> web.StreamResponse:
    """Generate the continuation of a prompt; prompt and output are token ids, as in vLLM."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, GenerateFields)
    context.check_model(fields.model)
    token_ids, model = fields.token_ids, context.engine.model
    assert token_ids is not None  # `token_ids` is required.
    completion = await run_off_loop(request, convert_to_completion, fields)
    with rename_error_fields(CLIENT_FIELD_NAMES):
        params = to_sampling_params(completion, context, logprobs=completion.logprobs)
        check_request(token_ids, params, model)
        with context.admit():
            prepared = PreparedRequest(completion, [token_ids], params)
            choice_format = TokenChoiceFormat(context.engine.tokenizer, prepared)
            envelope = {"request_id": completion.request_id or request[REQUEST_ID]}
            writer = ChoiceWriter(prepared, choice_format, envelope)
            return await send_answer(request, prepared, writer)


class TokenChoiceFormat:
    """Formats the choices of /inference/v1/generate: token ids without text.

    Args:
        tokenizer: The model's tokenizer, for log-probabilities.
        request: The prepared request.
    """

    chunk_type = schemas.GenerateEvent
    is_plain_text = False

    def __init__(self, tokenizer: Tokenizer, request: PreparedRequest) -> None:
        self._tokenizer = tokenizer
        self._num_top_logprobs = request.params.logprobs
        """Number of most likely tokens to return per output token; None: no log-probabilities."""
        self._num_prompt_logprobs = request.params.prompt_logprobs
        """The same for prompt tokens."""

    def start_choices(self, index: int) -> list[schemas.GeneratedTokens]:
        """Return no choices: a stream starts with tokens."""
        return []

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[schemas.GeneratedTokens]:
        """Return a chunk choice with the delta's token ids, if it has any or a finish reason."""
        return [self._choice(delta)] if delta.token_ids or delta.finish_reason else []

    def build_answer(
        self,
        envelope: JsonObject,
        choices: list[CollectedChoice],
        usage: schemas.CompletionUsage,
        token_ids: bool,
    ) -> schemas.GenerateResponse:
        """Return the response of /inference/v1/generate, with log-probabilities of the prompt."""
        top, prompt = self._num_prompt_logprobs, None
        if top is not None:
            prompt = prompt_logprobs(self._tokenizer, choices[0].prompt_logprobs, top)
        return schemas.GenerateResponse(
            **envelope,
            choices=[self._choice(choice) for choice in choices],
            prompt_logprobs=prompt,
            kv_transfer_params=None,
            usage=usage,
        )

    def _choice(self, output: OutputDelta | CollectedChoice) -> schemas.GeneratedTokens:
        top, logprobs = self._num_top_logprobs, None
        if top is not None:
            logprobs = chat_logprobs(self._tokenizer, output.logprobs, top)
        reason = cast("schemas.FinishReason | None", output.finish_reason)
        return schemas.GeneratedTokens(output.index, logprobs, reason, output.token_ids)
