"""From chat messages to a job: what every endpoint with messages does before it answers.

Owns the rendering of messages into a prompt, and what the answer may hold. Knows nothing of the
endpoints' shapes.
"""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.server import ServerConfig
from gllm.engine.interface import check_request, prompt_limit, truncated
from gllm.frontend.context import Context
from gllm.frontend.demand import demand
from gllm.frontend.fields.chat import ChatFields, TemplateOptions
from gllm.frontend.fields.generation import sampling_params
from gllm.frontend.output import reasoning_counter
from gllm.frontend.run import Job
from gllm.text.chat_messages import text_of
from gllm.text.chat_template import ChatTemplate
from gllm.text.output.calls import ToolFamily
from gllm.text.output.parser import OutputFormat
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.registry import reasoning_tags, tool_family
from gllm.text.special_tokens import new_mark
from gllm.text.tokenizer import Tokenizer
from gllm.text.tools import ToolUse, function_use, tool_use


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
    with prompt_limit("messages", model):
        most = None if params.truncate_prompt_tokens is not None else model.max_model_len - 1
        made = await asyncio.to_thread(chat_prompt, tokenizer, fields, context.config, most)
    prompt = truncated(made.ids, params, model)
    check_request(prompt, params, model, param="messages")
    structured, form = params.structured, made.output
    if structured is not None or made.tools.choice == "required":
        # Schemas may be large: they are not walked through on the event loop.
        structured, form = await asyncio.to_thread(
            demand, structured, made.tools, form, made.template, tokenizer.token_id
        )
    params = replace(params, shown_tokens=form.markers, structured=structured)
    return Job(fields, [prompt], params, output=form, reasoning=reasoning_counter(tokenizer, form))


@dataclass(frozen=True)
class ChatPrompt:
    """What a chat asks of the model."""

    ids: list[int]
    tools: ToolUse
    output: OutputFormat
    """What the answer may hold."""
    template: str
    """The source of the model's template."""


def chat_prompt(
    tokenizer: Tokenizer, fields: ChatFields, config: ServerConfig, max_tokens: int | None = None
) -> ChatPrompt:
    """The prompt of the messages. Raises FieldError, TooManyTokens."""
    template = tokenizer.chat_template
    if template is None:
        raise FieldError("messages", "this model has no chat template: use /v1/completions")
    use = _tool_use(fields)
    family = _family(template, use, config)
    mark = "" if fields.parse_special else new_mark()
    text = template.render(
        _marked(tokenizer, fields.messages, mark),
        add_generation_prompt=not fields.continues and fields.add_generation_prompt is not False,
        options=template_variables(template, fields),
        tools=_marked(tokenizer, list(use.tools), mark),
        continue_final=fields.continues,
    )
    tags = reasoning_tags(config.reasoning_parser, template.source)
    within = tags is not None and _within(tags, text.replace(mark, "") if mark else text, fields)
    form = OutputFormat(tags, within, family, use.schemas, use.custom, use.is_restricted)
    ids = tokenizer.encode_chat(text, mark, max_tokens)
    return ChatPrompt(ids, use, form, template.source)


def _marked(tokenizer: Tokenizer, values: Any, mark: str) -> Any:
    """Values of a request with a mark in each special token, which are plain text then."""
    if not mark:
        return values
    try:
        return tokenizer.special_tokens.mark_all(values, mark)
    except RecursionError:
        raise FieldError("messages", "messages are nested too deep") from None


def _tool_use(fields: ChatFields) -> ToolUse:
    """Read the tools and the choice among them. Raises FieldError."""
    if fields.functions or fields.function_call not in (None, "none", "auto"):
        return function_use(fields.functions, fields.function_call)
    use = tool_use(fields.tools, fields.tool_choice)
    return replace(use, is_single=fields.parallel_tool_calls is False)


def _within(tags: ReasoningTags, prompt: str, fields: ChatFields) -> bool:
    """Whether the output begins in the middle of reasoning."""
    if fields.continues:
        return tags.left_within(text_of(fields.messages[-1]["content"]) or "")
    return tags.left_open(prompt)


def _family(template: ChatTemplate, use: ToolUse, config: ServerConfig) -> ToolFamily | None:
    """How the model writes calls of the tools. Raises FieldError."""
    if not use.tools:
        return None
    if not template.takes_tools:
        raise FieldError("tools", "this model's chat template has no place for tools")
    choice = config.tool_call_parser
    family = tool_family(choice, template.source, template.model_type)
    if family is None and choice == "auto":
        raise FieldError(
            "tools",
            "it is not known how this model writes tool calls: the server has to be started with "
            "--tool-call-parser",
        )
    if family is None and use.choice == "required":
        raise FieldError(
            "tool_choice",
            "tool_choice demands a call, but this server was told to look for none",
        )
    return family


def template_variables(template: ChatTemplate, fields: ChatFields) -> dict[str, Any]:
    """What a request sets of a template's variables. Raises FieldError.

    `reasoning_effort` is passed to a template that has it, and becomes `enable_thinking` or
    `thinking` in one that has those. A template without a choice ignores it, because default
    clients send it to every model. Only `none` for a model that always reasons is refused.
    """
    variables = msgspec.to_builtins(fields.chat_template_kwargs or TemplateOptions())
    effort = fields.reasoning_effort
    if effort is None:
        return variables
    values = {
        "reasoning_effort": effort,
        "enable_thinking": effort not in ("none", "minimal"),
        "thinking": effort not in ("none", "minimal"),
    }
    known = {name: value for name, value in values.items() if name in template.variables}
    if not known and effort == "none" and reasoning_tags("auto", template.source):
        raise FieldError(
            "reasoning_effort",
            "reasoning_effort is none, but this model always reasons: leave it out",
        )
    return {**known, **variables}
