"""Random lives of a fleet: every reader gets the exact output of its request once."""

import math
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.messages.requests import EngineOutputs, PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.router.client import FleetClient
from gllm.routing.engine_losses import TOGETHER_SECONDS, LossKind
from gllm.routing.rounds import PlacementRounds
from gllm.runtime.head.request_stream import RequestStream
from tests.support.engines.request_reader import RequestReader
from tests.support.examples import num_examples
from tests.support.routing.fake_engine import FakeEngine

NAMES = ("a", "b", "c", "d")
NUMERICS = ("x", "y")
MIGRATION_LIMIT = 3
MOVE_SECONDS = TOGETHER_SECONDS / 2
"""Time between two moves: suspects have to wait for some of them."""


class FleetLife:
    """Requests, tokens, deaths, departures and arrivals of engines in any order."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        """Time in seconds."""
        self.client = FleetClient(
            self.choose, MIGRATION_LIMIT, numerics_patience=math.inf, clock=lambda: self.now,
            rounds=PlacementRounds(
                self.rng.choice((0.0, 0.0, 3 * MOVE_SECONDS)), self.rng.random() < 0.5
            ),
        )  # fmt: skip
        self.engines: dict[str, FakeEngine] = {}
        self.closed: set[str] = set()
        """Engines that are not chosen."""
        self.readers: list[RequestReader] = []
        self.poisons: list[RequestReader] = []
        self.late: list[tuple[str, EngineOutputs]] = []
        """Messages that engines sent in sessions that have ended."""
        self.num_deaths = 0
        self.num_runs = 0
        """Number of starts of engines."""
        self.runs: dict[str, int] = {}
        """Latest start of each engine."""
        for name, numerics in zip(NAMES, "xxy", strict=False):
            self.attach(name, numerics)

    def play(self, num_moves: int) -> None:
        """Play the life and check it after each move."""
        moves = {
            self.run: 24,
            self.submit_some: 12,
            self.start_engine: 6,
            self.close_or_open: 4,
            self.die: 4,
            self.leave: 2,
            self.flap: 2,
            self.migrate: 4,
            self.give_back: 2,
            self.abort: 2,
            self.abort_by_id: 0.5,
            self.reject_parked: 0.5,
            self.repeat_poison: 1,
            self.deliver_late: 3,
        }
        needs_engine = {self.die, self.leave, self.flap, self.migrate, self.give_back}
        for _ in range(num_moves):
            self.now += MOVE_SECONDS
            (move,) = self.rng.choices(list(moves), list(moves.values()))
            if self.engines or move not in needs_engine:
                move()
            self.everything_is_exact_so_far()
            self.each_request_is_at_one_place()
            self.suspects_run_alone()
        self.finish()

    def choose(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        assert names
        assert names <= set(self.engines)
        for reader in self.readers:
            if reader.stream is stream:
                fitting = {NUMERICS[index] for index in reader.fitting()}
                assert {self.engines[name].driver.numerics for name in names} <= fitting
        names -= self.closed
        return self.rng.choice(sorted(names)) if names and self.rng.random() < 0.9 else None

    # Engines.

    def start_engine(self) -> None:
        """Start an engine, seldom under the name of another one."""
        name = self.rng.choice(NAMES)
        if name not in self.engines or self.rng.random() < 0.1:
            self.attach(name, self.rng.choice("xxy"))

    def attach(self, name: str, numerics: str) -> None:
        """Start a session; one of the same name has ended without notice."""
        if old := self.engines.get(name):
            self.expect_deaths(self.readers_at(name))
            self.end_session(old)
        engine = self.engines[name] = FakeEngine(name, numerics)
        before = self.num_poisons()
        self.num_runs += 1
        self.runs[name] = self.num_runs
        self.client.attach(name, numerics, engine.send, run=self.num_runs)
        self.check_poisons(before)

    def flap(self) -> None:
        """Let an engine be lost that lives on, with its requests aborted, and return."""
        old = self.any_engine()
        self.end_session(old)
        before = self.num_poisons()
        kind = self.rng.choice([LossKind.SILENT, LossKind.CLOSED])
        self.client.detach(old.name, "no message", kind)
        engine = self.engines[old.name] = FakeEngine(old.name, old.driver.numerics)
        self.client.attach(old.name, old.driver.numerics, engine.send, run=self.runs[old.name])
        assert self.num_poisons() == before

    def die(self) -> None:
        self.lose(self.any_engine())

    def lose(self, engine: FakeEngine) -> None:
        """Let an engine die or fall silent; some of its last messages arrive."""
        for _ in range(self.rng.randint(0, 2)):
            self.deliver_one(engine)
        before = self.num_poisons()
        self.expect_deaths(self.readers_at(engine.name))
        self.end_session(engine)
        self.client.detach(engine.name, "killed", LossKind.DIED)
        self.check_poisons(before)

    def leave(self) -> None:
        """Let an engine leave in good order: that is nobody's fault."""
        engine = self.any_engine()
        self.end_session(engine)
        before = self.num_poisons()
        self.client.detach(engine.name, "left", LossKind.PLANNED)
        assert self.num_poisons() == before

    def end_session(self, engine: FakeEngine) -> None:
        # A silent engine goes on for a while.
        if engine.driver.plans and self.rng.random() < 0.5:
            engine.commit(1)
        self.late += [(engine.name, message) for message in engine.outbox]
        engine.close()
        del self.engines[engine.name]

    def migrate(self) -> None:
        """Let the requests of an engine go on elsewhere, because of a drain or a long recovery."""
        engine, is_planned = self.any_engine(), self.rng.random() < 0.5
        at_engine = self.readers_at(engine.name)
        seqs = {seq: reader for reader in at_engine for seq in self.seqs_of(reader)}
        before, num_sent = self.num_poisons(), len(engine.inbox)
        num_moved = self.client.migrate(engine.name, is_planned)
        # The first message takes requests back; a suspect may need the engine for itself then.
        aborts = list(engine.inbox)[num_sent : num_sent + 1] if num_moved else []
        moved = {id(seqs[seq]): seqs[seq] for abort in aborts for seq in abort.seqs}  # type: ignore[union-attr]
        assert len(moved) == num_moved
        if not is_planned and moved:
            self.expect_deaths(list(moved.values()))
            for reader in moved.values():
                reader.was_alone = len(at_engine) == 1
        self.check_poisons(before)

    def give_back(self) -> None:
        self.any_engine().give_back(self.rng, self.rng.choice([0.5, 1.0]))

    def close_or_open(self) -> None:
        """Let the policy stop or start to choose an engine."""
        self.closed ^= {self.rng.choice(NAMES)}
        if self.rng.random() < 0.5:
            self.client.dispatch_parked()

    # Requests.

    def submit_some(self) -> None:
        """Submit requests, some of which kill workers or engines."""
        for _ in range(self.rng.randint(1, 3)):
            poison_at = self.rng.choice([0, 1, 3]) if self.rng.random() < 0.05 else None
            self.submit(
                self.rng.randint(1, 3), self.rng.randint(1, 20), poison_at, self.rng.random() < 0.5
            )

    def submit(self, n: int, max_tokens: int, poison_at: int | None, wants: bool) -> None:
        prompt = [5, 6, len(self.readers)]
        details: dict[str, Any] = (
            {"logprobs": 0, "prompt_logprobs": 0, "embeds": True} if wants else {}
        )
        sampling = SequenceSamplingParams(seed=3, **details)
        stream = self.client.submit(prompt, sampling, max_tokens, [0], n, request_id=str(n))
        self.readers.append(RequestReader(stream, prompt, poison_at, NUMERICS))

    def repeat_poison(self) -> None:
        if not self.poisons:
            return
        poison = self.rng.choice(self.poisons)
        try:
            self.client.submit(poison.prompt, poison.stream.entry.sampling, 5, [])
        except PoisonRequestError:
            return
        raise AssertionError("an equal request was accepted")

    def run(self) -> None:
        """Let the engines work for some time."""
        for _ in range(self.rng.randint(1, 12)):
            if self.engines:
                self.work(self.rng.randint(1, 3), self.rng.randint(1, 5))
                self.deliver(self.rng.randint(1, 4))

    def work(self, batch: int, count: int) -> None:
        """Let messages arrive at an engine and steps end; a poison request kills it."""
        engine = self.any_engine()
        engine.receive(count)
        while engine.driver.schedule(self.rng) and self.rng.random() < 0.6:
            pass
        if engine.driver.plans:
            self.commit(engine, batch)

    def commit(self, engine: FakeEngine, batch: int) -> None:
        for row in engine.driver.plans[0].rows:
            if sequence := engine.driver.sequences.get(row.seq):
                reader = self.reader_of(engine, row.seq)
                if reader.kills(sequence.choice, len(sequence.output) + batch - 1):
                    self.kill(engine, row.seq, reader)
                    return
        engine.commit(batch)

    def kill(self, engine: FakeEngine, seq: int, reader: RequestReader) -> None:
        """Let a request kill the engine; sometimes the engine finds it out and survives."""
        if reader.poison_at != 0:
            self.lose(engine)
            return
        seqs = [each for each in engine.driver.sequences if self.reader_of(engine, each) is reader]
        engine.end_poison(seqs)

    def deliver(self, count: int) -> None:
        if not self.engines:
            return
        engine = self.any_engine()
        for _ in range(count):
            if self.engines.get(engine.name) is engine:
                self.deliver_one(engine)

    def deliver_one(self, engine: FakeEngine) -> None:
        """Deliver a message; what the client did not expect, it aborts."""
        if not engine.outbox:
            return
        message = engine.outbox.popleft()
        held = {choice for r in self.readers_at(engine.name) for choice in self.seqs_of(r)}
        before = self.num_poisons()
        tokens = {id(reader): sum(map(len, reader.tokens)) for reader in self.readers}
        self.client.on_outputs(engine.name, message)
        ended = {end.seq for end in message.outcome.finished}
        assert set(message.outcome.seqs) - held - ended <= engine.aborted
        for reader in self.readers:
            if sum(map(len, reader.tokens)) > tokens[id(reader)]:
                reader.deaths.clear()
        new = [each for each in self.readers if "poison" in each.kinds and each not in self.poisons]
        assert len(new) == self.num_poisons() - before
        assert all(reader.poison_at == 0 for reader in new)
        self.poisons += new

    def deliver_late(self) -> None:
        """Deliver what an engine sent in an earlier session, whatever its name stands for now."""
        if not self.late:
            return
        name, message = self.late.pop(self.rng.randrange(len(self.late)))
        tokens = [[*map(tuple, reader.tokens)] for reader in self.readers]
        before = self.client.num_stale_tokens
        self.client.on_outputs(name, message)
        assert self.client.num_stale_tokens - before == len(message.outcome.seqs)
        assert [[*map(tuple, reader.tokens)] for reader in self.readers] == tokens

    def abort(self) -> None:
        if not self.readers:
            return
        reader = self.rng.choice(self.readers)
        n = reader.stream.entry.n
        choices = range(n) if self.rng.random() < 0.5 else [self.rng.randrange(n)]
        reader.aborted |= set(choices) & reader.stream.alive
        self.client.abort(reader.stream, choices)
        assert not reader.stream.alive & set(choices)

    def abort_by_id(self) -> None:
        n = self.rng.choice([2, 3])
        for reader in self.readers:
            if reader.stream.request_id == str(n):
                reader.aborted |= reader.stream.alive
        self.client.abort_request(str(n))

    def reject_parked(self) -> None:
        for reader in self.readers:
            if reader.stream.entry.is_parked:
                reader.aborted |= reader.stream.alive
        self.client.reject_parked("too long")
        assert self.client.num_parked == 0

    # What has to hold.

    def any_engine(self) -> FakeEngine:
        return self.engines[self.rng.choice(sorted(self.engines))]

    def reader_of(self, engine: FakeEngine, seq: int) -> RequestReader:
        prompt, _ = engine.driver.owners[seq]
        return self.readers[prompt[2]]

    def seqs_of(self, reader: RequestReader) -> list[int]:
        return list(reader.stream.entry.seqs.values())

    def readers_at(self, name: str) -> list[RequestReader]:
        entries = [(reader, reader.stream.entry) for reader in self.readers]
        return [reader for reader, entry in entries if entry.seqs and entry.engine == name]

    def num_poisons(self) -> int:
        return sum("poison" in reader.kinds for reader in self.readers)

    def expect_deaths(self, readers: list[RequestReader]) -> None:
        """Count a death as C13 has it, by other means than the client."""
        self.num_deaths += 1
        for reader in readers:
            reader.deaths.add(self.num_deaths)
            reader.was_alone = len(readers) == 1

    def check_poisons(self, before: int) -> None:
        """Check that a request ended as poison only for its deaths, the last one alone."""
        ended = [r for r in self.readers if "poison" in r.kinds and r not in self.poisons]
        assert len(ended) == self.num_poisons() - before <= 1
        for reader in ended:
            assert len(reader.deaths) >= MIGRATION_LIMIT
            assert reader.was_alone
            explained = reader.deaths.copy()
            for other in self.readers:
                other.deaths -= explained
        self.poisons += ended

    def everything_is_exact_so_far(self) -> None:
        for reader in self.readers:
            reader.check()

    def each_request_is_at_one_place(self) -> None:
        alive = [reader for reader in self.readers if reader.stream.alive]
        parked = [reader for reader in alive if reader.stream.entry.is_parked]
        assert self.client.num_parked == len(parked)
        assert (self.client.parked_since is not None) == bool(parked)
        for name in NAMES:
            readers = self.readers_at(name)
            assert self.client.num_running(name) == len(readers)
            assert not readers or name in self.engines
        assert sum(map(self.client.num_running, NAMES)) + len(parked) == len(alive)

    def suspects_run_alone(self) -> None:
        for reader in self.readers:
            entry = reader.stream.entry
            if len(reader.deaths) >= MIGRATION_LIMIT - 1 and entry.seqs:
                assert self.client.num_running(entry.engine) == 1

    def finish(self) -> None:
        """Let all requests end."""
        self.closed.clear()
        for _ in range(4000):
            if not any(each.stream.alive for each in self.readers):
                break
            self.finish_step()
        self.settle()
        for reader in self.readers:
            reader.check_ends()
            self.client.release(reader.stream)
        assert self.client.num_requests == 0
        for engine in self.engines.values():
            assert not engine.driver.sequences, "an engine computes what nobody waits for"
            engine.close()

    def finish_step(self) -> None:
        """Run a step of each engine without deaths but those of poison requests."""
        for name, numerics in (("a", "x"), ("b", "y")):
            if not any(each.driver.numerics == numerics for each in self.engines.values()):
                self.attach(name, numerics)
        self.now += MOVE_SECONDS
        self.client.dispatch_parked()
        for engine in list(self.engines.values()):
            engine.receive(len(engine.inbox))
            engine.driver.schedule(self.rng)
            if engine.driver.plans:
                self.commit(engine, 1)
            while engine.outbox and self.engines.get(engine.name) is engine:
                self.deliver_one(engine)

    def settle(self) -> None:
        """Let everything arrive that is on its way."""
        for engine in list(self.engines.values()):
            engine.receive(len(engine.inbox))
            while engine.outbox:
                self.deliver_one(engine)
            engine.receive(len(engine.inbox))


@settings(max_examples=num_examples(20, 5000), deadline=None, derandomize=True)
@given(st.integers(0, 2**32 - 1))
def test_every_reader_gets_the_exact_output_once(seed: int) -> None:
    FleetLife(seed).play(num_moves=60)
