"""Runs of the peers as servers: each is started, loaded and stopped.

Modes define the cells; `send_cells` sends them.
"""

import asyncio
import socket
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import aiohttp
import uvloop

from benchmarks.cpu.loads import Cell, requests_of
from benchmarks.cpu.peers import Peer, Server
from benchmarks.cpu.results import Row
from benchmarks.cpu.watch import CpuWatch, pss_bytes, tree
from benchmarks.cpu.workplace import PeerError, Workplace, background, tail, variables
from gllm.commands.bench.client import (
    RequestResult,
    TargetServerError,
    open_session,
    run_load,
    send,
    wait_until_ready,
)
from gllm.commands.bench.load import PlannedRequest
from gllm.commands.bench.options import ServeConfig
from gllm.commands.bench.report import failure_lines, summarize

START_SECONDS = 600.0
"""Maximum seconds until a server is ready: some compile their kernels first."""
FIGURES = (
    "output_throughput",
    "total_token_throughput",
    "request_throughput",
    *(f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl") for kind in ("median", "p99")),
)
"""Figures that are kept of a load, by the names of `gllm bench serve`."""


class RunningServer(NamedTuple):
    """A server that has been started."""

    server: Server
    url: str
    process: "subprocess.Popen[bytes]"
    log: Path


def free_port() -> int:
    """Return a free port of this host."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(peer: Peer, work: Workplace, source: Path, slots: int) -> Iterator[RunningServer]:
    """Start a peer's server and stop it at the end of the block."""
    assert peer.serve is not None
    port, log = free_port(), work.log(f"serve-{peer.name}")
    server = peer.serve(work, source, port, slots)
    env = variables(work.python(peer.environment), peer.variables(work))
    with background(server.command, log, env) as process:
        yield RunningServer(server, f"http://127.0.0.1:{port}", process, log)


def send_cells(
    peer: Peer, work: Workplace, source: Path, slots: int, cells: Iterable[Cell], turn: int
) -> list[Row]:
    """Start the peer's server, send the first cell as warm-up, then the others in order.

    Args:
        peer: A peer with a server.
        work: The work folder.
        source: Path of the peer's model files.
        slots: Maximum number of concurrent requests.
        cells: The warm-up and the measured cells.
        turn: Number of the round.

    Returns:
        One row per measured cell.

    Raises:
        PeerError: The server does not start or a request fails.
    """
    with started(peer, work, source, slots) as running:
        return uvloop.run(_send_cells(peer, running, list(cells), turn))


async def _send_cells(
    peer: Peer, running: RunningServer, cells: list[Cell], turn: int
) -> list[Row]:
    root = running.process.pid
    rows = []
    async with open_session(ServeConfig(), None) as session:
        model = await _ready(session, running)
        await _send(session, running, model, cells[0])
        for cell in cells[1:]:
            cpu = CpuWatch(root)
            figures = await _send(session, running, model, cell)
            foreign = cpu.foreign()
            # After the load: a sample takes CPU time, and servers keep the memory they allocated.
            memory = pss_bytes(tree(root))
            rows.append(Row(peer.name, cell.name, turn, figures, foreign, memory))
    return rows


async def _ready(session: aiohttp.ClientSession, running: RunningServer) -> str:
    """Wait until the server is ready and return the model's name.

    Raises:
        PeerError: The server exits or takes too long.
    """
    name = running.server.model
    waiting = asyncio.ensure_future(wait_until_ready(session, running.url, name, START_SECONDS))
    while not (await asyncio.wait({waiting}, timeout=0.5))[0]:
        if running.process.poll() is not None:
            waiting.cancel()
            raise PeerError(f"its server exited during startup: {tail(running.log)}")
    try:
        return waiting.result().name
    except TargetServerError as error:
        raise PeerError(f"{error}: {tail(running.log)}") from None


async def _send(
    session: aiohttp.ClientSession, running: RunningServer, model: str, cell: Cell
) -> dict[str, float]:
    """Send a cell's requests and return the figures.

    Raises:
        PeerError: A request fails.
    """
    load, bodies = requests_of(cell, running.server, model)
    url = running.url + cell.config.endpoint

    async def send_one(place: int) -> RequestResult:
        return await send(session, url, bodies[place], load[place].prompt_tokens)

    measured = await run_load([each.arrival for each in load], send_one, None, False)
    if measured.interrupted:
        raise KeyboardInterrupt
    outcomes = [measured.outcomes[place] for place in sorted(measured.outcomes)]
    check(load, outcomes)
    figures = summarize(outcomes, measured.seconds)
    return {name: figures[name] for name in FIGURES}


def check(load: list[PlannedRequest], outcomes: list[RequestResult]) -> None:
    """Check that every request succeeded with the requested lengths.

    Raises:
        PeerError: A request failed or had other lengths than requested.
    """
    if failures := failure_lines(outcomes):
        raise PeerError(" / ".join(failures))
    for planned, outcome in zip(load, outcomes, strict=True):
        requested = (planned.prompt_tokens, planned.output_tokens)
        served = (outcome.prompt_tokens, outcome.timeline.num_tokens)
        if requested != served:
            raise PeerError(
                f"it served {served} prompt and output tokens where {requested} were requested"
            )
