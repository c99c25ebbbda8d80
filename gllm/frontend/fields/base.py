"""Base classes of request bodies: supported, ignored and unsupported fields."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gllm.options.options import INT32_MAX

JsonObject = dict[str, Any]
Warn = Callable[[str], object]
"""Function that gets a warning for the client: a part of the request that has no effect."""
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)]
PositiveInt = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NonNegativeInt = Annotated[int, Meta(ge=0, le=INT32_MAX)]


def doc(text: str, **schema: object) -> Meta:
    """Return msgspec metadata with a field's description, for docs/api.md and /openapi.json.

    Args:
        text: The description.
        **schema: JSON Schema keywords that the type does not imply, such as `minimum=0`. They are
            not checked here: the code that uses the field raises its own error.
    """
    return Meta(description=text, extra_json_schema=schema or None)


class UnsupportedField(msgspec.Struct, frozen=True):
    """A request field of another API that is rejected: reason, and values accepted without effect.

    The APIs are those of OpenAI, Anthropic, vLLM and llama.cpp.
    """

    reason: str
    """Rest of a sentence that starts with the field's name, for the error message."""
    accepted_values: tuple[object, ...] = ()
    """Values that are accepted without effect, such as defaults; null is always accepted."""


class RequestFields(msgspec.Struct):
    """Base class of request bodies in JSON. A field that is absent or null is None."""

    ignored_fields: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted with any value and have no effect, with their purpose in other
    servers."""
    required_fields: ClassVar[tuple[str, ...]] = ()
    """Fields that have to be present. `parse_fields` checks it."""
    required_any_of: ClassVar[tuple[str, ...]] = ()
    """Fields of which at least one is required; `validate` checks it."""
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {}
    """Fields that are rejected. A subclass that declares one of them as a field accepts it."""

    def validate(self) -> None:
        """Check rules that involve several fields. Raises FieldError."""


class ModelRequestFields(RequestFields):
    """Fields of request bodies that name the served model."""

    model: Annotated[
        str | None, doc("name of the served model; any other name is answered with 404")
    ] = None

    @property
    def refers_to_stored(self) -> bool:
        """True if the prompt includes stored items, so that it is longer than the body shows."""
        return False
