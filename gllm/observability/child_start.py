"""Start of a child process: signals that are its parent's, and its exit status if imports fail.

It imports almost nothing, because worker processes import it first.
"""

import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

IMPORT_ERROR_STATUS = 78
"""Exit status of a process whose modules cannot be imported, so that a restart cannot help."""


@contextmanager
def exit_on_import_error() -> Iterator[None]:
    """End the process with IMPORT_ERROR_STATUS and a traceback if an import in the block fails.

    The parent gives up at the first start: another process would fail in the same way.
    """
    try:
        yield
    except ImportError:
        traceback.print_exc()
        sys.exit(IMPORT_ERROR_STATUS)


def leave_signals_to_parent() -> None:
    """Ignore SIGINT and SIGTERM, which a terminal or a cluster manager sends to all processes.

    The parent drains while its children serve, and ends them; they end with it if it dies.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
