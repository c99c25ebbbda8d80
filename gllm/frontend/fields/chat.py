"""The fields of POST /v1/chat/completions.

Owns the schema and what needs no engine to be checked. Knows nothing of the answer.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_LOGPROBS
from gllm.frontend.fields.base import Int64, doc
from gllm.frontend.fields.generation import BaseCompletionFields
from gllm.text.chat.request import ReasoningEffort


class ChatTemplateOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: ReasoningEffort | None = None


TOOLS: dict[str, Any] = {
    "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}],
}
TOOL_CHOICE: dict[str, Any] = {"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]}
"""JSON Schemas of what `gllm.text.chat.tools` reads."""

PROMPT_FIELDS = (
    *("messages", "add_generation_prompt", "continue_final_message", "tools", "tool_choice"),
    *("functions", "function_call", "reasoning_effort", "chat_template_kwargs", "parse_special"),
)
"""Fields that say what the prompt is."""


class ChatCompletionFields(BaseCompletionFields):
    """POST /v1/chat/completions."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages",)

    messages: Annotated[
        Any,
        doc(
            "the chat so far: role and content each; content is text or parts of text",
            type="array",
            minItems=1,
            items={"type": "object", "required": ["role"]},
        ),
    ] = None
    """Checked by the chat template."""
    add_generation_prompt: Annotated[
        bool | None, doc("begin the assistant's answer; default true")
    ] = None
    continue_final_message: Annotated[
        bool | None, doc("go on with the last message, which is the assistant's")
    ] = None
    tools: Annotated[
        Any,
        doc(
            "up to 128 tools the model may call, of type function: name, description, parameters, "
            "strict; or of type custom, whose input is text: name, description, format",
            **TOOLS,
        ),
    ] = None
    tool_choice: Annotated[
        Any,
        doc(
            "`none`: as if there were no tools; `auto` (default with tools): the model decides; "
            "`required`, or a tool by name: it has to call; allowed_tools: a mode and the tools "
            "that may be called",
            **TOOL_CHOICE,
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        doc("false: one call at most, which is enforced where tool_choice requires a call"),
    ] = None
    functions: Annotated[
        Any, doc("the older form of tools: up to 128 functions; the answer has function_call")
    ] = None
    function_call: Annotated[
        Any, doc("the older form of tool_choice: none, auto, or a function by name")
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        doc(
            "how much to reason, where the chat template has a choice; none, minimal: not at all; "
            "without effect on models that do not reason"
        ),
    ] = None
    chat_template_kwargs: Annotated[
        ChatTemplateOptions | None,
        doc("variables of the chat template: enable_thinking, thinking, reasoning_effort"),
    ] = None
    logprobs: Annotated[bool | None, doc("log-probabilities of the output's tokens")] = None
    top_logprobs: Annotated[
        Int64 | None,
        doc(
            "0..20 likeliest tokens at each place; only with logprobs",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None

    @property
    def top(self) -> int | None:
        """How many likeliest tokens are told, None for no log-probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def continues(self) -> bool:
        """Whether the last message is gone on with."""
        return bool(self.continue_final_message)

    def validate(self) -> None:
        """Raises FieldError for fields that do not go together."""
        super().validate()
        top = self.top_logprobs or 0
        if not 0 <= top <= MAX_LOGPROBS:
            raise FieldError("top_logprobs", f"top_logprobs is {top}, not in 0..{MAX_LOGPROBS}")
        if top and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is only allowed with logprobs")
        if self.functions and self.tools:
            raise FieldError("functions", "functions and tools exclude each other: use tools")
        if self.continues and self.add_generation_prompt:
            why = "continue_final_message and add_generation_prompt rule each other out"
            raise FieldError("continue_final_message", why)
