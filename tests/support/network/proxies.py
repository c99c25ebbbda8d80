"""A proxy between two processes, which forwards, freezes, resets or refuses connections."""

import random
import select
import socket
import threading
from contextlib import suppress


class Proxy:
    """Forwards connections to a port until `close`; `cut` loses all that is under way."""

    def __init__(self, target: int, port: int = 0) -> None:
        self._target = target
        self._listening = _bind(port)
        self.port: int = self._listening.getsockname()[1]
        self.address = f"127.0.0.1:{self.port}"
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self.is_frozen = False
        self.num_connections = 0
        self.captured = bytearray(), bytearray()
        """Bytes from the dialing end and from the accepting one, if `is_capturing`."""
        self.is_capturing = False
        self.accept()

    def accept(self) -> None:
        """Accept connections, also after `refuse`."""
        self._listening.listen()
        threading.Thread(target=self._accept, args=(self._listening,), daemon=True).start()

    def refuse(self) -> None:
        """Reset all connections and refuse new ones until `accept`; the port stays reserved."""
        self.close()
        self._listening = _bind(self.port)

    def reset(self) -> None:
        """Reset all connections: bytes that are under way are lost."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for each in pair:
                with suppress(OSError):
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                    each.shutdown(socket.SHUT_RD)
                    each.close()

    def close(self) -> None:
        # The thread that accepts would keep the socket open.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.reset()

    def _accept(self, listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client = listening.accept()[0]
                server = socket.create_connection(("127.0.0.1", self._target))
                self.num_connections += 1
                with self._lock:
                    self._pairs.append((client, server))
                threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        peers, order = {client: server, server: client}, random.Random(0)
        with suppress(OSError, ValueError):
            # Not select.select, which refuses descriptors from 1024.
            waiting, ends = select.poll(), {end.fileno(): end for end in peers}
            for end in peers:
                waiting.register(end, select.POLLIN)
            while True:
                for descriptor, _ in waiting.poll(500):
                    ready = ends[descriptor]
                    while self.is_frozen:
                        threading.Event().wait(0.01)
                    # Cuts fall anywhere within a frame.
                    data = ready.recv(order.choice([1, 100, 10_000, 65_536]))
                    if not data:
                        raise OSError("closed")
                    if self.is_capturing:
                        self.captured[ready is server].extend(data)
                    peers[ready].sendall(data)
        with suppress(OSError):
            client.close()
            server.close()


def _bind(port: int) -> socket.socket:
    """Return a socket with a port, or with any for 0, whose connections are refused so far."""
    bound = socket.socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.bind(("127.0.0.1", port))
    return bound
