"""ZeroMQ contexts that never outlive their owner.

A context whose sockets are open waits for them for ever when it is terminated. Garbage collection
terminates contexts, and it may have lost sight of the sockets by then.
"""

import os
import weakref
from typing import Any

import zmq


class OwnedContext(zmq.Context[zmq.Socket[bytes]]):
    """Context that closes its sockets without lingering once its owner is garbage.

    Unlike zmq.Context it keeps its open sockets alive, so that it can close them.
    """

    _open_sockets: set[zmq.Socket[bytes]] | None = None
    """Sockets that have not been closed."""

    def _add_socket(self, socket: Any) -> None:
        super()._add_socket(socket)
        if self._open_sockets is None:
            self._open_sockets = set()
        self._open_sockets.add(socket)

    def _rm_socket(self, socket: Any) -> None:
        super()._rm_socket(socket)
        if self._open_sockets is not None:
            self._open_sockets.discard(socket)


def create_context(owner: object) -> OwnedContext:
    """Create a context that is destroyed with its owner, if the owner has not closed it.

    Args:
        owner: object that no socket of the context refers to.
    """
    # With one I/O thread, events of connections arrive in order.
    context = OwnedContext(1)
    # Not at exit, where other threads may still use it and nothing waits for it.
    weakref.finalize(owner, _destroy, context, os.getpid()).atexit = False
    return context


def _destroy(context: OwnedContext, process: int) -> None:
    """Close all sockets and terminate the context, unless this process is a fork of its own."""
    if os.getpid() == process:
        context.destroy(linger=0)
