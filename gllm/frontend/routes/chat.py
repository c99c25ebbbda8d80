"""POST /v1/chat/completions.

Owns the endpoint's shape. Knows nothing of how answers are streamed.
"""

import asyncio

import msgspec
from aiohttp import web

from gllm.config import FieldError
from gllm.engine_api import Delta, check_request, truncated
from gllm.frontend.answer import Job, Json, answer
from gllm.frontend.collect import Choice
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields import (
    ChatFields,
    TemplateOptions,
    chat_top_logprobs,
    read_fields,
    sampling_params,
)
from gllm.frontend.logprobs import chat_logprobs, prompt_logprobs
from gllm.text.tokenizer import Tokenizer


async def create(request: web.Request) -> web.StreamResponse:
    """An assistant's answer to the messages."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ChatFields)
    context.check_model(fields.model)
    model, tokenizer = context.engine.model, context.engine.tokenizer
    params = sampling_params(
        fields,
        model.defaults,
        context.config.max_choices,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        logprobs=chat_top_logprobs(fields),
        prompt_logprobs=fields.prompt_logprobs,
    )
    with context.admit():
        prompt = await asyncio.to_thread(_prompt, tokenizer, fields)
        prompt = truncated(prompt, params, model)
        check_request(prompt, params, model, param="messages")
        shape = ChatShape(tokenizer, params.logprobs, params.prompt_logprobs)
        return await answer(request, context, Job(fields, [prompt], params), shape)


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
    """Choices as messages and their increments.

    top, prompt_top: how many likeliest tokens are told with each token of the output and of the
    prompt, None for no log-probabilities.
    """

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, top: int | None, prompt_top: int | None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._prompt_top = prompt_top

    def opening(self, index: int) -> list[Json]:
        """The role comes first, with an empty text."""
        return [_piece(index, {"role": "assistant", "content": ""}, None)]

    def pieces(self, delta: Delta, token_ids: bool) -> list[Json]:
        """Text, then the end, each by itself; what belongs to tokens goes with the first."""
        ids = {"token_ids": delta.token_ids} if token_ids else {}
        logprobs = self._logprobs(delta)
        pieces = []
        tells = ids.get("token_ids") or logprobs
        if delta.text or (tells and delta.finish_reason is None):
            pieces.append({**_piece(delta.index, {"content": delta.text}, logprobs), **ids})
            ids, logprobs = {"token_ids": []} if token_ids else {}, None
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            pieces.append({**_piece(delta.index, {}, logprobs), **end, **ids})
        return pieces

    def whole(self, choice: Choice) -> Json:
        """A message."""
        return {
            "index": choice.index,
            "message": {"role": "assistant", "content": choice.text},
            "logprobs": self._logprobs(choice),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }

    def besides(self, choices: list[Choice]) -> Json:
        """The prompt's log-probabilities."""
        if self._prompt_top is None:
            return {}
        entries = choices[0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, entries, self._prompt_top)}

    def _logprobs(self, part: Delta | Choice) -> Json | None:
        if self._top is None or not part.logprobs:
            return None
        return chat_logprobs(self._tokenizer, part.logprobs, self._top)


def _piece(index: int, delta: Json, logprobs: Json | None) -> Json:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
