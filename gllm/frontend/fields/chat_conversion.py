"""Convert fields of other chat APIs to those of chat completions, and the names in errors back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.generation import SamplingFields
from gllm.frontend.fields.parsing import parse_fields
from gllm.options.field_types import FieldError


def to_chat_fields(
    fields: object, values: Mapping[str, Any], names: Mapping[str, str]
) -> ChatCompletionFields:
    """Return fields of chat completions.

    Args:
        fields: Fields of the other API, from which the sampling fields are copied.
        values: Converted values of the other fields of chat completions.
        names: Map from fields of chat completions to the client's fields, for errors.

    Raises:
        FieldError: A value is invalid; the error names the client's field.
    """
    sampling = {name: getattr(fields, name, None) for name in SamplingFields.__struct_fields__}
    present = {name: value for name, value in {**sampling, **values}.items() if value is not None}
    with rename_error_fields(names):
        return parse_fields(present, ChatCompletionFields)


@contextmanager
def rename_error_fields(names: Mapping[str, str]) -> Iterator[None]:
    """Convert errors of fields of chat completions to errors of the client's fields.

    Args:
        names: Map from fields of chat completions to the client's fields.
    """
    try:
        yield
    except FieldError as error:
        name = names.get(error.param, error.param)
        if name != error.param:
            error.args = (f"{name}: {error}",)
            error.param = name
        raise
