"""A router in the test's process whose engines move KV blocks between their own processes.

The head of each engine is in the test's process too, so a test sees the commands to the movers and
the memory of the KV caches; workers and movers are processes.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from random import Random
from typing import Any

import numpy as np

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.text_engine import TextEngine
from gllm.messages.codec import decode_for_kv_mover, decode_from_kv_mover
from gllm.messages.kv_transfer import FetchKv, KvFetched, RevokeKv, ServeKv
from gllm.models.config import read_config
from gllm.models.hub import resolve_model
from gllm.models.identity import hash_model
from gllm.router.fleet import Fleet
from gllm.routing.disaggregation.policy import DecodeChoice, EnginePair, PairPolicy, PairRequest
from gllm.routing.state import EngineSnapshot
from gllm.runtime.messaging.fleet_links import FleetLinks
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.kv.pages import KvPages
from tests.support.network.ports import free_port
from tests.support.servers.server import DEADLINE

MAX_LEN = 256
"""Tokens of prompt and output."""
REPORTS_SECONDS = 0.5
"""Time in which each engine has reported what was used before it."""


class FixedPair(PairPolicy):
    """Pair policy of the engines that a test names."""

    decode_choice = DecodeChoice.ARRIVAL

    def __init__(self, prefill: str = "", decode: str = "") -> None:
        super().__init__(Random(1))
        self.prefill, self.decode = prefill, decode

    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """See PairPolicy."""
        return EnginePair(self.prefill, self.decode)

    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """See PairPolicy."""
        return self.decode


class WatchErrors:
    """Errors of a test's own code that the event loop or the product calls.

    Such an error must not reach its caller, which would log it and leave requests without an end.
    """

    def __init__(self) -> None:
        self._errors: list[Exception] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep an error of the body for the end of the test."""
        try:
            yield
        except Exception as error:
            self._errors.append(error)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise the first error that was kept once the body has ended, even by another error."""
        try:
            yield
        finally:
            for error in self._errors:
                raise error


class KvWatch:
    """Commands to an engine's mover, and its caches."""

    def __init__(self, engine: Engine, errors: WatchErrors) -> None:
        mover = engine._supervisor.kv_mover.local
        assert mover is not None
        self.mover = mover
        self.served: dict[int, ServeKv] = {}
        """Blocks that the engine has kept, by ticket."""
        self.revoked: set[int] = set()
        """Tickets whose blocks the engine may use for other tokens, now or soon."""
        self.fetches: dict[int, FetchKv] = {}
        """Fetches that have not ended."""
        self.ended: list[tuple[FetchKv, KvFetched]] = []
        self.num_compared = 0
        """Fetches whose bytes a test has compared with those that were read."""
        self.on_fetched: Callable[[FetchKv, KvFetched], None] = lambda command, report: None
        """Called before the driver knows the end of a fetch."""
        self._errors = errors
        self.mover.create_channels = self._create_channels

    def _create_channels(self) -> tuple[DescriptorChannel, DescriptorChannel]:
        """Return the ends of two channels, between which messages are passed on."""
        (driver, behind_driver), (mover, behind_mover) = create_channels(), create_channels()
        loop = asyncio.get_running_loop()

        def pass_on(source: DescriptorChannel, target: DescriptorChannel, watch: Any) -> None:
            try:
                payload, _ = source.receive()
            except (DescriptorError, OSError):
                for channel in (source, target):
                    loop.remove_reader(channel.fileno())
                    channel.close()
                return
            # The driver has to know the end all the same, or its requests never end.
            with self._errors.kept():
                watch(payload)
            with suppress(DescriptorError):
                target.send(payload)

        for source, target, watch in (
            (behind_driver, behind_mover, self._watch_command),
            (behind_mover, behind_driver, self._watch_report),
        ):
            loop.add_reader(source.fileno(), pass_on, source, target, watch)
        return driver, mover

    def _watch_command(self, payload: bytes) -> None:
        match decode_for_kv_mover(payload):
            case ServeKv(ticket) as command:
                self.served[ticket] = command
            case RevokeKv(ticket):
                self.revoked.add(ticket)
            case FetchKv(number) as command:
                self.fetches[number] = command

    def _watch_report(self, payload: bytes) -> None:
        report = decode_from_kv_mover(payload)
        if isinstance(report, KvFetched):
            fetch = self.fetches.pop(report.fetch)
            self.ended.append((fetch, report))
            self.on_fetched(fetch, report)

    def read(
        self, block_ids: list[int], first_token: int, num_tokens: int
    ) -> dict[tuple[int, int], bytes]:
        """Return keys and values of tokens by layer and KV head, from the memory of all workers.

        first_token: position in the blocks.
        """
        caches = self.mover._caches
        assert caches is not None
        runs: dict[tuple[int, int], bytes] = {}
        for layout, descriptor in zip(
            caches.engine[caches.machine], caches.descriptors, strict=True
        ):
            pages = KvPages(layout, descriptor, is_writable=False)
            slots = pages.find_slots(block_ids, first_token, num_tokens)
            for each in layout.layers:
                for head in each.heads:
                    run = pages.read(each.layer, range(head, head + 1), slots)
                    # Replicated heads are the same on each of their ranks.
                    assert runs.setdefault((each.layer, head), run.tobytes()) == run.tobytes()
            pages.close()
        return runs

    def read_fetched(self, fetch: FetchKv) -> dict[tuple[int, int], bytes]:
        """Return what a fetch has written."""
        return self.read(list(fetch.block_ids), 0, fetch.num_tokens)

    def read_served(self, fetch: FetchKv) -> dict[tuple[int, int], bytes] | None:
        """Return what a fetch has read at the engine that has kept the blocks.

        None if the engine keeps them no longer: the end of a fetch reaches this process after it,
        and the lease of a hold goes on meanwhile, which ends early on a machine that has no time
        for those who renew it. The blocks may then have the tokens of another request.
        """
        if fetch.ticket in self.revoked:
            return None
        served = self.served[fetch.ticket]
        return self.read(list(served.block_ids), fetch.first_token, fetch.num_tokens)


class KvRouter:
    """A router of which a test names the engines of each request.

    Args:
        create_links: creates the router's sessions with the engines.
        has_pairs: False for one engine per request, in turn.
        options: of the router.
    """

    def __init__(
        self,
        create_links: type[FleetLinks] = FleetLinks,
        has_pairs: bool = True,
        **options: Any,
    ) -> None:
        self.policy = FixedPair()
        self.address = f"127.0.0.1:{free_port()}"
        """Address of the router's hub."""
        config = RouterConfig(
            model="demo", hub=self.address, policy="round-robin",
            preset="distserve" if has_pairs else None, **options,
        )  # fmt: skip
        folder = resolve_model("demo")
        self.fleet = Fleet(
            config,
            hash_model(folder),
            MAX_LEN,
            create_links,
            self.policy if has_pairs else None,
        )
        self.router = TextEngine(
            self.fleet, "demo", folder, read_config(folder), MAX_LEN, None, None
        )
        self.handoffs = self.fleet.client.handoffs
        self.errors = WatchErrors()

    @property
    def able(self) -> set[str]:
        """Engines that take hand-offs."""
        rows = self.fleet.engines()
        return {row.name for row in rows if row.has_kv_transfer and row.state == "ready"}

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait for a condition."""
        end = time.monotonic() + DEADLINE
        while not condition():
            assert time.monotonic() < end, "it did not come true"
            await asyncio.sleep(0.005)

    async def until_empty(self) -> None:
        """Wait until no engine has a request or a block, and the router no hand-off."""

        empty_since: float | None = None

        def is_empty() -> bool:
            nonlocal empty_since
            rows = [row.stats for row in self.fleet.engines()]
            names = ("running", "waiting", "held_blocks", "fetching", "kv_usage")
            if any(row[name] for row in rows for name in names) or self.handoffs.num_running:
                empty_since = None
                return False
            empty_since = empty_since or time.monotonic()
            return time.monotonic() > empty_since + REPORTS_SECONDS

        await self.until(is_empty)


class KvRig(KvRouter):
    """The router and its engines."""

    def __init__(self, stack: AsyncExitStack, has_pairs: bool = True, **options: Any) -> None:
        super().__init__(has_pairs=has_pairs, **options)
        self.engines: dict[str, Engine] = {}
        self.watches: dict[str, KvWatch] = {}
        self._stack = stack

    async def start(self, engines: dict[str, dict[str, Any]]) -> None:
        """Start engines by name with their options, and wait until all exchange blocks.

        `node` among the options has the workers.
        """

        async def start_one(name: str, options: dict[str, Any]) -> None:
            node = options.pop("node", None)
            config = EngineConfig.from_options(
                "demo",
                **{
                    "threads": 1,
                    "dtype": "float32",
                    "max_model_len": MAX_LEN,
                    "kv_cache_memory": 2**24,
                    "kv_transfer": "auto",
                    "kv_fetch": "always",
                    **options,
                },
            )
            attachment = AttachmentConfig(router=(self.address,), name=name)
            engine = self.engines[name] = Engine(config, attachment=attachment, node=node)
            self.watches[name] = KvWatch(engine, self.errors)
            await engine.start()
            self._stack.push_async_callback(engine.stop)

        await asyncio.gather(*(start_one(name, options) for name, options in engines.items()))
        await self.until(lambda: engines.keys() <= self.able)


async def generate(engine: TextEngine, prompt: list[int], max_tokens: int = 12) -> list[int]:
    """Return the greedy output of an engine or a router."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]


def make_prompts(count: int, seed: int, longest: int) -> list[list[int]]:
    """Return prompts of random tokens and lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, longest + 1, count)
    return [rng.integers(300, 2000, length).tolist() for length in lengths]


@asynccontextmanager
async def kv_rig(has_pairs: bool = True, **options: Any) -> AsyncIterator[KvRig]:
    """A router without engines; the arguments are those of KvRouter."""
    async with AsyncExitStack() as stack:
        rig = KvRig(stack, has_pairs, **options)
        await rig.router.start()
        stack.push_async_callback(rig.router.stop)
        with rig.errors.raised():
            yield rig
