"""Packets on a device of a namespace, recorded as one file of payloads."""

import socket
import threading
from pathlib import Path
from typing import Self

from benchmarks.net.namespaces import inside

ALL_PROTOCOLS = 3
"""ETH_P_ALL."""
SNAP_BYTES = 65536
BUFFER_BYTES = 64 * 2**20
"""Kernel buffer of the capture, so that no packet is missed while the thread waits."""
SO_RCVBUFFORCE = 33
"""Option that sets the buffer beyond the system's limit."""
SOL_PACKET = 263
PACKET_STATISTICS = 6


class Capture:
    """Record all packets that pass a device, both directions, from construction to `close`.

    Payloads of TCP segments are written to the file one after the other, by connection order of
    arrival; headers are left out, so that runs of bytes across segments stay whole where packets
    of one connection follow each other.
    """

    def __init__(self, namespace: str, device: str, path: Path) -> None:
        with inside(namespace):
            self._socket = socket.socket(
                socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(ALL_PROTOCOLS)
            )
            self._socket.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
            self._socket.bind((device, ALL_PROTOCOLS))
        self._socket.settimeout(0.1)
        self._path = path
        self._has_ended = threading.Event()
        self.num_packets = 0
        self._payloads: dict[bytes, bytearray] = {}
        self._thread = threading.Thread(target=self._run, name="capture", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> bytes:
        """End the capture; return and write the payloads, connection by connection.

        Raises:
            RuntimeError: packets were missed.
        """
        if not self._has_ended.is_set():
            self._has_ended.set()
            self._thread.join()
            statistics = self._socket.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8)
            self._socket.close()
            self._path.write_bytes(b"".join(self._payloads.values()))
            if num_missed := int.from_bytes(statistics[4:], "little"):
                raise RuntimeError(f"the capture missed {num_missed} packets")
        return self._path.read_bytes()

    def _run(self) -> None:
        while True:
            try:
                packet = self._socket.recv(SNAP_BYTES)
            except TimeoutError:
                if self._has_ended.is_set():
                    return
                continue
            self.num_packets += 1
            connection, payload = split_packet(packet)
            self._payloads.setdefault(connection, bytearray()).extend(payload)


def split_packet(packet: bytes) -> tuple[bytes, bytes]:
    """Return addresses and ports, and the payload, of an IPv4 packet; others stay whole."""
    if len(packet) < 20 or packet[0] >> 4 != 4 or packet[9] != socket.IPPROTO_TCP:
        return b"", packet
    start = 4 * (packet[0] & 15)
    size = int.from_bytes(packet[2:4], "big")
    segment = packet[start:size]
    return packet[12:20] + segment[:4], segment[4 * (segment[12] >> 4) :]
