"""Random lives of a fleet: every reader gets the exact output of its request once."""

import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gllm.fleet.client import FleetClient
from gllm.messages.requests import EngineOutputs, PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.request_stream import RequestStream
from tests.examples import num_examples
from tests.fleet.fake_engine import FakeEngine
from tests.runtime.request_reader import RequestReader

NAMES = ("a", "b", "c", "d")
NUMERICS = ("x", "y")
MIGRATION_LIMIT = 3


class FleetLife(RuleBasedStateMachine):
    """Requests, tokens, deaths, departures and arrivals of engines in any order."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.client = FleetClient(self.choose, MIGRATION_LIMIT)
        self.engines: dict[str, FakeEngine] = {}
        self.closed: set[str] = set()
        """Engines that are not chosen."""
        self.readers: list[RequestReader] = []
        self.poisons: list[RequestReader] = []
        self.late: list[tuple[str, EngineOutputs]] = []
        """What engines sent in sessions that have ended."""
        self.num_deaths = 0
        for name in NAMES[:2]:
            self.attach(name, "x")

    def choose(self, stream: RequestStream, names: frozenset[str]) -> str | None:
        assert names
        assert names <= set(self.engines)
        if stream.entry.numerics:
            assert {self.engines[name].driver.numerics for name in names} == {stream.entry.numerics}
        names -= self.closed
        return self.rng.choice(sorted(names)) if names and self.rng.random() < 0.9 else None

    # Engines.

    @rule(name=st.sampled_from(NAMES), numerics=st.sampled_from("xxxy"))
    def attach(self, name: str, numerics: str) -> None:
        """Start a session; one of the same name has ended without notice."""
        if old := self.engines.get(name):
            self.expect_deaths(self.readers_at(name))
            self.end_session(old)
        engine = self.engines[name] = FakeEngine(name, numerics)
        before = self.num_poisons()
        self.client.attach(name, numerics, engine.send)
        self.check_poisons(before)

    @precondition(lambda self: self.engines)
    @rule()
    def die(self) -> None:
        self.lose(self.any_engine())

    def lose(self, engine: FakeEngine) -> None:
        """Let an engine die or fall silent; some of its last messages arrive."""
        for _ in range(self.rng.randint(0, 2)):
            self.deliver_one(engine)
        before = self.num_poisons()
        self.expect_deaths(self.readers_at(engine.name))
        self.end_session(engine)
        self.client.detach(engine.name, "killed", is_planned=False)
        self.check_poisons(before)

    @precondition(lambda self: self.engines)
    @rule()
    def leave(self) -> None:
        """Let an engine leave in good order: that is nobody's fault."""
        engine = self.any_engine()
        self.end_session(engine)
        before = self.num_poisons()
        self.client.detach(engine.name, "left", is_planned=True)
        assert self.num_poisons() == before

    def end_session(self, engine: FakeEngine) -> None:
        # A silent engine goes on for a while.
        if engine.driver.plans and self.rng.random() < 0.5:
            engine.commit(1)
        self.late += [(engine.name, message) for message in engine.outbox]
        engine.close()
        del self.engines[engine.name]

    @precondition(lambda self: self.engines)
    @rule(is_planned=st.booleans())
    def migrate(self, is_planned: bool) -> None:
        name = self.any_engine().name
        at_engine = self.readers_at(name)
        alone = len(at_engine) == 1
        before, counts = self.num_poisons(), {id(r): r.stream.entry.num_attempts for r in at_engine}
        deaths = self.num_deaths + 1
        self.num_deaths = deaths
        num_moved = self.client.migrate(name, is_planned)
        moved = [
            reader
            for reader in at_engine
            if "poison" in reader.kinds
            or reader.stream.entry.is_parked
            or reader.stream.entry.num_attempts > counts[id(reader)]
        ]
        assert len(moved) == num_moved
        if not is_planned:
            for reader in moved:
                reader.deaths.add(deaths)
                reader.was_alone = alone
        self.check_poisons(before)

    @precondition(lambda self: self.engines)
    @rule(share=st.sampled_from([0.5, 1.0]))
    def give_back(self, share: float) -> None:
        self.any_engine().give_back(self.rng, share)

    @rule(name=st.sampled_from(NAMES))
    def close_or_open(self, name: str) -> None:
        """Let the policy stop or start to choose an engine."""
        self.closed ^= {name}
        if self.rng.random() < 0.5:
            self.client.dispatch_parked()

    # Requests.

    @rule(
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        poison_at=st.sampled_from([None, None, None, None, 0, 1, 3]),
        wants=st.booleans(),
    )
    def submit(self, n: int, max_tokens: int, poison_at: int | None, wants: bool) -> None:
        prompt = [5, 6, len(self.readers)]
        details: dict[str, Any] = (
            {"logprobs": 0, "prompt_logprobs": 0, "embeds": True} if wants else {}
        )
        sampling = SequenceSamplingParams(seed=3, **details)
        stream = self.client.submit(prompt, sampling, max_tokens, [0], n, request_id=str(n))
        self.readers.append(RequestReader(stream, prompt, poison_at, NUMERICS))

    @precondition(lambda self: self.poisons)
    @rule()
    def repeat_poison(self) -> None:
        poison = self.rng.choice(self.poisons)
        try:
            self.client.submit(poison.prompt, poison.stream.entry.sampling, 5, [])
        except PoisonRequestError:
            return
        raise AssertionError("an equal request was accepted")

    @precondition(lambda self: self.engines)
    @rule(batch=st.integers(1, 3), count=st.integers(1, 5))
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

    @precondition(lambda self: self.engines)
    @rule(count=st.integers(1, 4))
    def deliver(self, count: int) -> None:
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

    @precondition(lambda self: self.late)
    @rule()
    def deliver_late(self) -> None:
        """Deliver what an engine sent in an earlier session, whatever its name stands for now."""
        name, message = self.late.pop(self.rng.randrange(len(self.late)))
        tokens = [[*map(tuple, reader.tokens)] for reader in self.readers]
        before = self.client.num_stale_tokens
        self.client.on_outputs(name, message)
        assert self.client.num_stale_tokens - before == len(message.outcome.seqs)
        assert [[*map(tuple, reader.tokens)] for reader in self.readers] == tokens

    @precondition(lambda self: self.readers)
    @rule(all_choices=st.booleans())
    def abort(self, all_choices: bool) -> None:
        reader = self.rng.choice(self.readers)
        n = reader.stream.entry.n
        choices = range(n) if all_choices else [self.rng.randrange(n)]
        reader.aborted |= set(choices) & reader.stream.alive
        self.client.abort(reader.stream, choices)
        assert not reader.stream.alive & set(choices)

    @precondition(lambda self: self.readers)
    @rule(n=st.sampled_from([2, 3]))
    def abort_by_id(self, n: int) -> None:
        if self.rng.random() < 0.8:
            return
        for reader in self.readers:
            if reader.stream.request_id == str(n):
                reader.aborted |= reader.stream.alive
        self.client.abort_request(str(n))

    @rule()
    def reject_parked(self) -> None:
        if self.rng.random() < 0.95:
            return
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

    @invariant()
    def everything_is_exact_so_far(self) -> None:
        for reader in getattr(self, "readers", []):
            reader.check()

    @invariant()
    def each_request_is_at_one_place(self) -> None:
        if not hasattr(self, "client"):
            return
        alive = [reader for reader in self.readers if reader.stream.alive]
        parked = [reader for reader in alive if reader.stream.entry.is_parked]
        assert self.client.num_parked == len(parked)
        assert (self.client.parked_since is not None) == bool(parked)
        for name in NAMES:
            readers = self.readers_at(name)
            assert self.client.num_running(name) == len(readers)
            assert not readers or name in self.engines
        assert sum(map(self.client.num_running, NAMES)) + len(parked) == len(alive)

    @invariant()
    def suspects_run_alone(self) -> None:
        for reader in getattr(self, "readers", []):
            entry = reader.stream.entry
            if len(reader.deaths) >= MIGRATION_LIMIT - 1 and entry.seqs:
                assert self.client.num_running(entry.engine) == 1

    def teardown(self) -> None:
        """Let all requests end."""
        if not hasattr(self, "readers"):
            return
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


TestFleetLife = FleetLife.TestCase
TestFleetLife.settings = settings(
    max_examples=num_examples(100, 3000),
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
)
