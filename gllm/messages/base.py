"""Base class and field types of all messages."""

from typing import Annotated, ClassVar, Self

import msgspec
from msgspec import Meta

TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""A 64-bit signed integer; msgpack alone would accept unsigned ones too."""


class WireMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of all messages between processes; the encoded type is the class name."""

    is_fenced: ClassVar[bool] = True
    """True if receivers drop the message once the pipeline has restarted since it was sent (in
    another epoch); False for messages about a process."""


class TotalsMessage(WireMessage, frozen=True):
    """Base class of counters: of one process since its last report, or sums of such reports."""

    def __add__(self, other: Self) -> Self:
        """Return the sums."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return type(self)(*(one + more for one, more in zip(mine, theirs, strict=True)))


class ProcessMessage(WireMessage, frozen=True):
    """Base class of messages about a process, which stay valid across restarts of the pipeline."""

    is_fenced: ClassVar[bool] = False
