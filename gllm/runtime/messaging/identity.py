"""Names of engines and numbers of their starts."""

import os
import secrets
import socket

MAX_NAME_LENGTH = 200
"""Most characters of the name of an engine or router."""


def new_run() -> int:
    """Return a random number for this start of a process."""
    return secrets.randbits(62)


def is_valid_name(name: str) -> bool:
    """Return True if a name of an engine or router may be shown in logs and metrics."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def default_engine_name() -> str:
    """Return a name that no other living engine has: that of the host, and the process id."""
    return f"{socket.gethostname()}-{os.getpid()}"
