"""Request fields for structured output: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from typing import Any, Literal

import msgspec

from gllm.config.sampling import StructuredOutput
from gllm.options.field_types import FieldError


class JsonSchemaFormat(msgspec.Struct):
    """`json_schema` of a response format."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """The output always matches the schema; `strict` also forbids properties that it does not list
    in objects without any."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """OpenAI's field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's field `structured_outputs`: exactly one member is set."""

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
    """Return the constraint on the output, or None if there is none.

    Args:
        response_format: OpenAI's field.
        structured_outputs: vLLM's field.
        grammar: llama.cpp's field.
        json_schema: llama.cpp's field.

    Raises:
        FieldError: A value is invalid, or more than one field sets a constraint.
    """
    constraints: list[StructuredOutput] = []
    if response_format is not None:
        constraint = _parse_response_format(response_format)
        constraints += [] if constraint is None else [constraint]
    if (fields := structured_outputs) is not None:
        choice = None if fields.choice is None else tuple(fields.choice)
        constraints.append(
            StructuredOutput(
                fields.json, fields.regex, choice, fields.grammar, "structured_outputs"
            )
        )
    if grammar:
        constraints.append(StructuredOutput(grammar=grammar, param="grammar"))
    if json_schema is not None:
        constraints.append(StructuredOutput(json=json_schema, param="json_schema"))
    if len(constraints) > 1:
        first, second = (constraint.param for constraint in constraints[:2])
        raise FieldError(second, f"{second} is not allowed together with {first}")
    return constraints[0] if constraints else None


def _parse_response_format(response_format: ResponseFormat) -> StructuredOutput | None:
    """Return the constraint of a response format. Raises FieldError."""
    json_schema = response_format.json_schema
    schema = None if json_schema is None else json_schema.schema
    if response_format.type == "json_schema" and schema is None:
        message = "response_format.json_schema.schema is missing, but type json_schema requires it"
        raise FieldError("response_format", message)
    if response_format.type != "json_schema" and schema is not None:
        message = (
            f"response_format.json_schema.schema is not allowed with type {response_format.type}: "
            "use type json_schema"
        )
        raise FieldError("response_format", message)
    if response_format.type == "text":
        return None
    if json_schema is None or schema is None:
        return StructuredOutput(json={"type": "object"}, param="response_format")
    strict = bool(json_schema.strict)
    return StructuredOutput(json=schema, param="response_format", strict=strict)
