"""Transfers while the owner computes: bytes, visible time by mode, and failures on the way.

The owner's workers compute in the sleep of its mover: one layer each time the mover waits.
"""

import time
from collections.abc import Callable
from itertools import product

import pytest

from experiments.transfer_mode import TransferMode, TransferModePolicy
from gllm.messages.kv_transfer import CancelKvFetch, FetchKv, RevokeKv, ServeKv
from gllm.transport.kv.backends.mock import MockBackend
from gllm.transport.kv.mover import make_backend
from gllm.transport.kv.pages import Bytes
from gllm.transport.kv.part_gate import MAX_PART_SECONDS
from tests.support.engines.kv_caches import (
    NUM_LAYERS,
    WAIT_SECONDS,
    CachedEngine,
    dial_plain,
    make_contents,
)
from tests.support.engines.kv_layouts import cut_layouts
from tests.transport.kv.test_pairs import CUTS

STEP, TICKET = 12, 7
BLOCKS = [3, 9, 0, 5]
LAYER_SECONDS = 1.0


class ComputingEngine(CachedEngine):
    """Engine that computes a layer whenever its mover waits for one, on a virtual clock."""

    def __init__(self, cut: tuple[int, int], num_tokens: int) -> None:
        self.now = 0.0
        self.num_computed = 0
        self.on_layer: Callable[[int], None] = lambda num_computed: None
        """Called before each layer with the number of those before it."""
        super().__init__(
            cut_layouts(*cut, block_size=6),
            clock=lambda: self.now,
            sleep=lambda seconds: self.compute_layer(),
            counts_layers=True,
        )
        self.listen()
        self.contents = make_contents(num_tokens, seed=1)
        # Other contents until a layer is computed.
        self.fill(make_contents(num_tokens, seed=2), BLOCKS)
        self.mover.handle(ServeKv(TICKET, num_tokens, BLOCKS, STEP))

    def compute_layer(self) -> None:
        self.on_layer(self.num_computed)
        self.now += LAYER_SECONDS
        layer, self.num_computed = self.num_computed, self.num_computed + 1
        if layer >= NUM_LAYERS:
            return
        self.fill(self.contents, BLOCKS, range(layer, layer + 1))
        for pages, progress in zip(self.pages, self.progress, strict=True):
            layers = [each.layer for each in pages.layout.layers]
            if layer in layers:
                progress.record(0, STEP, layers.index(layer) + 1)


def fetch_command(num_tokens: int, endpoint: bytes, mode: TransferMode) -> FetchKv:
    is_per_layer = mode is TransferMode.PER_LAYER
    return FetchKv(1, TICKET, endpoint, 0, num_tokens, BLOCKS, is_per_layer)


def read_all(engine: CachedEngine) -> list[Bytes]:
    """Return all keys and values of an engine's workers."""
    return [
        pages.read(each.layer, each.heads, pages.find_slots(list(range(16)), 0, 16 * 6))
        for pages in engine.pages
        for each in pages.layout.layers
    ]


QUICK = {
    ((1, 1), (1, 1), False),
    ((2, 1), (1, 2), True),
    ((1, 2), (2, 1), False),
    ((2, 2), (1, 1), True),
    ((1, 1), (2, 2), True),
}
"""Cuts of the owner and of the receiver, and True for two machines; test_pairs.py has all cuts."""


@pytest.mark.parametrize(
    ("owner_cut", "cut", "is_remote"),
    [
        pytest.param(*case, marks=[] if case in QUICK else pytest.mark.full)
        for case in product(CUTS, CUTS, [False, True])
    ],
)
def test_both_modes_give_identical_bytes(
    owner_cut: tuple[int, int], cut: tuple[int, int], is_remote: bool
) -> None:
    """No layer is read before it is computed, and nothing else is written."""
    caches = []
    for mode in TransferMode:
        owner = ComputingEngine(owner_cut, 20)
        receiver = CachedEngine(cut_layouts(*cut, block_size=6), dial=dial_plain)
        fetched = receiver.fetch(fetch_command(20, owner.endpoint(is_remote), mode))
        assert fetched.is_ok, fetched.cause
        assert owner.num_computed == NUM_LAYERS
        assert not receiver.differs(owner.contents, BLOCKS, 0)
        caches.append([each.tobytes() for each in read_all(receiver)])
        for engine in (owner, receiver):
            engine.mover.close()
    assert caches[0] == caches[1]


def measure_visible_seconds(num_tokens: int, threshold: int, layer_transfer: float) -> float:
    """Return the time from the end of the prefill to the end of the fetch, on a mock link."""
    owner = ComputingEngine((1, 1), num_tokens)
    (layout,) = layouts = cut_layouts(1, 1, block_size=6)
    layer_bytes = layout.bytes_per_token * num_tokens // NUM_LAYERS

    def sleep(seconds: float) -> None:
        owner.now += seconds

    backend = MockBackend(
        make_backend("shm"), layer_bytes / layer_transfer, clock=lambda: owner.now, sleep=sleep
    )
    receiver = CachedEngine(layouts, create_backend=lambda name: backend)

    def await_copies(num_computed: int) -> None:
        """Wait until the receiver has copied all layers: the clock stands still meanwhile."""
        end = time.monotonic() + WAIT_SECONDS
        mover, num_bytes = receiver.mover, num_computed * layer_bytes
        while mover.num_fetches and mover.num_fetched_bytes < num_bytes:
            assert time.monotonic() < end
            time.sleep(0.001)

    owner.on_layer = await_copies
    mode = TransferModePolicy(threshold).choose(num_tokens)
    if mode is TransferMode.SERIALIZED:
        for _ in range(NUM_LAYERS):
            owner.compute_layer()
    fetched = receiver.fetch(fetch_command(num_tokens, owner.endpoint(), mode))
    assert fetched.is_ok, fetched.cause
    assert not receiver.differs(owner.contents, BLOCKS, 0)
    for engine in (owner, receiver):
        engine.mover.close()
    return owner.now - NUM_LAYERS * LAYER_SECONDS


@pytest.mark.parametrize("layer_transfer", [0.01, 0.3, 0.9])
def test_one_layer_is_visible_from_the_threshold_on_and_all_layers_below(
    layer_transfer: float,
) -> None:
    all_layers = NUM_LAYERS * layer_transfer
    assert measure_visible_seconds(20, 20, layer_transfer) <= 1.5 * layer_transfer
    assert measure_visible_seconds(19, 20, layer_transfer) == pytest.approx(all_layers, rel=0.1)


def test_slow_links_send_while_the_owner_computes() -> None:
    """The link is busy from the first layer on: only the time for that is hidden."""
    visible = measure_visible_seconds(20, 20, 2.5 * LAYER_SECONDS)
    assert visible == pytest.approx((2.5 * NUM_LAYERS + 1 - NUM_LAYERS) * LAYER_SECONDS)


def await_none(count: Callable[[], int]) -> None:
    """Wait until other threads have ended all that is counted."""
    end = time.monotonic() + WAIT_SECONDS
    while count():
        assert time.monotonic() < end
        time.sleep(0.001)


def run_failing(is_remote: bool, fail: Callable[[ComputingEngine, CachedEngine], None]) -> str:
    """Fetch per layer; fail once two layers are computed; return the cause."""
    owner = ComputingEngine((1, 1), 20)
    receiver = CachedEngine(cut_layouts(1, 1, block_size=6), dial=dial_plain)

    def on_layer(num_computed: int) -> None:
        if num_computed == 2:
            fail(owner, receiver)

    owner.on_layer = on_layer
    fetched = receiver.fetch(fetch_command(20, owner.endpoint(is_remote), TransferMode.PER_LAYER))
    assert not fetched.is_ok
    await_none(lambda: receiver.mover.num_fetches)
    await_none(lambda: owner.mover.num_readers)
    for engine in (owner, receiver):
        engine.mover.close()
    return fetched.cause


@pytest.mark.parametrize("is_remote", [False, True])
def test_preempted_prefill_ends_the_fetch(is_remote: bool) -> None:
    def revoke(owner: ComputingEngine, receiver: CachedEngine) -> None:
        owner.mover.handle(RevokeKv(TICKET))

    cause = run_failing(is_remote, revoke)
    assert "not held any more" in cause


@pytest.mark.parametrize("is_remote", [False, True])
def test_end_of_the_owners_epoch_ends_the_fetch(is_remote: bool) -> None:
    def close(owner: ComputingEngine, receiver: CachedEngine) -> None:
        owner.mover.close_caches()

    assert "not held any more" in run_failing(is_remote, close)


@pytest.mark.parametrize("is_remote", [False, True])
def test_cancelled_fetch_ends_at_both_sides(is_remote: bool) -> None:
    def cancel(owner: ComputingEngine, receiver: CachedEngine) -> None:
        receiver.mover.handle(CancelKvFetch(1))
        # No layer follows. The owner sees the end of the connection when it sends again.
        owner.num_computed = NUM_LAYERS
        await_none(lambda: receiver.mover.num_fetches)

    assert run_failing(is_remote, cancel) == "the fetch was cancelled"


def test_layer_that_is_never_computed_ends_the_fetch() -> None:
    def stop(owner: ComputingEngine, receiver: CachedEngine) -> None:
        owner.num_computed = NUM_LAYERS
        owner.now += MAX_PART_SECONDS

    assert "a layer was not computed in time" in run_failing(False, stop)


def test_engine_that_does_not_count_its_layers_refuses() -> None:
    owner = CachedEngine(cut_layouts(1, 1, block_size=6))
    owner.mover.handle(ServeKv(TICKET, 20, BLOCKS, STEP))
    receiver = CachedEngine(cut_layouts(1, 1, block_size=6))
    fetched = receiver.fetch(fetch_command(20, owner.endpoint(), TransferMode.PER_LAYER))
    assert not fetched.is_ok
    assert "cannot be read before a prefill has ended" in fetched.cause
    for engine in (owner, receiver):
        engine.mover.close()


@pytest.mark.parametrize("is_remote", [False, True])
def test_computed_prompts_can_be_fetched_per_layer_too(is_remote: bool) -> None:
    owner = CachedEngine(cut_layouts(1, 1, block_size=6))
    owner.listen()
    contents = make_contents(20, seed=4)
    owner.serve(contents, BLOCKS, TICKET)
    receiver = CachedEngine(cut_layouts(1, 1, block_size=6), dial=dial_plain)
    endpoint = owner.endpoint(is_remote)
    fetched = receiver.fetch(fetch_command(20, endpoint, TransferMode.PER_LAYER))
    assert fetched.is_ok, fetched.cause
    assert not receiver.differs(contents, BLOCKS, 0)
    for engine in (owner, receiver):
        engine.mover.close()
