"""Two engines that hand requests to each other, without arithmetic and without a network.

Each engine is a `Pipeline`, whose slots hold a digest of everything up to their position. A mover
copies slots from one engine to the other, a few at a time and in any order, and reads and writes
until it has confirmed that it does not. Blocks that return to a pool too early are therefore found:
as a wrong digest at the source, or in the context of a row.
"""

from dataclasses import dataclass
from random import Random

import msgspec

from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import ScheduleEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS, ReadableKv
from gllm.scheduler.kv_transfers import KvFetch, PrefetchRequest
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.scheduler.pipeline import Pipeline


@dataclass
class ClientRequest:
    """A request of a client and what the router knows of it."""

    request: SchedulerRequest
    """As one engine would get it; its id is the client's."""
    engine: int
    """Engine that has it."""
    seq: int
    """Its first sequence there."""
    is_prefill: bool
    """True while an engine computes its prompt for the other."""
    ticket: int = 0
    """Of the hold that its KV is fetched from; 0 without."""
    push_ticket: int = 0
    """Ticket under which its prompt is pushed; 0 without."""


@dataclass
class Transfer:
    """A fetch of the mover."""

    engine: int
    """Receiver."""
    fetch: KvFetch
    ticket: int
    num_done: int = 0
    is_broken: bool = False
    """True if it will fail: it writes garbage until it has ended."""
    pushed_seq: int | None = None
    """Sequence that computes the tokens meanwhile; None if they are held."""


class EnginePair:
    """Two engines, the router in front of them and the mover between them."""

    def __init__(
        self, configs: list[SchedulerConfig], rng: Random, has_foreign: bool = True
    ) -> None:
        """has_foreign: routers of other projects hand some of the requests off."""
        self.configs = configs
        self.has_foreign = has_foreign
        self.rng = rng
        self.logs: list[list[bytes]] = [[], []]
        """Step log of each engine since its start: events as JSON."""
        self.engines = [self._start(engine) for engine in range(len(configs))]
        self.clients: dict[int, ClientRequest] = {}
        self.requests: dict[int, SchedulerRequest] = {}
        self.by_seq: dict[tuple[int, int], int] = {}
        """Client's id of each request, by engine and first sequence."""
        self.next_seq = [0, 0]
        self.outputs: dict[int, list[list[int]]] = {}
        self.ended: dict[int, list[str]] = {}
        self.holds: list[dict[int, ReadableKv]] = [{}, {}]
        """Holds that may be read, of each engine."""
        self.held_tokens: dict[int, list[int]] = {}
        """Tokens of the sequence of each ticket."""
        self.sources: dict[tuple[int, int], int] = {}
        """Ticket of each fetching sequence."""
        self.revoked: list[set[int]] = [set(), set()]
        self.transfers: list[Transfer] = []
        self.abandoned: set[int] = set()
        """Tickets that the router has forgotten: their leases expire."""
        self.used: set[int] = set()
        """Tickets that the mover has begun to read."""
        self.ended_tickets: set[int] = set()
        """Tickets that are never served again."""
        self.num_tickets = self.num_pushed = self.num_adopted = 0
        self.num_repeated = 0
        """Fetches that ended because another sequence needed their blocks, to start again."""
        self.num_fetched = self.num_failed = self.num_revoked = self.num_fetched_again = 0

    def _start(self, engine: int) -> Pipeline:
        """An engine without requests, which writes a step log."""
        pipeline, log = Pipeline(self.configs[engine]), self.logs[engine]
        log.clear()
        pipeline.scheduler = LoggedScheduler(
            pipeline.config,
            lambda event: log.append(msgspec.json.encode(event)),
            lambda: pipeline.now,
        )
        return pipeline

    def check_replays(self) -> None:
        """The step log of each engine makes the same plans again."""
        for pipeline, log in zip(self.engines, self.logs, strict=True):
            again = Scheduler(pipeline.config)
            for line in log:
                event = msgspec.json.decode(line, type=StepLogEvent)
                plan = replay_event(again, event)
                if isinstance(event, ScheduleEvent):
                    assert plan == event.plan
            assert again.stats() == pipeline.scheduler.stats()

    def add(self, request: SchedulerRequest, engine: int, is_handed_off: bool) -> None:
        """Send a request of a client to an engine; if handed off, the other one decodes it."""
        client_id = len(self.requests)
        self.requests[client_id] = request
        self.outputs[client_id] = [[] for _ in range(request.n)]
        self.ended[client_id] = []
        self.clients[client_id] = ClientRequest(request, engine, 0, False)
        is_handed_off = is_handed_off and (request.max_tokens > 1 or request.n > 1)
        is_handed_off = is_handed_off and len(request.prompt_token_ids) > 1
        if not is_handed_off or not request.reads_prefix_cache:
            self._submit(client_id, engine, request)
            return
        self.num_tickets += 1
        first = request._replace(
            max_tokens=1,
            n=1,
            kv_ticket=self.num_tickets,
            is_ticket_foreign=self._is_foreign(client_id),
        )
        self.clients[client_id].is_prefill = True
        self._submit(client_id, engine, first)

    def _is_foreign(self, client_id: int) -> bool:
        """Return True if a router of another project hands the request off."""
        return self.has_foreign and client_id % 5 == 0

    def _submit(self, client_id: int, engine: int, request: SchedulerRequest) -> None:
        client = self.clients[client_id]
        client.engine, client.seq = engine, self.next_seq[engine]
        self.next_seq[engine] += request.n
        self.by_seq[engine, client.seq] = client_id
        self.engines[engine].add(request._replace(seq=client.seq))

    def abort(self, client_id: int) -> None:
        """The client has left; nobody needs its hold any more."""
        client = self.clients.pop(client_id)
        self._release_prefetch(client)
        num_choices = 1 if client.is_prefill else client.request.n
        self.engines[client.engine].abort(list(range(client.seq, client.seq + num_choices)))
        self.ended[client_id].append("abort")
        if client.ticket:
            for engine in self.engines:
                engine.scheduler.transfers.release([client.ticket])

    def restart(self, engine: int) -> None:
        """An engine dies with all its KV; the other one continues its requests.

        Those without a token of it may return to it after its start, to fetch what is still held.
        """
        self.engines[engine] = self._start(engine)
        self.next_seq[engine] += 1000
        self.transfers = [each for each in self.transfers if each.engine != engine]
        self.holds[engine].clear()
        self.revoked[engine].clear()
        for client_id, client in list(self.clients.items()):
            if client.engine != engine:
                continue
            request = client.request
            output = self.outputs[client_id][0]
            hold = self.holds[1 - engine].get(client.ticket)
            num_known = sum(map(len, self.outputs[client_id])) - (request.n == 1)
            if hold is not None and not num_known and self.rng.random() < 0.5:
                # The dead reader has gone, so another one may use the ticket.
                self.used.discard(client.ticket)
                self.num_fetched_again += 1
                self._submit_decode(client_id, engine, hold.num_tokens)
                continue
            if request.n == 1 and output:
                request = request._replace(outputs=[output])
            else:
                self.outputs[client_id] = [[] for _ in range(request.n)]
                self.ended[client_id].clear()
            self._release_prefetch(client)
            self.engines[1 - engine].scheduler.transfers.release([client.ticket])
            client.is_prefill, client.ticket = False, 0
            self._submit(client_id, 1 - engine, request)

    def step(self, engine: int, fails: bool = False) -> bool:
        """One turn of an engine's driver: commit or schedule; False if it can do neither."""
        pipeline, rng = self.engines[engine], self.rng
        scheduler = pipeline.scheduler
        if pipeline.plans and rng.random() < 0.5:
            self._commit(engine)
            return True
        living = [
            client.ticket or client.push_ticket
            for client_id, client in self.clients.items()
            if not self._is_foreign(client_id)
        ]
        scheduler.transfers.renew(living, pipeline.now)
        self._start_transfers(engine, scheduler.transfers.start_fetches(pipeline.now))
        plan = pipeline.schedule(fails)
        self._start_pushes(engine, scheduler.transfers.pop_readable())
        for seq in scheduler.transfers.pop_cancellations():
            self._cancel(engine, seq)
        revocations = scheduler.transfers.pop_revocations(pipeline.now)
        self.revoked[engine].update(revocations)
        self.num_revoked += len(revocations)
        if plan is None and pipeline.plans:
            self._commit(engine)
            return True
        return plan is not None

    def _commit(self, engine: int) -> None:
        pipeline = self.engines[engine]
        outcome = pipeline.commit()
        for hold in pipeline.scheduler.transfers.pop_readable():
            if hold.ticket in self.ended_tickets:
                self._confirm(engine, hold.ticket)
            else:
                self.holds[engine][hold.ticket] = hold
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            client_id, choice = self._find(engine, seq)
            if client_id in self.clients:
                is_discarded = self.clients[client_id].is_prefill and self.requests[client_id].n > 1
                if not is_discarded:
                    self.outputs[client_id][choice].append(token)
        for end in outcome.finished:
            client_id, _ = self._find(engine, end.seq)
            client = self.clients.get(client_id)
            if client is None:
                pipeline.scheduler.transfers.release([end.kv_ticket])
            elif client.is_prefill and end.finish_reason != "error":
                self._hand_off(client_id, end.kv_ticket, end.num_kv_tokens)
            else:
                self._end(client_id, end.finish_reason)

    def _hand_off(self, client_id: int, ticket: int, num_tokens: int) -> None:
        """Token 1 is there: send the request to the other engine unless it has ended."""
        client = self.clients[client_id]
        request = client.request
        tokens = list(request.prompt_token_ids)
        client.is_prefill = False
        if request.n == 1 and not ticket:
            assert self.outputs[client_id][0][-1] in request.stop_token_ids
            self._end(client_id, "stop")
            return
        if ticket:
            assert num_tokens == len(tokens)
            self.held_tokens[ticket] = tokens
        if self.rng.random() < 0.03:
            self.abandoned.add(ticket)
            ticket = num_tokens = 0
            if self.rng.random() < 0.5:
                self._release_prefetch(client)
        client.ticket = ticket
        self._submit_decode(client_id, 1 - client.engine, num_tokens)

    def _submit_decode(self, client_id: int, receiver: int, num_tokens: int) -> None:
        """Send a request whose prompt is computed, with the hold that has so many tokens of it."""
        client = self.clients[client_id]
        request = client.request
        if request.n == 1:
            request = request._replace(outputs=[list(self.outputs[client_id][0])])
        else:
            num_tokens = min(num_tokens, len(request.prompt_token_ids) - 1)
        self._submit(
            client_id,
            receiver,
            request._replace(
                kv_source_tokens=num_tokens,
                kv_source_ticket=client.ticket,
                is_kv_foreign=self._is_foreign(client_id),
            ),
        )
        if client.ticket:
            self.sources[receiver, client.seq] = client.ticket

    def _end(self, client_id: int, reason: str) -> None:
        self.ended[client_id].append(reason)
        self._release_prefetch(self.clients[client_id])
        if len(self.ended[client_id]) == self.requests[client_id].n or reason == "error":
            client = self.clients[client_id]
            if len(self.ended[client_id]) < client.request.n:
                self.abort(client_id)
            else:
                del self.clients[client_id]

    def _find(self, engine: int, seq: int) -> tuple[int, int]:
        """Return the client's id of a sequence and the number of its choice."""
        first = max(f for e, f in self.by_seq if e == engine and f <= seq)
        return self.by_seq[engine, first], seq - first

    def _start_transfers(self, engine: int, fetches: list[KvFetch]) -> None:
        for fetch in fetches:
            ticket = self.sources[engine, fetch.seq]
            if fetch.num_tokens:
                is_broken = ticket in self.used
                self.used.add(ticket)
                seq = self._find_pushed_seq(1 - engine, ticket) if fetch.is_early else None
                self.transfers.append(Transfer(engine, fetch, ticket, 0, is_broken, seq))
            elif not fetch.is_early:
                self.engines[1 - engine].scheduler.transfers.release([ticket])
            self.num_adopted += fetch.is_early and fetch.seq >= 0

    def _start_pushes(self, engine: int, pushes: list[ReadableKv]) -> None:
        """Serve prompts that are computed, and let the other engine prefetch most of them."""
        for push in pushes:
            assert push.ticket not in self.ended_tickets
            if not push.is_first:
                continue
            self.num_pushed += 1
            seq = self._find_pushed_seq(engine, push.ticket)
            if seq is None:
                continue
            client_id, _ = self._find(engine, seq)
            client, other = self.clients[client_id], self.engines[1 - engine]
            request, prompt = client.request, list(client.request.prompt_token_ids)
            self.held_tokens[push.ticket] = prompt
            if request.n > 1 or self.rng.random() < 0.2:
                continue
            client.push_ticket = push.ticket
            prefetch = PrefetchRequest(
                push.ticket, prompt, request.max_tokens, request.priority, request.cache_salt
            )
            number = other.scheduler.transfers.prefetch(prefetch, other.now)
            self.sources[1 - engine, number] = push.ticket

    def _find_pushed_seq(self, engine: int, ticket: int) -> int | None:
        """Return the sequence that is computed under a ticket, if it has not ended."""
        for seq, sequence in self.engines[engine].scheduler.table.sequences.items():
            if sequence.request.kv_ticket == ticket and not sequence.is_finished:
                return seq
        return None

    def _release_prefetch(self, client: ClientRequest) -> None:
        if client.push_ticket:
            for engine in self.engines:
                engine.scheduler.transfers.release([client.push_ticket])

    def _cancel(self, engine: int, seq: int) -> None:
        for transfer in self.transfers:
            if (transfer.engine, transfer.fetch.seq) == (engine, seq):
                transfer.is_broken = True
                return
        if seq >= 0:
            self.engines[1 - engine].scheduler.transfers.release([self.sources[engine, seq]])

    def move(self, fails: float = 0.0) -> bool:
        """One step of the mover; False if it has nothing to do."""
        rng = self.rng
        engine = rng.choice([e for e in (0, 1) if self.revoked[e]] or [2])
        if engine < 2 and (not self.transfers or rng.random() < 0.3):
            self._confirm(engine, rng.choice(sorted(self.revoked[engine])))
            return True
        if not self.transfers:
            return False
        transfer = rng.choice(self.transfers)
        num_left = transfer.fetch.num_tokens - transfer.num_done
        held = self.holds[1 - transfer.engine].get(transfer.ticket)
        if held is None and transfer.pushed_seq is not None:
            held = self._find_pushed(transfer)
            if held is not None and not transfer.is_broken:
                first = transfer.fetch.first_token + transfer.num_done
                num_ready = min(num_left, held.num_tokens - first)
                if num_ready <= 0:
                    return False
                self._copy(transfer, held, num_ready)
                transfer.num_done += num_ready
                self._on_moved(transfer, num_ready == num_left)
                return True
        transfer.is_broken |= held is None or rng.random() < fails
        if transfer.is_broken and rng.random() < 0.5:
            num_left = 0
        count = min(num_left, rng.randint(1, 8))
        self._copy(transfer, None if transfer.is_broken else held, count)
        transfer.num_done += count
        self._on_moved(transfer, count == num_left)
        return True

    def _on_moved(self, transfer: Transfer, is_last: bool) -> None:
        scheduler = self.engines[transfer.engine].scheduler
        scheduler.transfers.record_progress(transfer.fetch.seq)
        if is_last:
            self._finish(transfer)

    def _find_pushed(self, transfer: Transfer) -> ReadableKv | None:
        """Return what is computed of a prompt; None if its push has ended early."""
        assert transfer.pushed_seq is not None
        scheduler = self.engines[1 - transfer.engine].scheduler
        sequence = scheduler.table.sequences.get(transfer.pushed_seq)
        if sequence is None or sequence.is_freeing_blocks or sequence.num_preemptions:
            return None
        return ReadableKv(transfer.ticket, sequence.num_computed_tokens, sequence.block_ids)

    def _copy(self, transfer: Transfer, hold: ReadableKv | None, count: int) -> None:
        """Copy some tokens; garbage if there is no hold."""
        source, target = self.engines[1 - transfer.engine], self.engines[transfer.engine]
        from_size, to_size = source.config.block_size, target.config.block_size
        first = transfer.fetch.first_token
        for offset in range(transfer.num_done, transfer.num_done + count):
            value: int | None = hash(("garbage", offset))
            if hold is not None:
                block, slot = divmod(first + offset, from_size)
                at = hold.block_ids[block] * from_size + slot
                values = {stage.cache[at] for stage in source.stages}
                (value,) = values
                assert value == self._digest(transfer.ticket, first + offset)
            block, slot = divmod(offset, to_size)
            for stage in target.stages:
                stage.cache[transfer.fetch.block_ids[block] * to_size + slot] = value

    def _digest(self, ticket: int, position: int) -> int:
        digest = 0
        for token in self.held_tokens[ticket][: position + 1]:
            digest = hash((digest, token))
        return digest

    def _finish(self, transfer: Transfer) -> None:
        self.transfers.remove(transfer)
        engine, is_ok = self.engines[transfer.engine], not transfer.is_broken
        self.num_fetched += is_ok
        self.num_failed += not is_ok
        if is_ok:
            # The receiver has all of it: the source need not ask any more.
            self._confirm(1 - transfer.engine, transfer.ticket)
        if engine.scheduler.transfers.finish_fetch(transfer.fetch.seq, is_ok):
            # The reader has gone without all of the blocks, so another one may use the ticket.
            self.used.discard(transfer.ticket)
            self.num_repeated += 1
        elif not is_ok and not transfer.fetch.is_early:
            source = self.engines[1 - transfer.engine].scheduler
            source.transfers.release([transfer.ticket])
        engine.check()

    def _confirm(self, engine: int, ticket: int) -> None:
        self.ended_tickets.add(ticket)
        self.revoked[engine].discard(ticket)
        self.holds[engine].pop(ticket, None)
        self.engines[engine].scheduler.transfers.confirm_revocation(ticket)
        self.engines[engine].check()

    def drain(self, limit: int = 50_000) -> None:
        """Run until every request has ended and no hold is left."""
        for _ in range(limit):
            progress = [self.step(engine) for engine in (0, 1)] + [self.move()]
            if any(progress):
                continue
            waits = any(engine.scheduler.transfers.has_pending_fetches for engine in self.engines)
            if not self.clients and not any(self.holds) and not waits:
                return
            # Nobody but the lease ends a hold or a prefetch that the router has forgotten.
            forgotten = [t for holds in self.holds for t in holds if t in self.abandoned] or waits
            assert forgotten, "requests wait, and nothing will ever happen"
            for engine in self.engines:
                engine.now += HOLD_LEASE_SECONDS
        raise AssertionError("no end in sight")
