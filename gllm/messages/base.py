"""Base class and field types of all messages."""

from typing import Annotated, ClassVar

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


class ProcessMessage(WireMessage, frozen=True):
    """Base class of messages about a process, which stay valid across restarts of the pipeline."""

    is_fenced: ClassVar[bool] = False
