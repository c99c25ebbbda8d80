"""What every request body has: fields that are honoured, that do nothing, that are refused.

Owns the base of the schemas and the number types they share. Knows nothing of any one endpoint.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from gllm.config.options import INT32_MAX

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT32_MAX)]


def about(text: str, **schema: object) -> Meta:
    """Return what a field does, for those who read the API's pages.

    schema: what its JSON Schema says beyond the type, as `minimum=0`. It is not checked here: the
    code that uses the field checks it, with an error of its own.
    """
    return Meta(description=text, extra_json_schema=schema or None)


class Refused(msgspec.Struct, frozen=True):
    """A known field that is not implemented."""

    why: str
    """Ends a sentence that begins with the field's name."""
    off: tuple[object, ...] = ()
    """Values, besides null, that ask for nothing."""


class Body(msgspec.Struct):
    """A request body. None stands for a field that is unset, as null is.

    A field's description is what docs/api.md and /openapi.json say of it.
    """

    inert: ClassVar[Mapping[str, str]] = {}
    """Fields that are accepted without effect, whatever they hold, and what they are for."""
    required: ClassVar[tuple[str, ...]] = ()
    """Fields that have to be given."""
    required_one_of: ClassVar[tuple[str, ...]] = ()
    """Fields of which one has to be given."""
    refused: ClassVar[Mapping[str, Refused]] = {}
    """Those that a schema has itself are not refused by it."""

    def check(self) -> None:
        """Raises FieldError for fields that do not go together."""


class ModelBody(Body):
    """A request body that may name the model."""

    model: Annotated[str | None, about("the served model's name; another one is 404")] = None
