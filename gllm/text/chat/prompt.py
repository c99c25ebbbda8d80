"""Render a chat request into token ids and select the parsers of its output."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import msgspec

from gllm.config.output_parsers import OutputParserConfig
from gllm.options.field_types import FieldError
from gllm.text.chat.messages import get_content_text
from gllm.text.chat.template import ChatTemplate, continues_reasoning
from gllm.text.chat.tools import ToolOptions
from gllm.text.output.parser import OutputFormat
from gllm.text.output.reasoning import ReasoningTags
from gllm.text.output.registry import (
    find_channel_format,
    select_reasoning_tags,
    select_tool_call_format,
)
from gllm.text.output.tool_calls import ToolCallFormat
from gllm.text.special_tokens import MarkedText, new_mark
from gllm.text.tokenizer import Tokenizer

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Values of `reasoning_effort`, from OpenAI's and Anthropic's APIs."""
REASONING_CONTROLS = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables of chat templates that control reasoning."""


RESERVED_VARIABLES = {"messages", "tools", "add_generation_prompt"}
"""Variables of chat templates that other fields of a request set."""
BOOLEAN_VARIABLES = {"enable_thinking", "thinking"}
"""Variables of chat templates that turn reasoning on and off."""


@dataclass(frozen=True)
class ChatRequest:
    """Messages, tools and chat template options of a chat request.

    Attributes:
        messages: The conversation; `gllm.text.chat.messages` checks it.
        tool_options: Tools and tool choice.
        template_variables: Variables of the chat template; they override `reasoning_effort`.
        reasoning_effort: How much to reason, if the chat template has a variable for it.
        add_generation_prompt: End the prompt with the header of an assistant message.
        continue_final_message: Let the output continue the last message, which is the assistant's.
        parse_special: Special tokens spelled in messages and tools are control tokens, not text.

    Raises:
        FieldError: `reasoning_effort` or `template_variables` is invalid.
    """

    messages: Any
    tool_options: ToolOptions = field(default_factory=ToolOptions)
    template_variables: Mapping[str, Any] = field(default_factory=dict)
    reasoning_effort: ReasoningEffort | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    parse_special: bool = False

    def __post_init__(self) -> None:
        efforts = get_args(ReasoningEffort)
        if self.reasoning_effort is not None and self.reasoning_effort not in efforts:
            raise FieldError(
                "reasoning_effort", f"reasoning_effort must be one of {', '.join(efforts)}"
            )
        try:
            msgspec.convert(self.template_variables, dict[str, Any])
        except msgspec.ValidationError:
            raise FieldError(
                "chat_template_kwargs", "chat_template_kwargs must be a mapping with string keys"
            ) from None
        for name in RESERVED_VARIABLES & set(self.template_variables):
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs has {name}, which the request itself sets: use its field",
            )
        for name in BOOLEAN_VARIABLES & set(self.template_variables):
            if not isinstance(self.template_variables[name], bool | None):
                raise FieldError(
                    "chat_template_kwargs", f"chat_template_kwargs.{name} must be true or false"
                )


@dataclass(frozen=True)
class ChatPrompt:
    """Prompt tokens of a chat, the format to parse the output with, and the template's source."""

    token_ids: list[int]
    output_format: OutputFormat
    template_source: str
    """Source of the chat template that rendered the prompt."""


def render_chat(
    tokenizer: Tokenizer,
    request: ChatRequest,
    parsers: OutputParserConfig,
    max_tokens: int | None = None,
) -> ChatPrompt:
    """Render a chat with the model's chat template and tokenize the result.

    Args:
        tokenizer: Tokenizer of the model, with its chat template.
        request: Messages, tools and template options.
        parsers: Names of the tool call and reasoning parsers.
        max_tokens: Largest number of prompt tokens; None for no limit.

    Raises:
        FieldError: The messages, tools or template variables are invalid for this model.
        TooManyTokensError: The prompt has more than `max_tokens` tokens.
    """
    template = tokenizer.chat_template
    if template is None:
        raise FieldError(
            "messages",
            "this model has no chat template: use /v1/completions or LLM.generate with a text",
        )
    if request.template_variables.get("documents") and "documents" not in template.variables:
        raise FieldError(
            "chat_template_kwargs",
            "chat_template_kwargs has documents, but the chat template of this model does not "
            "render them: put the texts into messages",
        )
    use = request.tool_options
    family = _tool_family(template, request, parsers.tool_call_parser) if use.tools else None
    mark = "" if request.parse_special else new_mark()
    text = template.render(
        _mark_special_tokens(tokenizer, request.messages, mark),
        add_generation_prompt=request.add_generation_prompt and not request.continue_final_message,
        options=_mark_variables(
            tokenizer,
            request.template_variables
            if request.reasoning_effort is None
            else _template_variables(template, request, request.reasoning_effort),
            mark,
        ),
        tools=_mark_special_tokens(tokenizer, list(use.tools), mark),
        continue_final=request.continue_final_message,
        as_searchable=partial(MarkedText, marker=tokenizer.special_token_marker, mark=mark)
        if mark
        else str,
    )
    tags = select_reasoning_tags(parsers.reasoning_parser, template.source)
    shown = text.replace(mark, "") if mark else text
    within = tags is not None and _starts_in_reasoning(tags, shown, request)
    output_format = OutputFormat(
        tags,
        within,
        family or find_channel_format(tags),
        # Without a parser of calls, none of a format with channels is a call.
        use.schemas if family is not None else {},
        use.custom_tools,
        use.only_listed_tools or family is None,
        continues_reasoning=within and request.continue_final_message,
    )
    token_ids = tokenizer.encode_chat(text, mark, max_tokens)
    return ChatPrompt(token_ids, output_format, template.source)


def _mark_special_tokens(tokenizer: Tokenizer, values: Any, mark: str) -> Any:
    """Return values of a request with a mark inside each special token, which makes it text."""
    if not mark:
        return values
    try:
        return tokenizer.special_token_marker.mark_values(values, mark)
    except RecursionError:
        raise FieldError("messages", "messages are nested too deeply") from None


def _mark_variables(
    tokenizer: Tokenizer, variables: Mapping[str, Any], mark: str
) -> Mapping[str, Any]:
    """Return template variables with a mark inside each special token of their texts.

    The ends of a text are not marked: templates compare it.
    """
    marked = {}
    for name, value in variables.items():
        if mark and isinstance(value, str):
            marked[name] = tokenizer.special_token_marker.mark_inside(value, mark)
        else:
            marked[name] = _mark_special_tokens(tokenizer, value, mark)
    return marked


def _starts_in_reasoning(tags: ReasoningTags, prompt: str, request: ChatRequest) -> bool:
    """Return whether the output begins inside a reasoning section that the prompt has opened."""
    if request.continue_final_message:
        last = request.messages[-1]
        is_open = tags.are_open_in(get_content_text(last.get("content")) or "")
        return is_open or continues_reasoning(last)
    return tags.are_opened_by(prompt)


def _tool_family(
    template: ChatTemplate, request: ChatRequest, parser: str
) -> ToolCallFormat | None:
    """Return the format of the calls of a request with tools, None if the parser is `none`.

    Raises:
        FieldError: The model has no tool support, or the requested tool choice needs a parser.
    """
    if not template.supports_tools:
        raise FieldError("tools", "the chat template of this model does not support tools")
    family = select_tool_call_format(parser, template.source, template.model_type)
    if family is None and parser == "auto":
        raise FieldError(
            "tools",
            "the tool call format of this model is unknown: set the option --tool-call-parser "
            "(tool_call_parser)",
        )
    if family is None and request.tool_options.choice == "required":
        raise FieldError(
            "tool_choice",
            "tool_choice requires a tool call, but the option --tool-call-parser is none",
        )
    return family


def _template_variables(
    template: ChatTemplate, request: ChatRequest, effort: ReasoningEffort
) -> Mapping[str, Any]:
    """Return the template variables that a request with `reasoning_effort` sets.

    It is passed to a template that has it, and becomes `enable_thinking` or
    `thinking` in one that has those. A template without a choice ignores it, because default
    clients send it to every model. Only `none` for a model that always reasons is an error.

    Raises:
        FieldError: `reasoning_effort` is `none`, but the model always reasons.
    """
    tags = select_reasoning_tags("auto", template.source)
    efforts = None if tags is None else tags.efforts
    values = {
        "reasoning_effort": effort if efforts is None else efforts.get(effort),
        "enable_thinking": effort not in ("none", "minimal"),
        "thinking": effort not in ("none", "minimal"),
    }
    known = {
        name: value
        for name, value in values.items()
        if name in template.variables and value is not None
    }
    if not known and effort == "none" and tags is not None:
        raise FieldError(
            "reasoning_effort",
            "reasoning_effort is none, but this model always reasons: omit the field",
        )
    return {**known, **request.template_variables}
