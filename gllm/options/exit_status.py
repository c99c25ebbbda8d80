"""Exit statuses of processes that could not start: for ever, or for now.

Managers such as systemd restart a process unless its status says that a restart cannot help.
"""

import errno
import socket

INVALID_STATUS = 2
"""Exit status of a process whose command line or model is invalid on its machine for ever."""
UNAVAILABLE_STATUS = 75
"""Exit status of a process that lacks something which may come: EX_TEMPFAIL of sysexits.h."""

PASSING_ERRORS = frozenset(
    {
        errno.EADDRINUSE,
        errno.EADDRNOTAVAIL,
        errno.EAGAIN,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.EMFILE,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENFILE,
        errno.ENODEV,
        errno.ENOMEM,
        errno.ENOSPC,
        errno.ETIMEDOUT,
    }
)
"""Error numbers of the system whose causes pass: addresses, networks and resources."""


class UnavailableError(ValueError):
    """Something outside of this process is not available yet, or not any more."""


def find_exit_status(error: BaseException) -> int:
    """Return the exit status of a process that an error ends before it serves.

    The errors that an error was raised from are searched for a cause that passes.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_passing = isinstance(cause, (UnavailableError, socket.gaierror, ConnectionError))
        # Errors of ZeroMQ have the numbers of the system, but are no OSError.
        if is_passing or getattr(cause, "errno", None) in PASSING_ERRORS:
            return UNAVAILABLE_STATUS
        cause = cause.__cause__
    return INVALID_STATUS
