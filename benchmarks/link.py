"""Measure the data movers: activations between the rings of two machines over loopback TCP.

Two `gllm-link` processes, as on two machines, with TLS and without. One figure is the rate of large
steps, as of prefills, with the CPU time of both processes; the other is the round trip of small
ones, as of decodes. Beside them are the limits of this machine: copies in memory, and plain TCP
over loopback. Rounds with and without TLS alternate. Run as `python -m benchmarks.link`; it prints
the figures and writes them to a page of docs/benchmarks.
"""

import argparse
import asyncio
import multiprocessing
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.cpu.watch import cpu_seconds
from gllm.observability.latency import percentile
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.messaging.security import create_certificate
from gllm.sim.metrics.report import format_table
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import Edge, create_edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from gllm.transport.ring import Ring

RUN = 1
LAYOUT = EdgeLayout(slots=4, max_tokens=2048, hidden_size=3584, itemsize=2)
"""Ring of a model with hidden size 3,584 in bfloat16."""
SMALL_TOKENS = 1
"""Tokens of a small step."""
SMALL_HIDDEN_SIZE = 1792
"""Elements per token of a small step: 3.5 KB."""
WARM_UP_PINGS = 100
"""Round trips before those that count."""
TIMEOUT_SECONDS = 60.0


class LinkRound(NamedTuple):
    """Figures of one round."""

    bytes_per_second: float
    sender_cpu: float
    """CPU seconds of the sending process per GB."""
    receiver_cpu: float
    round_trips: list[float]
    """Seconds for a small step and its answer."""


class Machines:
    """Data movers of two machines, and edges between them."""

    def __init__(self, has_tls: bool) -> None:
        self._certificates = [create_certificate() if has_tls else None for _ in range(2)]
        self._edges: list[Edge] = []
        self._num_edges = 0
        self._opened: dict[int, asyncio.Event] = {}
        self.links = [
            LinkProcess(name, "127.0.0.1:0", certificate)
            for name, certificate in zip("ab", self._certificates, strict=True)
        ]
        for link in self.links:
            link.begin_run(RUN, self._on_opened, _on_lost)

    async def start(self) -> None:
        """Start both processes."""
        self._ports = [await link.listen() for link in self.links]

    async def connect(self, source: int, layout: EdgeLayout) -> tuple[Ring, Ring]:
        """Connect an edge from a machine to the other one; return both rings."""
        number, self._num_edges = self._num_edges, self._num_edges + 1
        opened = self._opened[number] = asyncio.Event()
        rings = []
        for machine in (source, 1 - source):
            edge = create_edge(f"benchmark-{number}-{machine}", is_remote=True)
            self._edges.append(edge)
            certificate = self._certificates[1 - machine]
            peer = LinkPeer(
                "ab"[1 - machine],
                f"127.0.0.1:{self._ports[1 - machine]}",
                certificate.certificate if certificate else b"",
            )
            is_sender = machine == source
            command = OpenLinkEdge(1, number, is_sender, is_sender, peer)
            self.links[machine].open(command, edge)
            rings.append(Ring(edge.descriptors[0], edge.descriptors[1], layout))
        await asyncio.wait_for(opened.wait(), TIMEOUT_SECONDS)
        return rings[0], rings[1]

    def cpu_seconds(self) -> list[float]:
        """Return the CPU seconds of both processes."""
        return [cpu_seconds([link.process.pid]) if link.process else 0.0 for link in self.links]

    def close(self) -> None:
        """End the processes."""
        for link in self.links:
            link.close()
        for edge in self._edges:
            edge.close()
        for certificate in self._certificates:
            if certificate is not None:
                certificate.close()

    def _on_opened(self, epoch: int, edge: int) -> None:
        self._opened[edge].set()


def _on_lost(epoch: int, edge: int, cause: str) -> None:
    raise RuntimeError(f"edge {edge} is lost: {cause}")


@asynccontextmanager
async def started_machines(has_tls: bool) -> AsyncIterator[Machines]:
    """Run two data movers."""
    machines = Machines(has_tls)
    try:
        await machines.start()
        yield machines
    finally:
        machines.close()


def move_steps(source: Ring, target: Ring, begin: int, count: int) -> int:
    """Move steps of the largest size, as many in flight as fit; return their bytes."""
    shape = source.shape
    sent = begin
    for step in range(begin, begin + count):
        while sent < min(begin + count, step + shape.slots):
            # A worker writes the activations before this; that is no work of the data movers.
            source.signal(sent, shape.max_tokens)
            sent += 1
        target.wait(step, shape.max_tokens)
    return count * shape.max_tokens * shape.hidden_size * shape.itemsize


def measure_round_trips(
    there: tuple[Ring, Ring], back: tuple[Ring, Ring], steps: range
) -> list[float]:
    """Return the seconds until the answer to each of some small steps has arrived."""
    seconds = []
    for step in steps:
        begin = time.perf_counter()
        there[0].signal(step, SMALL_TOKENS)
        there[1].wait(step, SMALL_TOKENS)
        back[0].signal(step, SMALL_TOKENS)
        back[1].wait(step, SMALL_TOKENS)
        seconds.append(time.perf_counter() - begin)
    return seconds


async def measure_links(has_tls: bool, num_steps: int, num_pings: int) -> LinkRound:
    """Return the figures of one round."""
    small = EdgeLayout(LAYOUT.slots, SMALL_TOKENS, SMALL_HIDDEN_SIZE, LAYOUT.itemsize)
    async with started_machines(has_tls) as machines:
        large = await machines.connect(0, LAYOUT)
        there, back = [await machines.connect(source, small) for source in range(2)]
        for ring in large:
            # Pages of memory that was never written would be allocated meanwhile.
            ring.memory[ring.offset(0) :] = bytes(len(ring.memory) - ring.offset(0))
        warm = LAYOUT.slots
        await asyncio.to_thread(move_steps, *large, 0, warm)
        cpu, begin = machines.cpu_seconds(), time.perf_counter()
        num_bytes = await asyncio.to_thread(move_steps, *large, warm, num_steps)
        seconds = time.perf_counter() - begin
        used = [after - before for before, after in zip(cpu, machines.cpu_seconds(), strict=True)]
        await asyncio.to_thread(measure_round_trips, there, back, range(WARM_UP_PINGS))
        steps = range(WARM_UP_PINGS, WARM_UP_PINGS + num_pings)
        round_trips = await asyncio.to_thread(measure_round_trips, there, back, steps)
    per_gb = 1e9 / num_bytes
    return LinkRound(num_bytes / seconds, used[0] * per_gb, used[1] * per_gb, round_trips)


def measure_copies(num_bytes: int) -> float:
    """Return bytes per second of copies from one slot to another."""
    size = LAYOUT.max_tokens * LAYOUT.hidden_size * LAYOUT.itemsize
    source, target = bytearray(size), bytearray(size)
    view = memoryview(target)
    begin, count = time.perf_counter(), max(1, num_bytes // size)
    for _ in range(count):
        view[:] = source
    return count * size / (time.perf_counter() - begin)


def _receive_all(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    buffer = bytearray(2**20)
    while connection.recv_into(buffer):
        pass
    connection.sendall(b"x")


def measure_loopback(num_bytes: int) -> float:
    """Return bytes per second of plain TCP between two processes over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        context = multiprocessing.get_context("fork")
        process = context.Process(target=_receive_all, args=(listening,))
        process.start()
        with socket.create_connection(listening.getsockname()[:2]) as connection:
            block = bytes(LAYOUT.max_tokens * LAYOUT.hidden_size * LAYOUT.itemsize)
            begin, count = time.perf_counter(), max(1, num_bytes // len(block))
            for _ in range(count):
                connection.sendall(block)
            connection.shutdown(socket.SHUT_WR)
            connection.recv(1)
            seconds = time.perf_counter() - begin
        process.join()
    return count * len(block) / seconds


def make_rows(rounds: dict[str, list[LinkRound]]) -> list[list[str]]:
    """Return rows of medians over the rounds: the figure's name, then a column per kind."""
    columns = list(rounds.values())
    figures: tuple[tuple[str, Callable[[LinkRound], float], str], ...] = (
        ("large steps (GB/s)", lambda each: 1e-9 * each.bytes_per_second, ".2f"),
        ("CPU of the sending process (s per GB)", lambda each: each.sender_cpu, ".2f"),
        ("CPU of the receiving process (s per GB)", lambda each: each.receiver_cpu, ".2f"),
        ("round trip of 3.5 KB, median (us)", lambda each: 1e6 * median(each.round_trips), ".0f"),
        (
            "round trip of 3.5 KB, p99 (us)",
            lambda each: 1e6 * percentile(each.round_trips, 99),
            ".0f",
        ),
    )
    return [
        [name, *(format(median(map(value, column)), form) for column in columns)]
        for name, value, form in figures
    ]


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="large steps per round, 15 MB each")
    parser.add_argument("--pings", type=int, default=3000)
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/link.md"))
    options = parser.parse_args()
    foreign = ForeignCpu()
    rounds: dict[str, list[LinkRound]] = {"plain": [], "TLS": []}
    copies, loopback = [], []
    for _ in range(options.rounds):
        for name, kind in rounds.items():
            figures = measure_links(name == "TLS", options.steps, options.pings)
            kind.append(asyncio.run(figures))
        num_bytes = options.steps * LAYOUT.max_tokens * LAYOUT.hidden_size * LAYOUT.itemsize
        copies.append(measure_copies(num_bytes))
        loopback.append(measure_loopback(num_bytes))
    rows = make_rows(rounds)
    limits = [
        ["copies in memory (GB/s)", f"{1e-9 * median(copies):.2f}"],
        ["TCP over loopback, two processes (GB/s)", f"{1e-9 * median(loopback):.2f}"],
    ]
    text = "\n\n".join(
        [
            f"{origin('benchmarks.link')} Medians of {options.rounds} rounds of each. Other "
            f"processes kept {foreign.cores():.2f} cores busy.",
            format_table(["figure", *rounds], rows),
            "Limits of this machine:",
            format_table(["figure", "value"], limits),
        ]
    )
    write_results(options.output, "Data movers over loopback", text, {"rows": rows + limits})


if __name__ == "__main__":
    main()
