"""POST /v1/chat/completions.

Owns the endpoint's shape. Knows nothing of how answers are streamed.
"""

import asyncio

import msgspec
from aiohttp import web

from gllm.config import FieldError
from gllm.engine_api import Delta, check_request
from gllm.frontend.answer import Job, Json, answer
from gllm.frontend.collect import Choice
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields import ChatFields, TemplateOptions, read_fields, sampling_params
from gllm.text.tokenizer import Tokenizer


async def create(request: web.Request) -> web.StreamResponse:
    """An assistant's answer to the messages."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ChatFields)
    context.check_model(fields.model)
    model = context.engine.model
    params = sampling_params(fields, model.defaults, context.config.max_choices, max_tokens=None)
    with context.admit():
        prompt = await asyncio.to_thread(_prompt, context.engine.tokenizer, fields)
        check_request(prompt, params, model, param="messages")
        return await answer(request, context, Job(fields, [prompt], params), ChatShape())


def _prompt(tokenizer: Tokenizer, fields: ChatFields) -> list[int]:
    """Token ids of the messages. Raises FieldError."""
    if tokenizer.chat_template is None:
        raise FieldError("messages", "this model has no chat template: use /v1/completions")
    options = fields.chat_template_kwargs or TemplateOptions()
    text = tokenizer.chat_template.render(
        fields.messages,
        add_generation_prompt=fields.add_generation_prompt is not False,
        options=msgspec.to_builtins(options),
    )
    return tokenizer.encode(text, add_special_tokens=False)


class ChatShape:
    """Choices as messages and their increments."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> list[Json]:
        """The role comes first, with an empty text."""
        return [_piece(index, {"role": "assistant", "content": ""})]

    def pieces(self, delta: Delta, token_ids: bool) -> list[Json]:
        """Text, then the end, each by itself."""
        ids = {"token_ids": delta.token_ids} if token_ids else {}
        pieces = []
        if delta.text or (ids and delta.token_ids and delta.finish_reason is None):
            pieces.append({**_piece(delta.index, {"content": delta.text}), **ids})
            ids = {"token_ids": []} if token_ids else {}
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            pieces.append({**_piece(delta.index, {}), **end, **ids})
        return pieces

    def whole(self, choice: Choice) -> Json:
        """A message."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }


def _piece(index: int, delta: Json) -> Json:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
