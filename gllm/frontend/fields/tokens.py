"""Request fields of POST /tokenize and POST /detokenize."""

from typing import Annotated, Any, ClassVar

from gllm.frontend.fields.base import Int32, ModelRequestFields, doc
from gllm.frontend.fields.chat import ChatCompletionFields, ChatTemplateOptions
from gllm.options.field_types import FieldError
from gllm.text.chat.prompt import ReasoningEffort

SAME_AS_CHAT = "as in chat completions"


class TokenizeFields(ModelRequestFields):
    """POST /tokenize."""

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
    chat_template_kwargs: Annotated[ChatTemplateOptions | None, doc(SAME_AS_CHAT)] = None
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
    """POST /detokenize."""

    required_fields: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: Annotated[list[Int32] | None, doc("token ids")] = None
