"""From chat messages to a job: what every endpoint with messages does before it answers.

Owns the rendering of messages into a prompt. Knows nothing of the endpoints' shapes.
"""

import asyncio

import msgspec

from gllm.config import FieldError
from gllm.engine_api import check_request, truncated
from gllm.frontend.answer import Job
from gllm.frontend.context import Context
from gllm.frontend.fields.chat import ChatFields, TemplateOptions
from gllm.frontend.fields.generation import sampling_params
from gllm.frontend.fields.tokens import TokenizeFields
from gllm.text.tokenizer import Tokenizer


async def chat_job(context: Context, fields: ChatFields) -> Job:
    """The job of a chat. Raises FieldError."""
    model, tokenizer = context.engine.model, context.engine.tokenizer
    params = sampling_params(
        fields,
        model.defaults,
        context.config.max_choices,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        logprobs=fields.top,
        prompt_logprobs=fields.prompt_logprobs,
    )
    prompt = await asyncio.to_thread(chat_prompt, tokenizer, fields)
    prompt = truncated(prompt, params, model)
    check_request(prompt, params, model, param="messages")
    return Job(fields, [prompt], params)


def chat_prompt(tokenizer: Tokenizer, fields: ChatFields | TokenizeFields) -> list[int]:
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
