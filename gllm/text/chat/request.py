"""A chat request: messages and everything else that decides the prompt and the output format."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import msgspec

from gllm.options.field_types import FieldError
from gllm.text.chat.tools import ToolOptions

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""Values of `reasoning_effort`, from OpenAI's and Anthropic's APIs."""


@dataclass(frozen=True)
class ChatRequest:
    """Messages of a chat with its tools and the options of its prompt.

    Attributes:
        messages: The conversation; `gllm.text.chat.messages` checks it.
        tool_options: The tools and the choice among them.
        template_variables: Variables of the chat template; they override `reasoning_effort`.
        reasoning_effort: How much to reason, if the chat template has a variable for it.
        add_generation_prompt: End the prompt with the header of an assistant message.
        continue_final_message: Leave the last message, which is the assistant's, open.
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
