"""Standard streams that cannot end a process: closed ones, full disks, pipes without a reader."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO, cast


class TolerantStream:
    """Text stream that drops what cannot be written; everything else is the wrapped stream's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text, or drop it; return its length."""
        # ValueError: the stream was closed.
        with suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered, or drop it."""
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_standard_streams() -> None:
    """Open standard streams that are closed to the null device, and never fail to write to stderr.

    Otherwise the next file or socket of the process has the number of a standard stream, which
    this process and its children write to.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # It gets the lowest free number, which is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    if not isinstance(sys.stderr, TolerantStream):
        sys.stderr = cast(TextIO, TolerantStream(sys.stderr))
