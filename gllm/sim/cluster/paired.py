"""Cluster whose requests are prefilled by one engine and decoded by another, which fetches the KV.

Decisions are those of production: a pair policy chooses the engines, and each scheduler holds,
fetches and revokes KV cache. A failed hand-off ends as an ordinary prefill at the decode engine.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappush
from itertools import count
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.routing.disaggregation.policy import (
    DecodeChoice,
    EnginePair,
    PairPolicy,
    PairRequest,
    RoleChange,
)
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from gllm.scheduler.kv_transfers import KvFetch
from gllm.scheduler.output_lengths import LengthEstimate, LengthPredictor
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.cluster.cluster import (
    ClusterChange,
    ClusterRun,
    SimulatedCluster,
    simulate_cluster,
)
from gllm.sim.cluster.engine import ClusterEngine
from gllm.sim.cluster.handoffs import (
    HandoffRecord,
    KvNetwork,
    KvTransfer,
    LinkFailure,
    SimulatedHandoff,
    make_handoff_record,
)
from gllm.sim.cluster.requests import ClusterRequest
from gllm.sim.cluster.router import ClusterRouter, RouterNeeds, make_router
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import ABORT, EventLoop
from gllm.sim.workloads.length_predictions import OracleLengthPredictor, make_query
from gllm.sim.workloads.requests import OUTPUT_TOKEN_ID, WorkloadRequest

TransferSeconds = Callable[[int], float]
"""Returns the part of a KV transfer's time in seconds that does not overlap with computation, by
number of prompt tokens."""


class PairRouter(ClusterRouter):
    """Router for separate prefill and decode: a policy chooses both engines of each request.

    Args:
        policy: Policy that chooses a prefill and a decode engine; must be new.
        lengths: Predictor of output lengths; must be new. None: the true ones.
    """

    needs = RouterNeeds(statistics=True)

    def __init__(self, policy: PairPolicy, lengths: LengthPredictor | None = None) -> None:
        self._policy = policy
        self._lengths = lengths or OracleLengthPredictor()
        self._pairs: dict[int, EnginePair] = {}
        self._estimates: dict[int, LengthEstimate] = {}
        """Estimates of the unfinished requests, by sequence id of the workload."""
        self.decode_choice = policy.decode_choice

    def route(
        self, request: ClusterRequest, engines: Sequence[ClusterEngine], now: float
    ) -> str | None:
        """Return the prefill engine that the policy chooses; `pair` has the decode engine too."""
        pair, seq = None, request.request.seq
        if engines:
            snapshots = [engine.snapshot(now) for engine in engines]
            pair = self._policy.choose(self._describe(request.request), snapshots, now)
        if pair is None:
            self._pairs.pop(seq, None)
            return None
        self._pairs[seq] = pair
        return pair.prefill

    def pair(self, request: SchedulerRequest) -> EnginePair:
        """Return the prefill and decode engine of a request that has been routed."""
        return self._pairs[request.seq]

    def route_decode(
        self, request: SchedulerRequest, engines: Sequence[ClusterEngine], now: float
    ) -> str | None:
        """Choose the decode engine of a request; return its name, or None if there is none."""
        snapshots = [engine.snapshot(now) for engine in engines]
        name = self._policy.choose_decode(self._describe(request), snapshots, now)
        self._pairs[request.seq] = self._pairs[request.seq]._replace(decode=name)
        return name

    def role_changes(self, engines: Sequence[ClusterEngine], now: float) -> list[RoleChange]:
        """Return the engines whose role (prefill, decode or mixed) the policy changes now."""
        return self._policy.role_changes([engine.snapshot(now) for engine in engines], now)

    def on_prefill_ended(self, request: SchedulerRequest, now: float) -> None:
        """Notify the policy that a request has its first token."""
        self._policy.on_prefill_ended(request.seq, now)

    def on_finished(self, request: SchedulerRequest, now: float) -> None:
        """Notify the policy that a request has finished, and the predictor of its length."""
        self._pairs.pop(request.seq, None)
        # Simulated outputs have their maximum length.
        self._estimate(request).record(request.max_tokens)
        del self._estimates[request.seq]
        self._policy.on_ended(request.seq, now)

    def on_engine_lost(self, engine: str) -> None:
        """Notify the policy of the loss of an engine."""
        self._policy.on_engine_lost(engine)

    def predict_output_tokens(self, request: SchedulerRequest) -> int:
        """Return the predicted output length of a request, counted from its prompt."""
        return max(1, round(self._estimate(request).likely()))

    def _estimate(self, request: SchedulerRequest) -> LengthEstimate:
        """Return the estimate of a request's output length, made when it is first needed."""
        if request.seq not in self._estimates:
            query = make_query(request, self._lengths)
            self._estimates[request.seq] = self._lengths.estimate(query)
        return self._estimates[request.seq]

    def _describe(self, request: SchedulerRequest) -> PairRequest:
        # Tokens that exist already are part of the prompt.
        num_known = len(request.outputs[0]) if request.outputs else 0
        predicted = max(1, round(self._estimate(request).after(num_known).likely()))
        return PairRequest(request.seq, len(request.prompt_token_ids) + num_known, predicted)


RENEWAL_SECONDS = HOLD_LEASE_SECONDS / 3
"""Time between the renewals of a hold's lease by the router."""
ROLE_SECONDS = 1.0
"""Smallest interval in seconds at which the pair policy may change roles."""


class PairedRun(NamedTuple):
    """Result of a simulated cluster with separate prefill and decode engines."""

    cluster: ClusterRun
    handoffs: dict[int, HandoffRecord]
    """Times of the last move from a prefill to a decode engine, of each request that moved, by
    position in the workload."""


class PairedCluster(SimulatedCluster):
    """Simulated cluster with separate prefill and decode engines and KV transfers between them.

    Args:
        router: Chooses the prefill and the decode engine of each request.
        network: Network links that carry KV cache between the engines.
    """

    def __init__(
        self, router: PairRouter, network: KvNetwork, loop: EventLoop | None = None
    ) -> None:
        super().__init__(router, loop)
        self._kv_listener = self
        self._pairs = router
        self._network = network
        self._tickets = count(1)
        self._prefill_seqs: dict[int, int] = {}
        """Sequence at the prefill engine, by position of the request."""
        self._handoffs: dict[int, SimulatedHandoff] = {}
        """Hand-offs under way and ended ones, the latest of each request."""
        self._by_ticket: dict[int, SimulatedHandoff] = {}
        """Hand-offs whose blocks are held."""
        self._by_seq: dict[tuple[str, int], SimulatedHandoff] = {}
        """Hand-offs that have a decode engine, by its name and the sequence there."""
        self._broken_paths: set[tuple[str, str]] = set()
        self._has_renewal = False
        self._next_role_time = 0.0

    def fail_links(self, failures: Iterable[LinkFailure]) -> None:
        """Schedule failures of paths between engines."""
        for failure in failures:
            self.loop.push(failure.time, ABORT, self._break_path, failure)
            self.loop.push(failure.time + failure.seconds, ABORT, self._mend_path, failure)

    def _break_path(self, now: float, failure: LinkFailure) -> None:
        self._broken_paths.add((failure.source, failure.target))
        self.transfers.on_path_lost(failure.source, failure.target, now)

    def _mend_path(self, now: float, failure: LinkFailure) -> None:
        self._broken_paths.discard((failure.source, failure.target))

    # Routing.

    def _dispatch(self, request: ClusterRequest, now: float) -> None:
        """Send a request to a prefill engine, or with its held KV cache to a decode engine."""
        self._change_roles(now)
        handoff = self._handoffs.get(request.index)
        if handoff is not None and handoff.has_source:
            if request.num_output_tokens == handoff.num_output_tokens:
                self._continue(handoff, None, now)
                return
            self._release(handoff, now)
        super()._dispatch(request, now)

    def _submit(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        """Submit a new request, for one token if another engine decodes it."""
        request.kv_ticket = request.kv_source_tokens = 0
        self._predict_output(request)
        pair = self._pairs.pair(request.request)
        num_missing = request.request.max_tokens - request.num_output_tokens
        if pair.decode != pair.prefill and num_missing > 1:
            request.kv_ticket = next(self._tickets)
        seq = engine.submit(request, self._submissions, now)
        if seq is None or not request.kv_ticket:
            return
        self._prefill_seqs[request.index] = seq
        if self._pairs.decode_choice is DecodeChoice.FIRST_CHUNK and pair.decode is None:
            engine.watched_seqs.add(seq)

    def _predict_output(self, request: ClusterRequest) -> None:
        """Give a request its predicted output length, which schedulers read."""
        if not request.request.predicted_output_tokens:
            num_tokens = self._pairs.predict_output_tokens(request.request)
            request.request = request.request._replace(predicted_output_tokens=num_tokens)

    def on_first_chunk(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        """Choose the decode engine after the first chunk of a prompt."""
        self._pairs.route_decode(request.request, self._routable, now)

    def on_finished(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        """Move a request to its decode engine after prefill, or finish a decoded request."""
        if not request.kv_ticket:
            super().on_finished(engine, request, now)
            return
        known = request.request.outputs[0] if request.request.outputs else []
        outputs = [[*known, OUTPUT_TOKEN_ID]]
        request.request = request.request._replace(outputs=outputs)
        handoff = SimulatedHandoff(
            request,
            request.kv_ticket,
            engine.name,
            self._prefill_seqs.pop(request.index),
            len(request.request.prompt_token_ids) + len(known),
            request.num_output_tokens,
            now,
        )
        request.kv_ticket = 0
        self._handoffs[request.index] = self._by_ticket[handoff.ticket] = handoff
        self._pairs.on_prefill_ended(request.request, now)
        self._renew_later(now)
        self._continue(handoff, self._pairs.pair(request.request).decode, now)

    def _continue(self, handoff: SimulatedHandoff, target: str | None, now: float) -> None:
        """Send a request with its first token to its decode engine.

        Args:
            handoff: The hand-off; its blocks are held.
            target: Engine that has been chosen before; None to choose one now.
            now: Time in seconds.
        """
        request = handoff.request
        names = [engine.name for engine in self._routable]
        if target not in names:
            target = self._pairs.route_decode(request.request, self._routable, now)
        if target is None:
            heappush(self._queue, (self._rank(request), request))
            return
        self._drop_decode(handoff)
        engine = self.engines[target]
        request.kv_source_tokens = handoff.num_tokens
        handoff.target = target
        seq = engine.submit(request, self._submissions, now)
        if seq is not None:
            handoff.decode_seq = seq
            self._by_seq[target, seq] = handoff

    def _pull(self, now: float, engine: ClusterEngine) -> None:
        """Route the waiting requests again, over all engines."""
        engine.has_pull_event = False
        waiting, self._queue = sorted(self._queue), []
        for _, request in waiting:
            self._dispatch(request, now)

    def _change_roles(self, now: float) -> None:
        if now < self._next_role_time:
            return
        self._next_role_time = now + ROLE_SECONDS
        for change in self._pairs.role_changes(self._routable, now):
            self.engines[change.engine].role = change.role

    # Fetches and holds.

    def on_fetch(self, engine: ClusterEngine, fetch: KvFetch, now: float) -> None:
        """Start the transfer of a fetched KV cache, or report that the cache is lost."""
        handoff = self._by_seq[engine.name, fetch.seq]
        handoff.fetch_time = now
        if not fetch.num_tokens:
            handoff.arrival_time = now
            self._release(handoff, now)
            return
        handoff.is_fetching = True
        path = handoff.source, engine.name
        if not handoff.has_source or path in self._broken_paths:
            self._end_fetch(handoff, False, now)
        elif handoff.source == engine.name:
            handoff.arrival_time = now
            self._end_fetch(handoff, True, now)
        else:
            handoff.transfer = self._make_transfer(handoff, fetch.num_tokens)
            if not self.start_transfer(handoff.transfer):
                # The source is dead, which the engine learns with everybody else.
                handoff.transfer = None

    def _make_transfer(self, handoff: SimulatedHandoff, num_tokens: int) -> KvTransfer:
        source, target = handoff.source, handoff.target

        def on_done(now: float) -> None:
            handoff.arrival_time = now
            self._end_fetch(handoff, True, now)

        return KvTransfer(
            source,
            target,
            self._network.num_bytes(source, target, num_tokens),
            self._network.path(source, target, self.loop),
            on_done,
            lambda now: self._on_lost(handoff, now),
        )

    def _on_lost(self, handoff: SimulatedHandoff, now: float) -> None:
        # If the decode engine is gone, another one may fetch the blocks.
        if handoff.transfer is not None:
            self._end_fetch(handoff, False, now)

    def _end_fetch(self, handoff: SimulatedHandoff, is_ok: bool, now: float) -> None:
        """Report the end of a fetch to the decode engine and free the blocks at the source.

        A victim keeps its source, and fetches again later.
        """
        handoff.transfer = None
        if handoff.is_fetching:
            handoff.is_fetching = False
            pipeline = self.engines[handoff.target].pipeline
            if pipeline.finish_fetch(handoff.decode_seq, is_ok, now):
                return
            self._by_seq.pop((handoff.target, handoff.decode_seq), None)
        self._release(handoff, now)

    def _release(self, handoff: SimulatedHandoff, now: float) -> None:
        """Free the blocks at the source, which are no longer read."""
        if not handoff.has_source:
            return
        handoff.has_source = False
        del self._by_ticket[handoff.ticket]
        source = self.engines[handoff.source]
        source.pipeline.confirm_revocation(handoff.ticket, now)
        self._end_if_drained(source, now)

    def on_fetch_cancelled(self, engine: ClusterEngine, seq: int, now: float) -> None:
        """Stop a fetch, and free the blocks at the source unless they are fetched later."""
        handoff = self._by_seq.get((engine.name, seq))
        if handoff is not None:
            self._abandon(handoff, now)

    def on_revoked(self, engine: ClusterEngine, ticket: int, now: float) -> None:
        """Free KV blocks kept on the prefill engine; the decode engine recomputes the prompt."""
        self._abandon(self._by_ticket[ticket], now)

    def _abandon(self, handoff: SimulatedHandoff, now: float) -> None:
        if handoff.transfer is not None:
            self.transfers.cancel(handoff.transfer)
        self._end_fetch(handoff, False, now)

    def _drop_decode(self, handoff: SimulatedHandoff) -> None:
        """Forget the decode engine that a request had, which is gone."""
        self._by_seq.pop((handoff.target, handoff.decode_seq), None)
        handoff.is_fetching, handoff.fetch_time, handoff.transfer = False, None, None

    def _renew_later(self, now: float) -> None:
        if not self._has_renewal:
            self._has_renewal = True
            self.loop.push(now + RENEWAL_SECONDS, ABORT, self._renew, None)

    def _renew(self, now: float, _: None) -> None:
        """Renew the leases of all holds, as the router does."""
        self._has_renewal = False
        for handoff in self._by_ticket.values():
            transfers = self.engines[handoff.source].pipeline.scheduler.transfers
            transfers.renew([handoff.ticket], now)
        if self._by_ticket:
            self._renew_later(now)

    # Engines that end.

    def _end_if_drained(self, engine: ClusterEngine, now: float) -> None:
        """End a draining engine that has no requests, transfers and held blocks."""
        if engine.is_draining and any(
            handoff.source == engine.name for handoff in self._by_ticket.values()
        ):
            return
        super()._end_if_drained(engine, now)

    def _end(self, engine: ClusterEngine, now: float) -> None:
        """End an engine: its held blocks are lost, its requests are routed again."""
        for handoff in list(self._by_ticket.values()):
            if handoff.source == engine.name:
                handoff.has_source = False
                del self._by_ticket[handoff.ticket]
                if handoff.transfer is None:
                    # It may wait for a dead source.
                    self._end_fetch(handoff, False, now)
            elif handoff.target == engine.name:
                self._drop_decode(handoff)
        super()._end(engine, now)

    # Results.

    def run_pairs(self) -> PairedRun:
        """Run the simulation to its end and return the records of requests and of KV transfers."""
        run = self.run()
        records = {
            index: make_handoff_record(handoff, self._start_time)
            for index, handoff in sorted(self._handoffs.items())
        }
        return PairedRun(run, records)

    def _start_time(self, engine: str, seq: int) -> float | None:
        for record in self.engines[engine].records:
            if seq in record.requests:
                return record.requests[seq].first_scheduled_time
        return None


def simulate_pairs(
    deployments: Mapping[str, Deployment],
    roles: Mapping[str, str],
    jobs: Iterable[WorkloadRequest],
    policy: PairPolicy,
    network: KvNetwork,
    changes: Iterable[ClusterChange] = (),
    link_failures: Iterable[LinkFailure] = (),
    lengths: LengthPredictor | None = None,
    check: Callable[[], None] | None = None,
) -> PairedRun:
    """Simulate a workload on a cluster with separate prefill and decode engines.

    Args:
        deployments: Model, cost model and configuration of each engine by name; all are ready at
            time 0.
        roles: prefill, decode or mixed (both), by engine name; default: mixed.
        jobs: Requests sorted by arrival time; may be a generator.
        policy: Policy that chooses a prefill and a decode engine for each request; must be new.
        network: Network links that carry KV cache between the engines; must be new.
        changes: Scheduled crashes, drains and starts of engines.
        link_failures: Scheduled failures of the network path between two engines.
        lengths: Predictor of output lengths; must be new. None: the true ones.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        ValueError: The workload is not sorted, a request is too long for every engine, or a change
            or a role names an engine that does not exist at its time.
    """
    unknown = set(roles) - set(deployments)
    if unknown:
        raise ValueError(
            f"roles names {', '.join(sorted(unknown))}, but the engines are "
            f"{', '.join(deployments)}: name one of these"
        )
    loop = EventLoop(check=check)
    cluster = PairedCluster(PairRouter(policy, lengths), network, loop)
    for name, deployment in deployments.items():
        links = network.pipeline_links(name, loop)
        cluster.add_engine(name, deployment, links=links, role=roles.get(name, "mixed"))
    cluster.apply_each(changes)
    cluster.fail_links(link_failures)
    cluster.submit_each(jobs)
    return cluster.run_pairs()


class SplitRun(NamedTuple):
    """Result of simulating prefill machines and decode machines one after the other."""

    lines: list[RequestTimeline]
    """Arrival and token times of each request as its client sees them, in workload order."""
    busy_seconds: float
    """Seconds of computation, summed over all machines."""
    num_preemptions: int


def simulate_pool(
    deployments: Mapping[str, Deployment],
    jobs: Sequence[WorkloadRequest],
    router: str,
    seed: int,
    check: Callable[[], None] | None = None,
) -> ClusterRun:
    """Simulate a workload on machines that each compute both prefill and decode of their requests.

    Args:
        deployments: Model, cost model and configuration of each machine by name.
        jobs: Requests sorted by arrival time.
        router: Name of the routing policy, from POLICIES.
        seed: Seed of the router's random choices.
        check: Called now and then; an error that it raises ends the simulation.
    """
    return simulate_cluster(deployments, jobs, make_router(router, seed), check=check)


def simulate_split(
    prompts: Mapping[str, Deployment],
    tokens: Mapping[str, Deployment],
    jobs: Sequence[WorkloadRequest],
    transfer_seconds: TransferSeconds,
    seed: int = 0,
    check: Callable[[], None] | None = None,
) -> SplitRun:
    """Simulate a workload on prefill machines, then on decode machines, as in the Splitwise paper.

    The prefill machines compute each request up to its first token. The decode machines receive the
    request when its KV cache has arrived, and spend no time on the prompt. KV cache leaves a
    prefill machine with the first token: full decode machines do not delay prefill machines.

    Args:
        prompts: Prefill machines by name.
        tokens: Decode machines by name; their cost models must predict no time for prompts.
        jobs: Requests sorted by arrival time.
        transfer_seconds: Returns the part of a KV transfer's time in seconds that does not overlap
            with computation, by number of prompt tokens.
        seed: Seed of the routers' random choices.
        check: Called now and then; an error that it raises ends the simulation.
    """
    first_tokens = [job._replace(num_output_tokens=1) for job in jobs]
    first = simulate_pool(prompts, first_tokens, "pending-tokens", seed, check)
    lines = [replace(first.requests[seq].line) for seq in range(len(jobs))]
    arrivals = [
        line.times[0] + transfer_seconds(job.num_prompt_tokens)
        for line, job in zip(lines, jobs, strict=True)
    ]
    order = sorted(
        (seq for seq, job in enumerate(jobs) if job.num_output_tokens > 1),
        key=arrivals.__getitem__,
    )
    second = simulate_pool(
        tokens,
        [jobs[seq]._replace(arrival_seconds=arrivals[seq]) for seq in order],
        "least-tokens",
        seed,
        check,
    )
    for index, seq in enumerate(order):
        decoded = second.requests[index].line
        # The second pool's first token stands for the one that the client has already.
        lines[seq] = RequestTimeline(
            jobs[seq].arrival_seconds, [*lines[seq].times, *decoded.times[1:]], decoded.num_tokens
        )
    requests = [*first.requests.values(), *second.requests.values()]
    return SplitRun(
        lines,
        first.busy_seconds() + second.busy_seconds(),
        sum(served.num_preemptions for served in requests),
    )
