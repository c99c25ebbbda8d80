"""Request fields of POST /v1/chat/completions, POST /tokenize and POST /detokenize."""

from typing import Annotated, Any, ClassVar

from gllm.frontend.fields.base import Int32, Int64, ModelRequestFields, doc
from gllm.frontend.fields.generation import BaseCompletionFields
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_LOGPROBS
from gllm.text.chat.prompt import ReasoningEffort

TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}],
}
"""JSON Schema of `tools`. `gllm.text.chat.tools` validates the value."""

TOOL_CHOICE_SCHEMA: dict[str, Any] = {
    "anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]
}
"""JSON Schema of `tool_choice`. `gllm.text.chat.tools` validates the value."""


class ChatCompletionFields(BaseCompletionFields):
    """Request body of POST /v1/chat/completions."""

    required_fields: ClassVar[tuple[str, ...]] = ("messages",)

    messages: Annotated[
        Any,
        doc(
            "messages of the chat, each with role and content; content is a string or a list of "
            "text parts",
            type="array",
            minItems=1,
            items={"type": "object", "required": ["role"]},
        ),
    ] = None
    """The chat template's renderer validates the value."""
    add_generation_prompt: Annotated[
        bool | None, doc("end the prompt with the start of the assistant's message; default true")
    ] = None
    continue_final_message: Annotated[
        bool | None,
        doc(
            "continue the last message, which is the assistant's: its content, or its reasoning if "
            "the content is null"
        ),
    ] = None
    tools: Annotated[
        Any,
        doc(
            "up to 128 tools that the model may call, of type function (name, description, "
            "parameters, strict) or custom, whose input is text (name, description, format)",
            **TOOLS_SCHEMA,
        ),
    ] = None
    tool_choice: Annotated[
        Any,
        doc(
            "`none`: no tools; `auto` (default with tools): the model decides; `required`: the "
            "model calls a tool; a tool by name: the model calls it; allowed_tools: a mode and the "
            "tools that the model may call",
            **TOOL_CHOICE_SCHEMA,
        ),
    ] = None
    parallel_tool_calls: Annotated[
        bool | None,
        doc("false: at most one tool call, enforced if tool_choice requires a call"),
    ] = None
    functions: Annotated[
        Any, doc("older form of tools: up to 128 functions; the answer has function_call")
    ] = None
    function_call: Annotated[
        Any, doc("older form of tool_choice: none, auto, or a function by name")
    ] = None
    reasoning_effort: Annotated[
        ReasoningEffort | None,
        doc(
            "amount of reasoning, if the chat template has a variable for it; none and minimal "
            "disable reasoning; no effect on models that do not reason"
        ),
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        doc("variables of the chat template by name, such as enable_thinking or documents"),
    ] = None
    logprobs: Annotated[bool | None, doc("return log-probabilities of the output tokens")] = None
    top_logprobs: Annotated[
        Int64 | None,
        doc(
            "in [0, 20]: number of most likely tokens to return per position; requires logprobs",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None

    def validate(self) -> None:
        """Check rules that involve several fields. Raises FieldError."""
        super().validate()
        num_top_logprobs = self.top_logprobs or 0
        if not 0 <= num_top_logprobs <= MAX_LOGPROBS:
            message = f"top_logprobs is {num_top_logprobs}, but has to be in [0, {MAX_LOGPROBS}]"
            raise FieldError("top_logprobs", message)
        if num_top_logprobs and not self.logprobs:
            raise FieldError("top_logprobs", "top_logprobs is only allowed with logprobs true")
        if self.functions and self.tools:
            raise FieldError("functions", "functions is not allowed together with tools: use tools")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message is not allowed with add_generation_prompt true"
            raise FieldError("continue_final_message", message)


SAME_AS_CHAT = "as in chat completions"


class TokenizeFields(ModelRequestFields):
    """Request body of POST /tokenize: a text, or the messages of a chat."""

    required_any_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    prompt: Annotated[str | None, doc("text; exclusive with messages")] = None
    add_special_tokens: Annotated[
        bool | None,
        doc("add the special tokens that start a prompt; default true; only with prompt"),
    ] = None
    messages: Annotated[
        Any, doc("messages of a chat, as in chat completions; exclusive with prompt")
    ] = None
    add_generation_prompt: Annotated[bool | None, doc(SAME_AS_CHAT)] = None
    continue_final_message: Annotated[bool | None, doc(SAME_AS_CHAT)] = None
    tools: Annotated[Any, doc(SAME_AS_CHAT)] = None
    tool_choice: Annotated[Any, doc(SAME_AS_CHAT)] = None
    functions: Annotated[Any, doc(SAME_AS_CHAT)] = None
    function_call: Annotated[Any, doc(SAME_AS_CHAT)] = None
    reasoning_effort: Annotated[ReasoningEffort | None, doc(SAME_AS_CHAT)] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, doc(SAME_AS_CHAT)] = None
    parse_special: Annotated[
        bool | None,
        doc(f"{SAME_AS_CHAT}; special tokens of a prompt are always control tokens"),
    ] = None
    return_token_strs: Annotated[bool | None, doc("return token_strs, the text of each token")] = (
        None
    )

    def to_chat_completion(self) -> ChatCompletionFields:
        """Return the fields of the chat completion that has the same prompt."""
        shared = set(self.__struct_fields__).intersection(ChatCompletionFields.__struct_fields__)
        return ChatCompletionFields(**{name: getattr(self, name) for name in shared})

    def validate(self) -> None:
        """Check rules that involve several fields. Raises FieldError."""
        self.to_chat_completion().validate()
        if self.prompt is None and self.messages is None:
            raise FieldError("prompt", "prompt is missing: prompt or messages is required")
        if self.prompt is not None and self.messages is not None:
            raise FieldError("messages", "messages is not allowed together with prompt")


class DetokenizeFields(ModelRequestFields):
    """Request body of POST /detokenize: token ids."""

    required_fields: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: Annotated[list[Int32] | None, doc("token ids")] = None
