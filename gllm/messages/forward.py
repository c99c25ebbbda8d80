"""Decoding of messages that a later version sends, whose named tuples may have further fields.

msgspec ignores further fields of structs, but rejects longer named tuples.
"""

from typing import Any, Generic, TypeVar

import msgspec
from msgspec import inspect

T = TypeVar("T")


class ForwardDecoder(Generic[T]):
    """Decoder that ignores the fields it does not know, in structs and in named tuples."""

    def __init__(self, kind: Any) -> None:
        """Create the decoder of a message type or a union of them."""
        self._kind = kind
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._info = inspect.type_info(kind)

    def decode(self, payload: bytes) -> T:
        """Decode a message.

        Raises:
            msgspec.DecodeError: the payload is no message of the type, whatever is ignored.
        """
        try:
            return self._decoder.decode(payload)
        except msgspec.ValidationError as error:
            fields = _trim(msgspec.msgpack.decode(payload), self._info)
            try:
                message: T = msgspec.convert(fields, self._kind)
            except msgspec.ValidationError:
                raise error from None
            return message


def _trim(value: Any, info: inspect.Type) -> Any:
    """Return a decoded value without the fields of named tuples that its type does not have."""
    if not isinstance(value, list):
        return value
    match info:
        case inspect.UnionType(types=types):
            return _trim(value, _choose(value, types))
        case inspect.StructType(fields=fields, tag=tag):
            first = [] if tag is None else [value[0]]
            rest = value[len(first) :]
            # Further fields of structs are ignored by msgspec.
            return first + [_trim(v, f.type) for v, f in zip(rest, fields, strict=False)]
        case inspect.NamedTupleType(fields=fields):
            return [_trim(v, f.type) for v, f in zip(value, fields, strict=False)]
        case inspect.ListType(item_type=item):
            return [_trim(item_type, item) for item_type in value]
    return value


def _choose(value: list[Any], types: tuple[inspect.Type, ...]) -> inspect.Type:
    """Return the member of a union that a list is: the struct of its tag, or the only other one."""
    tag = value[0] if value else None
    for info in types:
        if isinstance(info, inspect.StructType) and info.tag is not None:
            if info.tag == tag:
                return info
        elif not isinstance(info, inspect.NoneType):
            return info
    return inspect.AnyType()
