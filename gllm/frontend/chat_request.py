"""Prepare chat requests for the engine, for every endpoint with messages."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec

from gllm.engine.chat import PreparedChat, prepare_chat
from gllm.frontend.context import ServerContext
from gllm.frontend.fields.chat import ChatCompletionFields, ChatTemplateOptions
from gllm.frontend.fields.generation import to_sampling_params
from gllm.frontend.handoffs.legs import HandoffLeg
from gllm.frontend.request_run import PreparedRequest
from gllm.text.chat.output_parser import create_reasoning_counter_factory
from gllm.text.chat.request import ChatRequest
from gllm.text.chat.tools import ToolOptions, parse_functions, parse_tools


async def prepare_chat_request(
    context: ServerContext, fields: ChatCompletionFields, handoff: HandoffLeg | None = None
) -> PreparedRequest:
    """Return a chat, rendered and checked, ready for the engine. Raises FieldError."""
    model, tokenizer = context.engine.model, context.engine.tokenizer
    params = to_sampling_params(
        fields,
        model.defaults,
        context.config.max_choices,
        max_tokens=fields.max_completion_tokens or fields.max_tokens,
        logprobs=fields.num_top_logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )

    def prepare() -> PreparedChat:
        parsers = context.config.output_parsers
        return prepare_chat(chat_request(fields), params, model, tokenizer, parsers)

    # Long prompts and large schemas take time: not on the event loop.
    chat = await asyncio.to_thread(prepare)
    return PreparedRequest(
        fields,
        [chat.token_ids],
        chat.params if handoff is None else handoff.limit(chat.params),
        output_format=chat.output_format,
        new_reasoning_counter=create_reasoning_counter_factory(tokenizer, chat.output_format),
        handoff=handoff,
    )


def chat_request(fields: ChatCompletionFields) -> ChatRequest:
    """Return the chat that the fields of a request describe. Raises FieldError."""
    variables: dict[str, Any] = msgspec.to_builtins(
        fields.chat_template_kwargs or ChatTemplateOptions()
    )
    return ChatRequest(
        messages=fields.messages,
        tool_options=_tool_options(fields),
        template_variables=variables,
        reasoning_effort=fields.reasoning_effort,
        add_generation_prompt=fields.add_generation_prompt is not False,
        continue_final_message=fields.should_continue_final_message,
        parse_special=bool(fields.parse_special),
    )


def _tool_options(fields: ChatCompletionFields) -> ToolOptions:
    """Return the tools and the choice among them. Raises FieldError."""
    if fields.functions or fields.function_call not in (None, "none", "auto"):
        return parse_functions(fields.functions, fields.function_call)
    use = parse_tools(fields.tools, fields.tool_choice)
    return replace(use, is_single_call=fields.parallel_tool_calls is False)
