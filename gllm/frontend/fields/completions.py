"""Request fields of POST /v1/completions and POST /v1/embeddings, and the forms of a prompt."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from gllm.frontend.fields.base import (
    Int32,
    Int64,
    ModelRequestFields,
    NonNegativeInt,
    PositiveInt,
    doc,
)
from gllm.frontend.fields.generation import BaseCompletionFields, CacheSaltField, Priority
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_LOGPROBS

DEFAULT_MAX_TOKENS = 16
"""`max_tokens` of a request without it, as in OpenAI's API."""

_TOKEN_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer"}}
PROMPT_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        _TOKEN_IDS_SCHEMA,
        {"type": "array", "minItems": 1, "items": _TOKEN_IDS_SCHEMA},
    ]
}
"""JSON Schema of the values that `parse_prompts` accepts."""

PROMPT_FORMS = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


class CompletionFields(BaseCompletionFields):
    """Request body of POST /v1/completions."""

    required_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[Any, doc(PROMPT_FORMS, **PROMPT_SCHEMA)] = None
    max_tokens: Annotated[
        NonNegativeInt | None,
        doc("maximum number of output tokens per choice; default 16; 0 requires echo"),
    ] = None
    logprobs: Annotated[
        Int64 | None,
        doc(
            "in [0, 20]: number of most likely tokens to return per position, including those of "
            "the prompt with echo",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    echo: Annotated[bool | None, doc("return the prompt in front of the text")] = None

    def validate(self) -> None:
        """Check rules that involve several fields. Raises FieldError."""
        super().validate()
        if self.parse_special is False:
            message = (
                "parse_special is false, but has to be true or absent: special tokens of a prompt "
                "are always control tokens; chat completions support false"
            )
            raise FieldError("parse_special", message)

    @property
    def has_output(self) -> bool:
        """True unless `max_tokens` is 0."""
        return self.max_completion_tokens is not None or self.max_tokens != 0


def parse_prompts(
    prompt: object, max_prompts: int, param: str = "prompt"
) -> list[str] | list[list[int]]:
    """Return the prompts of a completion or embedding request: texts, or lists of token ids.

    Args:
        prompt: Value of the field: a text, a list of texts, a list of token ids or a list of such
            lists.
        max_prompts: Maximum number of prompts.
        param: Name of the field, for errors.

    Raises:
        FieldError: The value has another form, or there are too many prompts.
    """
    rule = f"{param} has to be {PROMPT_FORMS}"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FieldError(param, f"{rule}, and not empty")
    if type(prompt[0]) is int:
        prompt = [prompt]
    if len(prompt) > max_prompts:
        message = f"{param} has {len(prompt)} prompts, but at most {max_prompts} are allowed"
        raise FieldError(param, message)
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        return msgspec.convert(prompt, list[list[Int32]])
    except msgspec.ValidationError as error:
        raise FieldError(param, f"{rule}: {error}") from error


class EmbeddingFields(ModelRequestFields):
    """Request body of POST /v1/embeddings."""

    required_fields: ClassVar[tuple[str, ...]] = ("input",)
    ignored_fields: ClassVar[Mapping[str, str]] = {"user": "identifies the end user"}

    input: Annotated[Any, doc(PROMPT_FORMS, **PROMPT_SCHEMA)] = None
    encoding_format: Annotated[
        Literal["float", "base64"] | None,
        doc("float (default): lists of numbers; base64: bytes of float32 numbers"),
    ] = None
    dimensions: Annotated[
        PositiveInt | None,
        doc("return this number of leading components, normalized to length 1"),
    ] = None
    priority: Priority = None
    cache_salt: CacheSaltField = None
