"""What a request may ask its output to be, in OpenAI's shape and in vLLM's.

Owns both shapes and the way from them to a StructuredOutput. Knows nothing of grammars.
"""

from typing import Any, Literal

import msgspec

from gllm.config.field_types import FieldError
from gllm.config.sampling import StructuredOutput


class JsonSchema(msgspec.Struct):
    """A JSON Schema with its name."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """A schema is always kept to; `strict` closes objects that list no properties as well."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's shape."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's shape: exactly one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def parse_structured_output(
    response_format: ResponseFormat | None,
    structured_outputs: StructuredOutputs | None,
    grammar: str | None = None,
    json_schema: dict[str, Any] | None = None,
) -> StructuredOutput | None:
    """Return the form that the output must have, None for any.

    `grammar` and `json_schema` are llama.cpp's fields. Raises FieldError where two fields ask for a
    form.
    """
    required: list[StructuredOutput] = []
    if response_format is not None and (of_format := _of_format(response_format)) is not None:
        required.append(of_format)
    if (own := structured_outputs) is not None:
        choice = None if own.choice is None else tuple(own.choice)
        required.append(
            StructuredOutput(own.json, own.regex, choice, own.grammar, "structured_outputs")
        )
    if grammar:
        required.append(StructuredOutput(grammar=grammar, param="grammar"))
    if json_schema is not None:
        required.append(StructuredOutput(json=json_schema, param="json_schema"))
    if len(required) > 1:
        first, second = (each.param for each in required[:2])
        raise FieldError(second, f"{second} does not go with {first}")
    return required[0] if required else None


def _of_format(asked: ResponseFormat) -> StructuredOutput | None:
    given = None if asked.json_schema is None else asked.json_schema.schema
    if (asked.type == "json_schema") != (given is not None):
        raise FieldError(
            "response_format",
            "response_format needs json_schema.schema with type json_schema, and only there",
        )
    if asked.type == "text":
        return None
    if asked.json_schema is None or given is None:
        return StructuredOutput(json={"type": "object"}, param="response_format")
    strict = bool(asked.json_schema.strict)
    return StructuredOutput(json=given, param="response_format", strict=strict)
