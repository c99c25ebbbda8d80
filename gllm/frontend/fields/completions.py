"""The fields of POST /v1/completions.

Owns the schema and the forms a prompt may have. Knows nothing of the answer.
"""

from typing import Annotated, Any, ClassVar

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_LOGPROBS
from gllm.frontend.fields.base import Int32, Int64, NonNegativeInt, doc
from gllm.frontend.fields.generation import BaseCompletionFields

DEFAULT_MAX_TOKENS = 16
"""max_tokens of a completions request that names none."""


IDS = {"type": "array", "minItems": 1, "items": {"type": "integer"}}
PROMPTS: dict[str, Any] = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "items": {"type": "string"}},
        IDS,
        {"type": "array", "minItems": 1, "items": IDS},
    ]
}
"""The JSON Schema of what `parse_prompts` reads."""


class CompletionFields(BaseCompletionFields):
    """POST /v1/completions."""

    required_fields: ClassVar[tuple[str, ...]] = ("prompt",)

    prompt: Annotated[
        Any,
        doc("a string, a list of strings, token ids, or a list of token ids' lists", **PROMPTS),
    ] = None
    max_tokens: Annotated[
        NonNegativeInt | None, doc("most tokens of a choice; default 16; 0 only with echo")
    ] = None
    logprobs: Annotated[
        Int64 | None,
        doc(
            "0..20 likeliest tokens at each place; with echo of the prompt too",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    echo: Annotated[bool | None, doc("put the prompt before the text")] = None

    def validate(self) -> None:
        """Raises FieldError for fields that do not go together."""
        super().validate()
        if self.parse_special is False:
            why = "parse_special is false, but in a prompt special tokens always are control tokens"
            raise FieldError("parse_special", f"{why}: use chat completions")

    @property
    def generates(self) -> bool:
        """Whether any output is asked for."""
        return self.max_completion_tokens is not None or self.max_tokens != 0


def parse_prompts(prompt: object, most: int, param: str = "prompt") -> list[str] | list[list[int]]:
    """The prompts of a request, all of one kind; `param` is their field. Raises FieldError."""
    rule = (
        f"{param} has to be a string, a list of strings, token ids, or a list of token ids' lists"
    )
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FieldError(param, rule)
    if type(prompt[0]) is int:
        prompt = [prompt]
    if len(prompt) > most:
        raise FieldError(param, f"{param} has {len(prompt)} prompts, at most {most} are allowed")
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        return msgspec.convert(prompt, list[list[Int32]])
    except msgspec.ValidationError as error:
        raise FieldError(param, f"{rule}: {error}") from error
