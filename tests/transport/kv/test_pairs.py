"""Two processes: KV bytes are identical for all pairs of cuts, over shared memory and TCP."""

import itertools
import multiprocessing
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any

import pytest

from gllm.messages.handoff import make_ticket
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import FetchKv, KvRevoked
from tests.support.engines.kv_caches import (
    CachedEngine,
    dial_plain,
    join_endpoints,
    make_contents,
)
from tests.support.engines.kv_layouts import cut_layouts

CUTS = [(1, 1), (2, 1), (1, 2), (2, 2)]
NUM_TOKENS, FIRST = 37, 8
OWNER_BLOCKS = [3, 9, 0, 5, 11, 2, 7]
"""Of 6 tokens each."""
BLOCKS = [6, 1, 13, 4, 0, 9, 2, 10]
"""Of 4 tokens each, from token FIRST on."""


def _run_owner(connection: Connection) -> None:
    """Serve the same contents by one engine per cut, a ticket per fetch."""
    engines = []
    for cut in CUTS:
        engine = CachedEngine(cut_layouts(*cut, block_size=6, num_blocks=12))
        engine.listen()
        engines.append(engine)
        tickets = [make_ticket() for _ in range(2 * len(CUTS))]
        for ticket in tickets:
            engine.serve(make_contents(NUM_TOKENS, seed=1), OWNER_BLOCKS, ticket)
        connection.send((engine.endpoint(), engine.endpoint(is_remote=True), tickets))
    connection.recv()


def test_bytes_are_identical_for_all_pairs_of_cuts() -> None:
    context = multiprocessing.get_context("spawn")
    own, other = context.Pipe()
    owner = context.Process(target=_run_owner, args=(other,), daemon=True)
    owner.start()
    contents = make_contents(NUM_TOKENS, seed=1)
    for _ in CUTS:
        assert own.poll(30)
        local, remote, tickets = own.recv()
        for cut in CUTS:
            for endpoint in (local, remote):
                engine = CachedEngine(cut_layouts(*cut, block_size=4), dial=dial_plain)
                command = FetchKv(1, tickets.pop(), endpoint, FIRST, NUM_TOKENS - FIRST, BLOCKS)
                fetched = engine.fetch(command)
                assert fetched.is_ok, fetched.cause
                assert not engine.differs(contents, BLOCKS, FIRST)
                # Nothing else was written.
                num_heads = sum(
                    each.num_heads for pages in engine.pages for each in pages.layout.layers
                )
                assert engine.count_written_slots() == num_heads * (NUM_TOKENS - FIRST)
                num_bytes = sum(pages.layout.bytes_per_token for pages in engine.pages)
                assert fetched.num_bytes == num_bytes * (NUM_TOKENS - FIRST)
                engine.mover.close()
    own.send(None)
    owner.join(10)
    assert owner.exitcode == 0


@pytest.mark.parametrize("heads", [1, 2])
def test_replicated_heads_arrive_on_every_rank(heads: int) -> None:
    contents = make_contents(9, seed=2)[:, :heads]
    owner = CachedEngine(cut_layouts(1, 2, num_heads=heads, block_size=8))
    receiver = CachedEngine(cut_layouts(2, 4, num_heads=heads, block_size=2))
    owner.serve(contents, [4, 2], 77)
    fetched = receiver.fetch(FetchKv(1, 77, owner.endpoint(), 0, 9, [5, 3, 1, 0, 7]))
    assert fetched.is_ok, fetched.cause
    assert not receiver.differs(contents, [5, 3, 1, 0, 7], 0)
    for engine in (owner, receiver):
        engine.mover.close()


MACHINE_CUTS = [
    [cut_layouts(2, 2, 6)[:2], cut_layouts(2, 2, 6)[2:]],
    [[layout] for layout in cut_layouts(3, 1, 4)],
    [cut_layouts(1, 2, 5)],
]
"""Layouts by machine: two stages of two ranks, three stages, one stage."""


@pytest.mark.parametrize(("prefill", "decode"), list(itertools.permutations(MACHINE_CUTS, 2)))
def test_each_machine_fetches_its_parts_and_a_ticket_ends_with_the_last(
    prefill: list[list[KvLayout]], decode: list[list[KvLayout]]
) -> None:
    contents = make_contents(NUM_TOKENS, seed=3)
    with ExitStack() as ending:

        def start(machines: list[list[KvLayout]], **options: Any) -> list[CachedEngine]:
            engines = [
                CachedEngine(layouts, engine=machines, machine=machine, **options)
                for machine, layouts in enumerate(machines)
            ]
            for engine in engines:
                ending.callback(engine.mover.close)
            return engines

        owners, receivers = start(prefill), start(decode, dial=dial_plain)
        for owner in owners:
            owner.listen()
            owner.serve(contents, [*OWNER_BLOCKS, 10, 1, 6], 5)
        endpoint = join_endpoints([owner.endpoint(is_remote=True) for owner in owners])
        command = FetchKv(1, 5, endpoint, FIRST, NUM_TOKENS - FIRST, BLOCKS)
        for receiver in receivers:
            fetched = receiver.fetch(command)
            assert fetched.is_ok, fetched.cause
        for receiver in receivers:
            assert not receiver.differs(contents, BLOCKS, FIRST)
        for owner in owners:
            assert owner.wait(KvRevoked) == KvRevoked(5)
            assert owner.reports.empty()
