"""Copies of running requests' KV blocks in the prefix caches of other engines (`--kv-checkpoint`).

The table of copies is `gllm.routing.checkpoints`; here are the engines that can have one, and the
commands. The blocks travel as those of any hand-off: one engine keeps them under a ticket, and the
other one fetches them.
"""

from gllm.messages.handoff import (
    KeepComputedKv,
    KvSource,
    PrefetchKv,
    ReleaseKvHolds,
    make_ticket,
)
from gllm.options.options import INT32_MAX
from gllm.router.client import FleetClient
from gllm.router.dispatcher import Dispatcher
from gllm.routing.checkpoints import Checkpoints, Copy, CopyTicket
from gllm.routing.handoff import HandoffState
from gllm.runtime.head.request_stream import RequestStream

MAX_COPIES_PER_TICK = 8
"""Copies to one engine that start at once: fetches of requests that move wait behind them."""
PRIORITY = INT32_MAX
"""Priority of a copy at its target: any request goes first, and takes its blocks if it needs them.
"""


class KvCheckpoints:
    """Copies the KV of a router's running requests to other engines.

    Args:
        client: has the requests, and the engines.
        dispatcher: knows the load of the engines.
        interval_tokens: computed tokens between two copies of a request; 0: no copies.
    """

    def __init__(self, client: FleetClient, dispatcher: Dispatcher, interval_tokens: int) -> None:
        self.num_copies = 0
        """Copies that were started."""
        self._client = client
        self._dispatcher = dispatcher
        self._table: Checkpoints[RequestStream] = Checkpoints(interval_tokens)
        self._is_on = interval_tokens > 0
        if self._is_on:
            client.find_copy = self._table.target_of

    def on_tick(self, now: float) -> None:
        """Start the copies that are due; to be called about twice per second.

        Args:
            now: time in seconds.
        """
        if not self._is_on:
            return
        self._release([ended for stream in self._table.keys if not stream.alive
                       for ended in self._table.end(stream)])  # fmt: skip
        self._release(self._table.pop_expired(now))
        num_started: dict[str, int] = {}
        for engine in self._dispatcher.records:
            streams = {choice.stream: None for choice in self._client.choices_on(engine).values()}
            if not streams or self._client.kv_peer(engine) is None:
                continue
            targets = self._targets(engine, now)
            for stream in streams:
                copy = self._plan(stream, engine, targets, now)
                if copy is None or num_started.get(copy.target, 0) >= MAX_COPIES_PER_TICK:
                    continue
                num_started[copy.target] = num_started.get(copy.target, 0) + 1
                self._start(stream, copy, now)

    def on_engine_lost(self, engine: str) -> None:
        """Forget the copies that an engine had."""
        self._table.on_engine_lost(engine)

    def _targets(self, engine: str, now: float) -> list[tuple[str, int]]:
        """Return engines that can have copies of an engine's requests, with their block sizes.

        Those that prefill come first, and of them those with the largest free share of their KV
        cache.
        """
        engines = [
            other
            for other in self._dispatcher.candidates(self._dispatcher.records, now)
            if other.name != engine and self._can_copy(engine, other.name)
        ]
        engines.sort(key=lambda other: (other.role != "prefill", other.stats.kv_usage))
        return [(other.name, other.block_size) for other in engines]

    def _can_copy(self, engine: str, target: str) -> bool:
        source, peer = self._client.kv_peer(engine), self._client.kv_peer(target)
        if source is None or peer is None or not (source.accepts_checkpoints and source.endpoint()):
            return False
        if not (peer.accepts_checkpoints and peer.endpoint()):
            return False
        return self._client.handoffs.may_exchange(engine, target)

    def _plan(
        self, stream: RequestStream, engine: str, targets: list[tuple[str, int]], now: float
    ) -> Copy | None:
        entry, handoffs = stream.entry, self._client.handoffs
        is_settled = handoffs.state_of(stream) in (HandoffState.DONE, HandoffState.DECODE)
        if entry.n > 1 or not entry.num_output_tokens or not is_settled:
            return None
        if (handoff := handoffs.running.get(stream)) is not None:
            # It has the prompt in its prefix cache.
            targets = sorted(targets, key=lambda target: target[0] != handoff.pair.prefill)
        num_known = len(entry.prompt) + entry.num_output_tokens
        return self._table.plan(stream, engine, targets, num_known, now)

    def _start(self, stream: RequestStream, copy: Copy, now: float) -> None:
        source, target = self._client.kv_peer(copy.source), self._client.kv_peer(copy.target)
        assert source is not None
        assert target is not None
        entry, ticket = stream.entry, make_ticket()
        (seq,) = entry.seqs.values()
        tokens = [*entry.prompt, *entry.outputs[0]][: copy.num_tokens]
        source.send(KeepComputedKv(seq, ticket, copy.num_tokens))
        target.send(
            PrefetchKv(
                KvSource(copy.source, source.run, ticket, copy.num_tokens, source.endpoint()),
                tokens,
                2,
                PRIORITY,
                entry.cache_salt,
                is_checkpoint=True,
            )
        )
        self._table.on_started(stream, copy, ticket, now)
        self.num_copies += 1

    def _release(self, tickets: list[CopyTicket]) -> None:
        for ticket, copy in tickets:
            for engine in (copy.source, copy.target):
                if (peer := self._client.kv_peer(engine)) is not None:
                    peer.send(ReleaseKvHolds([ticket]))
