"""Copies of named tuples, such as headers of frames, with other values."""

from typing import Any, TypeVar

Record = TypeVar("Record")


def replaced(record: Record, **changes: Any) -> Record:
    """Return a copy of a named tuple with some fields changed."""
    kind = type(record)
    fields = {name: getattr(record, name) for name in kind.__annotations__}
    return kind(**fields | changes)
