"""POST /v1/completions.

Owns the endpoint's shape. Knows nothing of how answers are streamed.
"""

import asyncio

from aiohttp import web

from gllm.config import FieldError
from gllm.engine_api import Delta, check_request
from gllm.frontend.answer import Job, Json, answer
from gllm.frontend.collect import Choice
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields import (
    COMPLETION_TOKENS,
    MAX_PROMPTS,
    CompletionFields,
    parse_prompts,
    read_fields,
    sampling_params,
)
from gllm.text.tokenizer import Tokenizer


async def create(request: web.Request) -> web.StreamResponse:
    """What follows the prompts."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, CompletionFields)
    context.check_model(fields.model)
    config, model = context.config, context.engine.model
    params = sampling_params(fields, model.defaults, config.max_choices, COMPLETION_TOKENS)
    texts = parse_prompts(fields.prompt, min(MAX_PROMPTS, config.max_num_queued_requests))
    most = max(MAX_PROMPTS, config.max_choices)
    if len(texts) * params.n > most:
        raise FieldError("n", f"{len(texts)} prompts with n {params.n} are more than {most}")
    with context.admit(len(texts)):
        prompts = await asyncio.to_thread(_token_ids, context.engine.tokenizer, texts)
        for prompt in prompts:
            check_request(prompt, params, model)
        return await answer(request, context, Job(fields, prompts, params), CompletionShape())


def _token_ids(tokenizer: Tokenizer, prompts: list[str] | list[list[int]]) -> list[list[int]]:
    """Token ids of prompts that may be given as such."""
    return [tokenizer.encode(p) if isinstance(p, str) else p for p in prompts]


class CompletionShape:
    """Choices as text and its increments."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def opening(self, index: int) -> list[Json]:
        """Nothing comes before the text."""
        return []

    def pieces(self, delta: Delta, token_ids: bool) -> list[Json]:
        """Text and end together."""
        ids = {"token_ids": delta.token_ids} if token_ids else {}
        if not delta.text and not ids.get("token_ids") and delta.finish_reason is None:
            return []
        piece = _choice(delta.index, delta.text, delta.finish_reason, delta.stop_reason)
        return [{**piece, **ids}]

    def whole(self, choice: Choice) -> Json:
        """A text."""
        return _choice(choice.index, choice.text, choice.finish_reason, choice.stop_reason)


def _choice(index: int, text: str, reason: str | None, stop: int | str | None) -> Json:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": reason,
        "stop_reason": stop,
    }
