"""The modes of the comparison: cells that every peer receives in each round, seeds and rates."""

from benchmarks.cpu.aims import OURS, OURS_INT8
from benchmarks.cpu.in_process import drive
from benchmarks.cpu.loads import (
    AT_ONCE,
    RATE_TRACE,
    TRACES,
    Cell,
    equal_cell,
    rate_cell,
    trace_cell,
    trace_name,
)
from benchmarks.cpu.options import CompareConfig
from benchmarks.cpu.peers import Peer
from benchmarks.cpu.report import peers_of, values
from benchmarks.cpu.serving import send_cells
from benchmarks.cpu.session import Session, print_progress

WARM_UP_SEED = 10**6
SHARES = (0.4, 0.7, 1.0)
"""Request rates as shares of capacity, used if no rates are given."""


def compare_servers(config: CompareConfig, session: Session) -> None:
    """Compare the servers with equal requests, several streams at once."""

    def cells(turn: int) -> list[Cell]:
        return [
            equal_cell(config, streams, turn * config.repeats + repeat)
            for streams in config.streams
            for repeat in range(config.repeats)
        ]

    for turn, peer in session.rounds(config.rounds):
        _send(config, session, peer, max(config.streams), cells(turn), turn)


def compare_under_traces(config: CompareConfig, session: Session) -> None:
    """Compare the servers with the traces' lengths: all at once, then at rising rates."""
    for turn, peer in session.rounds(config.rounds):
        seeds = [turn * config.repeats + repeat for repeat in range(config.repeats)]
        cells = [trace_cell(trace, seed) for trace in TRACES for seed in seeds]
        _send(config, session, peer, AT_ONCE, cells, turn)
    rates = config.rates or shares_of_capacity(session)
    session.results.asked["rates"] = list(rates)
    print_progress(f"rates: {', '.join(f'{rate:.3g}' for rate in rates)} requests/s")
    for turn, peer in session.rounds(config.rounds):
        cells = [rate_cell(rate, config.requests, turn) for rate in rates]
        _send(config, session, peer, AT_ONCE, cells, turn)


def compare_in_process(config: CompareConfig, session: Session) -> None:
    """Compare batches in process, without HTTP."""
    for turn, peer in session.rounds(config.rounds):
        with session.attempt(peer):
            source = session.sources[peer.name]
            session.results.rows += drive(config, session.work, peer, source, turn)


MODES = {
    "server": compare_servers,
    "poisson": compare_under_traces,
    "in-process": compare_in_process,
    "four-bit": compare_in_process,
    "hybrid": compare_in_process,
}


def _send(
    config: CompareConfig, session: Session, peer: Peer, slots: int, cells: list[Cell], turn: int
) -> None:
    """Send cells to a newly started server of a peer, after a warm-up of `slots` equal requests."""
    warm_up = equal_cell(config, slots, WARM_UP_SEED)
    with session.attempt(peer):
        source = session.sources[peer.name]
        session.results.rows += send_cells(
            peer, session.work, source, slots, [warm_up, *cells], turn
        )


def shares_of_capacity(session: Session) -> tuple[float, ...]:
    """Return request rates as shares of capacity, the same for all servers.

    Capacity is the throughput of the best server other than gllm with all requests sent at once, or
    gllm's if there is no other.
    """
    rows, cell = session.results.rows, trace_name(RATE_TRACE)
    measured = peers_of(session.results)
    others = [name for name in measured if name not in (OURS, OURS_INT8)]
    capacity = max(
        max(values(rows, name, cell, "request_throughput")) for name in others or measured
    )
    return tuple(share * capacity for share in SHARES)
