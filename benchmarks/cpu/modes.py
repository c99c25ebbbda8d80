"""The modes of the comparison: which cells every peer gets in each round.

Owns seeds, warm-ups and the choice of rates. Knows nothing of how cells are sent and shown.
"""

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
from benchmarks.cpu.session import Session, say

WARM_UP_SEED = 10**6
SHARES = (0.4, 0.7, 1.0)
"""Of capacity, where no rates are given."""


def compare_servers(config: CompareConfig, session: Session) -> None:
    """Equal requests, some streams at once."""

    def cells(turn: int) -> list[Cell]:
        return [
            equal_cell(config, streams, turn * config.repeats + repeat)
            for streams in config.streams
            for repeat in range(config.repeats)
        ]

    for turn, peer in session.rounds(config.rounds):
        _send(config, session, peer, max(config.streams), cells(turn), turn)


def compare_under_traces(config: CompareConfig, session: Session) -> None:
    """Lengths of traces: all at once, then at rising rates."""
    for turn, peer in session.rounds(config.rounds):
        seeds = [turn * config.repeats + repeat for repeat in range(config.repeats)]
        cells = [trace_cell(trace, seed) for trace in TRACES for seed in seeds]
        _send(config, session, peer, AT_ONCE, cells, turn)
    rates = config.rates or shares_of_capacity(session)
    session.results.asked["rates"] = list(rates)
    say(f"rates: {', '.join(f'{rate:.3g}' for rate in rates)} requests/s")
    for turn, peer in session.rounds(config.rounds):
        cells = [rate_cell(rate, config.requests, turn) for rate in rates]
        _send(config, session, peer, AT_ONCE, cells, turn)


def compare_in_process(config: CompareConfig, session: Session) -> None:
    """Batches without HTTP."""
    for turn, peer in session.rounds(config.rounds):
        with session.attempt(peer):
            source = session.sources[peer.name]
            session.results.rows += drive(config, session.work, peer, source, turn)


MODES = {
    "server": compare_servers,
    "poisson": compare_under_traces,
    "in-process": compare_in_process,
}


def _send(
    config: CompareConfig, session: Session, peer: Peer, slots: int, cells: list[Cell], turn: int
) -> None:
    """Send cells to a fresh server of a peer, behind one of as many equal requests as it may have
    at once."""
    warm_up = equal_cell(config, slots, WARM_UP_SEED)
    with session.attempt(peer):
        source = session.sources[peer.name]
        session.results.rows += send_cells(
            peer, session.work, source, slots, [warm_up, *cells], turn
        )


def shares_of_capacity(session: Session) -> tuple[float, ...]:
    """Rates by what the best server but ours does with all requests there at once, or ours where
    there is no other: the same for all of them."""
    rows, cell = session.results.rows, trace_name(RATE_TRACE)
    measured = peers_of(session.results)
    others = [name for name in measured if name not in (OURS, OURS_INT8)]
    capacity = max(
        max(values(rows, name, cell, "request_throughput")) for name in others or measured
    )
    return tuple(share * capacity for share in SHARES)
