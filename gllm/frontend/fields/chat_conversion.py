"""From the fields of other APIs to those of chat completions.

Owns the way between the names, there and, for errors, back. Knows nothing of what the fields do.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gllm.config.field_types import FieldError
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.generation import SamplingFields
from gllm.frontend.fields.parsing import parse_fields


def to_chat_fields(
    fields: object, values: Mapping[str, Any], names: Mapping[str, str]
) -> ChatCompletionFields:
    """Fields of chat completions: those of all endpoints that `fields` has, and `values`.

    names: what the client calls a field of chat completions. Raises FieldError by those names.
    """
    shared = {name: getattr(fields, name, None) for name in SamplingFields.__struct_fields__}
    given = {name: value for name, value in {**shared, **values}.items() if value is not None}
    with named(names):
        return parse_fields(given, ChatCompletionFields)


@contextmanager
def named(names: Mapping[str, str]) -> Iterator[None]:
    """Errors in a field of chat completions become errors in the client's field."""
    try:
        yield
    except FieldError as error:
        name = names.get(error.param, error.param)
        if name != error.param:
            error.args = (f"{name}: {error}",)
            error.param = name
        raise
