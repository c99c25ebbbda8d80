"""Start of a child process: signals that are its parent's, and its exit status if imports fail.

It imports almost nothing, because worker processes import it first.
"""

import signal

IMPORT_ERROR_STATUS = 78
"""Exit status of a process whose modules cannot be imported, so that a restart cannot help."""


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which a terminal or a cluster manager sends to all processes.

    The parent drains while its children serve, and ends them; they end with it if it dies.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
