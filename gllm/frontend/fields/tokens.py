"""The fields of POST /tokenize and POST /detokenize.

Owns the schemas. Knows nothing of tokenizers.
"""

from typing import Annotated, Any, ClassVar

from gllm.config.field_types import FieldError
from gllm.frontend.fields.base import Int32, ModelRequestFields, doc
from gllm.frontend.fields.chat import PROMPT_FIELDS, ChatCompletionFields, ChatTemplateOptions
from gllm.text.chat.request import ReasoningEffort


class TokenizeFields(ModelRequestFields):
    """POST /tokenize."""

    required_any_of: ClassVar[tuple[str, ...]] = ("prompt", "messages")

    prompt: Annotated[str | None, doc("a text; or else messages")] = None
    add_special_tokens: Annotated[
        bool | None, doc("those that begin a completion's prompt; default true; only with prompt")
    ] = None
    messages: Annotated[Any, doc("a chat, as chat completions take it; or else prompt")] = None
    add_generation_prompt: Annotated[bool | None, doc("as of chat completions")] = None
    continue_final_message: Annotated[bool | None, doc("as of chat completions")] = None
    tools: Annotated[Any, doc("as of chat completions")] = None
    tool_choice: Annotated[Any, doc("as of chat completions")] = None
    functions: Annotated[Any, doc("as of chat completions")] = None
    function_call: Annotated[Any, doc("as of chat completions")] = None
    reasoning_effort: Annotated[ReasoningEffort | None, doc("as of chat completions")] = None
    chat_template_kwargs: Annotated[ChatTemplateOptions | None, doc("as of chat completions")] = (
        None
    )
    parse_special: Annotated[
        bool | None,
        doc("as of chat completions; of a prompt special tokens always are control tokens"),
    ] = None
    return_token_strs: Annotated[bool | None, doc("token_strs: each token by itself")] = None

    @property
    def chat(self) -> ChatCompletionFields:
        """What chat completions would be asked for this prompt."""
        return ChatCompletionFields(**{name: getattr(self, name) for name in PROMPT_FIELDS})

    def validate(self) -> None:
        """Raises FieldError unless there is one thing to tokenize."""
        self.chat.validate()
        if self.prompt is None and self.messages is None:
            raise FieldError("prompt", "prompt or messages has to be given")
        if self.prompt is not None and self.messages is not None:
            raise FieldError("messages", "messages cannot be given together with prompt")


class DetokenizeFields(ModelRequestFields):
    """POST /detokenize."""

    required_fields: ClassVar[tuple[str, ...]] = ("tokens",)

    tokens: Annotated[list[Int32] | None, doc("token ids")] = None
