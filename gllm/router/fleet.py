"""Backend of a router: the engines that are attached, and the requests divided among them."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec

from gllm.config.router import RouterConfig
from gllm.engine.fleet_control import EngineRow, RouterTotals, UnknownEngineError
from gllm.engine.interface import EngineStatus, EngineUnavailableError, OverloadedError
from gllm.messages.codec import AnyMessage
from gllm.messages.fleet import DrainEngine, EngineReport
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.options.slo import Slo
from gllm.recovery.admission_state import AdmissionState
from gllm.router import fleet_status
from gllm.router.client import FleetClient
from gllm.router.dispatch_target import KvPeer
from gllm.router.dispatcher import Dispatcher, PairDispatcher
from gllm.router.engine_record import EngineRecord, preset_warning, unfit_reason
from gllm.router.kv_checkpoints import KvCheckpoints
from gllm.router.rebalancing import Rebalancing
from gllm.router.role_control import RoleControl
from gllm.router.scale_control import ScaleControl
from gllm.router.workload_monitor import WorkloadMonitor
from gllm.routing.disaggregation.policy import PairPolicy
from gllm.routing.engine_losses import LossKind
from gllm.routing.health import FleetHealth
from gllm.routing.policy import RoutingPolicy
from gllm.routing.policy_registry import make_policy
from gllm.routing.rounds import PlacementRounds
from gllm.runtime.head.request_client import SendFunction
from gllm.runtime.messaging.bus_socket import CLOSED
from gllm.runtime.messaging.command_runner import CommandRunner
from gllm.runtime.messaging.connection_pool import make_router_links
from gllm.runtime.messaging.fleet_links import EngineLink, FleetLinks

log = logging.getLogger(__name__)

TICK_SECONDS = 0.5
"""Interval at which deadlines are checked."""
READ_POLL_SECONDS = 0.002
"""Interval at which readers are looked at. A reader that waits in a task needs a few turns of the
event loop to read; one that does not read in time is no longer waited for."""


class Fleet:
    """All engines behind a router, used as one engine. Implements `Backend` and `FleetControl`."""

    def __init__(
        self,
        config: RouterConfig,
        model_hash: str,
        max_model_len: int,
        create_links: Callable[..., FleetLinks] = FleetLinks,
        pair_policy: PairPolicy | None = None,
        policy: RoutingPolicy | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Create the fleet; `start` begins to listen for engines and to connect to them.

        Args:
            config: configuration of the router.
            model_hash: digest of the router's model; engines of another one are refused.
            max_model_len: most tokens of prompt and output; engines with less are refused.
            create_links: creates the connections to the engines.
            pair_policy: chooses prefill and decode engines; None if one engine does both.
            policy: chooses the engine of a request; None for the one that `config` names.
            clock: returns the time in seconds; None for time.monotonic.

        Raises:
            ValueError: an address, the secret or the length predictor cannot be used.
        """
        self.name = f"router-{secrets.token_hex(4)}"
        """Name of the router in the logs of its engines."""
        self.died = asyncio.Event()
        self._config = config
        self._clock = clock = clock or time.monotonic
        self._model_hash = model_hash
        self._max_model_len = max_model_len
        self._dispatcher = Dispatcher(
            policy or make_policy(config.policy, Random()),
            FleetHealth(config.health),
            clock,
            config.length_predictor,
        )
        rounds = PlacementRounds(config.placement_heartbeat, self._dispatcher.policy.waits_for_room)
        pairs = None
        if pair_policy is not None:
            pairs = PairDispatcher(pair_policy, self._dispatcher, clock)
        self.client = FleetClient(
            self._dispatcher.choose,
            config.migration_limit,
            self._dispatcher.on_output,
            config.recovery_patience,
            pairs,
            clock,
            rounds=rounds,
        )
        self.client.on_held = self._schedule_round
        self._checkpoints = KvCheckpoints(self.client, self._dispatcher, config.kv_checkpoint)
        self._rebalancing = Rebalancing(self.client, self._dispatcher, config.move_requests)
        self._links = create_links(
            make_router_links(config), self.name, self._on_attached, self._on_lost, self._on_message
        )
        self._links.on_died = self.client.on_refused
        self.roles = RoleControl(self._links, self._dispatcher.records, config, clock, pair_policy)
        """Roles of the engines."""
        self.scaling = ScaleControl(
            self._dispatcher, config, clock, self.roles.leads_all,
            lambda: self.client.parked_since,
        )  # fmt: skip
        """Autoscaling of the engines."""
        self.workload = WorkloadMonitor(config.shift_conditions, self.client, self.roles.leads_all)
        """Workload statistics of the requests."""
        self._commands: CommandRunner[str] = CommandRunner()
        self._stats = fleet_status.FleetStats()
        self._num_lost: Counter[str] = Counter()
        self._num_refused = 0
        self._unready_since: float | None = self._clock()
        """Time since which no engine takes requests; None while one does."""
        self._is_draining = False
        self._is_sleeping = False
        self._ticks: asyncio.Task[None] | None = None
        self._read_poll: asyncio.TimerHandle | None = None
        """Next look at the readers of token 1 of hand-offs."""
        self._next_round: asyncio.TimerHandle | None = None
        """Next placement of the requests that wait for a heartbeat."""

    @property
    def state(self) -> str:
        """State: ready, recovering (no engine is ready), draining, sleeping or dead."""
        return self._admission.name

    @property
    def is_sleeping(self) -> bool:
        """True after `set_sleeping`, also while no engine is ready."""
        return self._is_sleeping

    @property
    def _admission(self) -> AdmissionState:
        """Facts that decide whether requests are taken."""
        is_unready = self._unready_since is not None and not self.scaling.holds_requests
        phase = "dead" if self.died.is_set() else "recovering" if is_unready else "ready"
        return AdmissionState(phase, self._is_sleeping, self._is_draining, self._is_overdue())

    def status(self) -> EngineStatus:
        """Return the status; counters are sums over all engines, departed ones too."""
        records = self._dispatcher.records.values()
        now = self._clock()
        return EngineStatus(
            state=self.state,
            is_sleeping=self._is_sleeping,
            cause_of_death="the router was stopped" if self.died.is_set() else "",
            is_healthy=not self.died.is_set(),
            num_requests=self.client.num_requests,
            stats=self._stats.total(self._dispatcher.records, self.client.num_parked, now),
            num_kv_blocks=sum(record.announce.num_blocks for record in records),
            block_size=max((record.announce.block_size for record in records), default=0),
            epoch=1,
            recovering_since=None if self._is_draining else self._unready_since,
            recovery_cause=fleet_status.unready_cause(self._dispatcher.records)
            if self._unready_since is not None
            else "",
            is_recovery_overdue=self._is_overdue(),
            num_resumed_requests=self.client.num_resumed_requests,
            length_predictor=self._dispatcher.output_lengths.name,
            output_lengths=self._dispatcher.output_lengths.accuracy.rows(),
        )

    def describe(self) -> dict[str, Any]:
        """Return the state, configuration and engines for `GET /server_info`."""
        return {
            "state": self.state,
            "router": self.name,
            "engines": [msgspec.to_builtins(row) for row in self.engines()],
            "config": msgspec.to_builtins(self._config),
        }

    def engines(self) -> list[EngineRow]:
        """Return one row of state and load per engine, by name."""
        records, health = self._dispatcher.records, self._dispatcher.health
        links = self._links.links
        return fleet_status.engine_rows(records, links, health, self.client, self._clock())

    def totals(self) -> RouterTotals:
        """Return the counters of the router since its start."""
        config, client = self._config, self.client
        return RouterTotals(
            policy=config.policy,
            num_parked=client.num_parked,
            held_requests=client.rounds.num_held,
            placement_heartbeat=config.placement_heartbeat,
            migrations=dict(client.num_migrations),
            kv_checkpoints=self._checkpoints.num_copies,
            rebalancing_seconds=self._rebalancing.pause_seconds,
            lost_engines=dict(self._num_lost),
            refused_engines=self._num_refused,
            refused_peers=self._links.num_refused_peers,
            shed_requests=dict(self._dispatcher.num_shed),
            inexact_migrations=client.numerics.num_inexact_migrations,
            stale_outputs=client.num_stale_tokens,
            preset=config.preset or "",
            decode_choice=config.decode_choice,
            flips=config.flips,
            role_changes=dict(self.roles.num_commands),
            length_predictor=self._dispatcher.output_lengths.name,
            output_lengths=self._dispatcher.output_lengths.accuracy.rows(),
        )

    @property
    def accepts_requests(self) -> bool:
        """True if new requests are accepted, even if they wait for an engine at first."""
        return not self._admission.reason_to_refuse

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless the router can compute requests now."""
        match self.state:
            case "ready":
                return
            case "recovering" if not self._is_sleeping:
                raise fleet_status.no_engines_error(
                    fleet_status.unready_cause(self._dispatcher.records)
                )
            case _:
                reason = self._admission.reason_to_refuse
                raise EngineUnavailableError(reason, f"the router is {reason}")

    def check_admission(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        priority: int,
        cache_salt: str,
        slo: Slo | None,
    ) -> None:
        """Count new requests; raise OverloadedError if no engine can meet their SLO."""
        self._dispatcher.health.retry_budget.on_request(self._clock())
        self.scaling.on_requests(len(prompts), slo)
        if not self._config.shed or slo is None:
            return
        for prompt in prompts:
            num_tokens = min(max_tokens or self._max_model_len, self._max_model_len - len(prompt))
            refusal = self._dispatcher.reason_to_shed(prompt, num_tokens, priority, cache_salt, slo)
            if refusal is not None:
                reason, retry_after = refusal
                self.workload.on_shed(self._clock(), len(prompts))
                raise OverloadedError(
                    "no engine is likely to meet the request's SLO at present", reason, retry_after
                )

    def drain_engine(self, name: str, migrates: bool, is_scaling: bool = False) -> int:
        """Send an engine no new requests; return the number of requests that still run on it.

        Autoscaling leaves an engine drained until `undrain_engine`, unless it wants the drain.
        """
        self._set_draining(name, True, not is_scaling and not self.scaling.wants_drain(name))
        if migrates:
            self.client.migrate(name)
        self._on_engines_changed()
        return self.client.num_running(name)

    def undrain_engine(self, name: str) -> None:
        """Send a drained engine requests again."""
        self._set_draining(name, False)
        self._on_engines_changed()

    async def start(self) -> None:
        """Listen for engines and dial them; return before an engine is attached."""
        await self._links.start()
        if address := self._links.hub_address:
            log.info(
                "listening for engines on %s; start them with gllm serve %s --router HOST:%s",
                address, self._config.model, address.rpartition(":")[2],
            )  # fmt: skip
        self._ticks = asyncio.create_task(self._tick_forever())

    async def drain(self, seconds: float) -> None:
        """Accept no new requests, and wait up to some seconds until the running ones end."""
        self._is_draining = True
        deadline = self._clock() + seconds
        while self.client.num_requests and self._clock() < deadline:
            await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """End all requests with an error, and all sessions with engines."""
        if self.died.is_set():
            return
        self.died.set()
        if self._ticks is not None:
            self._ticks.cancel()
        for timer in (self._read_poll, self._next_round):
            if timer is not None:
                timer.cancel()
        self._commands.fail_all("the router was stopped")
        self.client.fail_all("the router was stopped")
        await self._links.stop()

    def set_sleeping(self, is_on: bool) -> None:
        """Report the state `sleeping`, or end it; engines stay awake for other routers."""
        self._is_sleeping = is_on

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix caches of all engines; return the first error, empty on success."""
        sends = {link.name: link.send for link in self._links.links.values()}
        errors = await self._commands.run(ResetPrefixCache, sends)
        return next((f"engine {name}: {error}" for name, error in errors.items()), "")

    async def start_profile(self, folder: str) -> str:
        """Return an error: torch profiles are recorded at the engines, not here."""
        return "a router has no stages: start the profile at one of its engines"

    async def stop_profile(self) -> str:
        """Return an error: torch profiles are recorded at the engines, not here."""
        return await self.start_profile("")

    def _on_attached(self, link: EngineLink) -> None:
        announce, name, now = link.announce, link.name, self._clock()
        cause = unfit_reason(announce, self._config.model, self._model_hash, self._max_model_len)
        if cause:
            self._num_refused += 1
            link.refuse(cause)
            return
        log.info("engine %s (%s) is attached, %s", name, link.address, link.report.state)
        if warning := preset_warning(announce, self._config.preset):
            log.warning("%s", warning)
        tracks_ongoing = self._dispatcher.policy.uses_ongoing
        record = EngineRecord(announce, link.report, now, tracks_ongoing)
        self._dispatcher.records[name] = record
        self._dispatcher.health.on_attached(name, now)
        if self._dispatcher.policy.uses_prefixes:
            link.send(WatchKvCache(True))
        self._on_engines_changed()
        self.client.attach(
            name,
            announce.numerics,
            request_sender(link, record, self._clock),
            kv_peer(link),
            announce.run,
        )

    def _on_lost(self, link: EngineLink, cause: str) -> None:
        name, is_planned = link.name, link.is_leaving
        record = self._dispatcher.records.pop(name, None)
        if record is None:
            return
        log.log(
            logging.INFO if is_planned else logging.WARNING,
            "engine %s (%s) %s: %s; requests that go on elsewhere: %d",
            name, link.address, "has left" if is_planned else "is lost", cause,
            self.client.num_running(name),
        )  # fmt: skip
        self._num_lost["drained" if is_planned else "lost"] += 1
        self._stats.on_lost(record)
        self._dispatcher.policy.prefixes.forget(name)
        self._dispatcher.health.on_lost(name, self._clock(), is_planned)
        self._commands.on_lost(name, cause)
        self._checkpoints.on_engine_lost(name)
        self._on_engines_changed()
        self.client.detach(name, cause, loss_kind(cause, is_planned))
        fleet_status.forget_departed(self.client.num_dispatched, self._dispatcher.records)

    def _on_message(self, link: EngineLink, message: AnyMessage) -> None:
        record = self._dispatcher.records.get(link.name)
        if record is None:
            return
        now = self._clock()
        match message:
            case EngineOutputs():
                record.on_outputs(message, now)
                if message.outcome.seqs:
                    self._dispatcher.health.on_outputs(link.name, message.outcome.seqs, now)
                self.client.on_outputs(link.name, message)
                self._offer_room(link.name)
                self._schedule_read_poll()
            case EngineReport():
                self._on_report(link, record, message, now)
            case KvCacheEvents():
                stored = [digest for blocks in message.stored for digest in blocks.digests]
                if not self._dispatcher.policy.prefixes.on_events(
                    link.name, message.number, stored, message.removed, message.is_cleared
                ):
                    # Earlier events are missing: request a snapshot.
                    link.send(WatchKvCache(True))
            case KvPushStarted(ticket):
                self.client.handoffs.on_readable(link.name, ticket, now)
            case FirstChunkComputed(ticket):
                self.client.handoffs.on_first_chunk(link.name, ticket, now)
            case CommandDone():
                self._commands.on_done(link.name, message)

    def _on_report(
        self, link: EngineLink, record: EngineRecord, report: EngineReport, now: float
    ) -> None:
        previous = record.state
        record.announce = link.announce
        record.on_report(report, now)
        self._dispatcher.health.on_report(record.snapshot(), now)
        if record.state != previous:
            why = f": {report.cause}" if report.cause else ""
            log.info("engine %s is %s%s", record.name, record.state, why)
            self._on_engines_changed()
            self.client.dispatch_parked()
        else:
            self._offer_room(link.name)

    def _offer_room(self, name: str) -> None:
        """Place the requests that wait for room, after a change of an engine's load."""
        is_waiting = self.client.rounds.waits_for_room and self.client.num_parked
        if is_waiting and self._dispatcher.has_room(name):
            self.client.dispatch_parked()

    def _schedule_round(self, time: float) -> None:
        """Place the requests that wait for a heartbeat at a time in seconds."""
        if self._next_round is None:
            loop = asyncio.get_running_loop()
            self._next_round = loop.call_later(max(0.0, time - self._clock()), self._run_round)

    def _run_round(self) -> None:
        self._next_round = None
        self.client.dispatch_parked()

    def _on_engines_changed(self) -> None:
        """Note whether an engine takes requests."""
        if self._dispatcher.has_ready_engine:
            self._unready_since = None
        elif self._unready_since is None:
            self._unready_since = self._clock()

    def _schedule_read_poll(self) -> None:
        """Look at the readers of token 1 soon if one of them has not read it yet."""
        if self._read_poll is None and self.client.handoffs.has_unread:
            loop = asyncio.get_running_loop()
            self._read_poll = loop.call_later(READ_POLL_SECONDS, self._poll_readers)

    def _poll_readers(self) -> None:
        self._read_poll = None
        self.client.continue_handoffs()
        self._schedule_read_poll()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self.on_tick()
            except Exception:
                # The next tick may succeed; without ticks parked requests would wait forever.
                log.exception("deadlines could not be checked")

    def on_tick(self) -> None:
        """Check deadlines: slow recoveries, hand-offs, scaling and parked requests."""
        now = self._clock()
        for name, record in list(self._dispatcher.records.items()):
            since = record.not_ready_since
            if record.state != "recovering" or since is None:
                continue
            if now - since > self._config.recovery_patience and self.client.num_running(name):
                self.client.migrate(name, is_planned=False)
        if self.client.handoffs.num_running:
            self.client.continue_handoffs()
        self.roles.on_tick()
        self.scaling.on_tick()
        self.client.check_losses()
        self._rebalancing.on_tick(now)
        self._checkpoints.on_tick(now)
        if self.client.num_parked:
            self.client.dispatch_parked()
            if self.client.rounds.waits_for_room and self._dispatcher.has_ready_engine:
                # They wait in a queue, as at an engine with another policy.
                return
            self.client.reject_parked(
                fleet_status.unready_cause(self._dispatcher.records), self.scaling.park_seconds
            )

    def _is_overdue(self) -> bool:
        since = self._unready_since
        return since is not None and self._clock() - since > self._config.park_timeout

    def _set_draining(self, name: str, is_on: bool, is_held: bool = False) -> None:
        """Command an engine to drain, or to accept requests again. Raises UnknownEngineError."""
        if name not in self._dispatcher.records:
            raise UnknownEngineError(f"no engine is named {name!r}")
        self._dispatcher.records[name].request_drain(is_on, is_held)
        self._links.links[name].send(DrainEngine(is_on, is_held))


def loss_kind(cause: str, is_planned: bool) -> LossKind:
    """Return what the end of a session says about the engine.

    Args:
        cause: cause of the end, as the session reports it.
        is_planned: True if the engine has announced that it leaves.
    """
    if is_planned:
        return LossKind.PLANNED
    return LossKind.CLOSED if cause == CLOSED else LossKind.SILENT


def request_sender(
    link: EngineLink, record: EngineRecord, clock: Callable[[], float]
) -> SendFunction:
    """Return a function that sends requests to an engine and counts them as load of it.

    Args:
        link: connection to the engine.
        record: state and load of the engine.
        clock: returns the time in seconds.
    """

    def send(message: SubmitRequest | AbortSequences) -> None:
        link.send(message)
        if isinstance(message, SubmitRequest):
            record.on_submitted(message, clock())
        else:
            record.on_aborted(message)

    return send


def kv_peer(link: EngineLink) -> KvPeer:
    """Return the interface for KV transfers of an engine; its latest announced address is used."""
    return KvPeer(
        link.announce.run,
        lambda: link.announce.kv_endpoint,
        link.send,
        lambda: link.announce.kv_digest,
        link.announce.accepts_prefetches,
        link.announce.accepts_moves,
        link.announce.accepts_checkpoints,
    )
