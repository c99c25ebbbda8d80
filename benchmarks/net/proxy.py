"""TCP proxies with the faults of networks, where network namespaces are not allowed."""

import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

CHUNK_BYTES = 16 * 1024
"""Largest piece that a proxy reads at once."""
MAX_CHUNKS = 64
"""Chunks under way per direction beyond which a proxy does not read."""
POLL_SECONDS = 0.01
"""Interval at which the end of a cut is looked for."""
RESET = struct.pack("ii", 1, 0)
"""Value of SO_LINGER with which close() sends a reset."""


class ProxyHop:
    """Faults of one machine's connection, for all proxies that pass it."""

    def __init__(self) -> None:
        self.bits_per_second = 0.0
        self.delay_seconds = 0.0
        self.is_cut = False
        self.corrupt_probability = 0.0
        self._free_at = 0.0
        """Time until which the hop transmits."""
        self._proxies: list[TcpProxy] = []
        self._lock = threading.Lock()

    def set_rate(self, bits_per_second: float) -> None:
        """Limit all connections together, both directions; 0 for no limit."""
        self.bits_per_second = bits_per_second

    def set_delay(self, seconds: float) -> None:
        """Set the one-way delay."""
        self.delay_seconds = seconds

    def set_corruption(self, probability: float) -> None:
        """Flip a bit of a chunk with this probability."""
        self.corrupt_probability = probability

    def cut(self) -> None:
        """Forward nothing from now on, and close nothing: a black hole."""
        self.is_cut = True

    def restore(self) -> None:
        """End a cut: connections go on where they were."""
        self.is_cut = False

    def reset(self) -> None:
        """End all connections by TCP resets."""
        for proxy in self._proxies:
            proxy.reset()

    def add(self, proxy: "TcpProxy") -> None:
        """Let a proxy's connections end with each `reset`."""
        self._proxies.append(proxy)

    def arrival(self, num_bytes: int, now: float) -> float:
        """Return the time at which a chunk that is sent now has passed the hop."""
        with self._lock:
            begin = max(now, self._free_at)
            seconds = 8 * num_bytes / self.bits_per_second if self.bits_per_second else 0.0
            self._free_at = begin + seconds
            return self._free_at + self.delay_seconds


class TcpProxy:
    """A port whose connections are forwarded to a target through hops.

    Each direction of a connection has a thread that reads and one that writes. They are in the
    network namespace of the thread that creates the proxy.

    Args:
        target: host and port.
        hops: faults of the connections.
        host: address that is bound.
    """

    def __init__(
        self, target: tuple[str, int], hops: Sequence[ProxyHop] = (), host: str = "127.0.0.1"
    ) -> None:
        self._target = target
        self._hops = hops
        self._random = random.Random(0)
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self._sockets: list[socket.socket] = []
        for hop in hops:
            hop.add(self)
        threading.Thread(target=self._accept, name="tcp-proxy", daemon=True).start()

    def reset(self) -> None:
        """End all connections by TCP resets."""
        sockets, self._sockets = self._sockets, []
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                # Wakes the threads that read and write; close() alone does not.
                each.shutdown(socket.SHUT_RD)
            each.close()

    def close(self) -> None:
        """End all connections and accept no more."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        self._wait_for_restore()
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self.num_connections += 1
        self._sockets += [client, server]
        for source, target in ((client, server), (server, client)):
            chunks: queue.Queue[tuple[float, bytes]] = queue.Queue(MAX_CHUNKS)
            for action, end in ((self._read, source), (self._write, target)):
                threading.Thread(target=action, args=(end, chunks), daemon=True).start()

    def _read(self, source: socket.socket, chunks: "queue.Queue[tuple[float, bytes]]") -> None:
        """Put chunks with the time of their arrival; an empty one for the end of the stream."""
        data = b"x"
        while data:
            try:
                data = source.recv(CHUNK_BYTES)
            except OSError:
                data = b""
            due = time.monotonic()
            for hop in self._hops:
                due = max(due, hop.arrival(len(data), due))
            chunks.put((due, self._corrupt(data)))

    def _write(self, target: socket.socket, chunks: "queue.Queue[tuple[float, bytes]]") -> None:
        with suppress(OSError):
            while True:
                due, data = chunks.get()
                time.sleep(max(0.0, due - time.monotonic()))
                self._wait_for_restore()
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
        # Drain, so that the thread that reads does not wait for ever.
        while chunks.get()[1]:
            pass

    def _wait_for_restore(self) -> None:
        while any(hop.is_cut for hop in self._hops):
            time.sleep(POLL_SECONDS)

    def _corrupt(self, data: bytes) -> bytes:
        probability = max((hop.corrupt_probability for hop in self._hops), default=0.0)
        if not data or self._random.random() >= probability:
            return data
        changed = bytearray(data)
        changed[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)
        return bytes(changed)
