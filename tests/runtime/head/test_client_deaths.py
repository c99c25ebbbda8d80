"""Random lives of an engine: every reader gets the exact output of its request once."""

import random
from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gllm.messages.requests import EngineOutputs, PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.head.client import EngineClient
from tests.support.engines.fake_driver import FakeDriver
from tests.support.engines.request_reader import RequestReader
from tests.support.examples import num_examples


class EngineLife(RuleBasedStateMachine):
    """Requests, tokens, deaths, aborts and recoveries in any order."""

    @initialize(seed=st.integers(0, 2**32))
    def start(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.client = EngineClient()
        self.readers: list[RequestReader] = []
        self.poisons: list[RequestReader] = []
        self.late: list[EngineOutputs] = []
        self.driver: FakeDriver | None = None
        self.num_steps = self.num_deaths = 0
        self.attach()

    @precondition(lambda self: self.driver is None)
    @rule()
    def attach(self) -> None:
        """Start an epoch, with its warm-up."""
        driver = self.driver = FakeDriver()
        warm_up = self.client.submit_warm_up(driver.send)
        while warm_up.alive:
            driver.schedule(self.rng)
            self.client.on_report(driver.commit())
        assert warm_up.pop_deltas()[0].end is not None
        self.client.attach(driver.send)

    @rule(
        n=st.integers(1, 3),
        max_tokens=st.integers(1, 9),
        poison_at=st.sampled_from([None, None, None, 0, 1, 3]),
        wants=st.booleans(),
    )
    def submit(self, n: int, max_tokens: int, poison_at: int | None, wants: bool) -> None:
        prompt = [5, 6, len(self.readers)]
        details: dict[str, Any] = (
            {"logprobs": 0, "prompt_logprobs": 0, "embeds": True} if wants else {}
        )
        sampling = SequenceSamplingParams(seed=3, **details)
        stream = self.client.submit(prompt, sampling, max_tokens, [0], n, request_id=str(n))
        self.readers.append(RequestReader(stream, prompt, poison_at))

    @precondition(lambda self: self.poisons)
    @rule()
    def repeat_poison(self) -> None:
        entry = self.poisons[-1].stream.entry
        sampling = SequenceSamplingParams(
            seed=self.rng.randrange(99),
            logprobs=entry.sampling.logprobs,
            prompt_logprobs=entry.sampling.prompt_logprobs,
            embeds=entry.sampling.embeds,
        )
        try:
            self.client.submit(self.poisons[-1].prompt, sampling, 5, [])
        except PoisonRequestError:
            return
        raise AssertionError("an equal request was accepted")

    @precondition(lambda self: self.driver is not None)
    @rule(batch=st.integers(1, 3))
    def step(self, batch: int) -> None:
        """Plan steps and commit the oldest, unless it kills the worker."""
        assert self.driver is not None
        while self.driver.schedule(self.rng) and self.rng.random() < 0.6:
            pass
        if self.driver.plans:
            self.commit(batch)

    def commit(self, batch: int) -> None:
        assert self.driver is not None
        for row in self.driver.plans[0].rows:
            sequence = self.driver.sequences.get(row.seq)
            reader = self.reader_of(row.seq)
            if sequence and reader:
                ahead = len(sequence.output) + batch - 1
                if reader.kills(sequence.choice, ahead):
                    self.die()
                    return
        outputs = self.driver.commit(batch)
        if self.rng.random() < 0.05:
            # The worker dies before the parent has read its last message.
            self.late.append(outputs)
            self.die()
            return
        for seq in outputs.outcome.seqs:
            if reader := self.reader_of(seq):
                reader.deaths.clear()
        self.client.on_report(outputs)

    def reader_of(self, seq: int) -> RequestReader | None:
        """Return the reader of a sequence; None for a warm-up."""
        assert self.driver is not None
        prompt, _ = self.driver.owners[seq]
        return self.readers[prompt[2]] if len(prompt) > 1 else None

    @precondition(lambda self: self.driver is not None)
    @rule()
    def die(self) -> None:
        """Kill a worker at any moment."""
        driver = self.driver
        assert driver is not None
        seqs = driver.uncommitted()
        assert seqs == {row.seq for plan in driver.plans for row in plan.rows}
        self.count_death(driver, seqs)
        before = {id(each) for each in self.readers if "poison" in each.kinds}
        is_poison = self.client.on_death(seqs)
        ended = [each for each in self.readers if "poison" in each.kinds and id(each) not in before]
        assert is_poison == bool(ended)
        for reader in ended:
            assert len(reader.deaths) >= 3
            assert reader.was_alone
            explained = reader.deaths.copy()
            for other in self.readers:
                other.deaths -= explained
        self.poisons += ended
        self.client.detach("killed")
        driver.close()
        self.driver = None
        self.check_parked()

    def count_death(self, driver: FakeDriver, seqs: set[int]) -> None:
        """Count the death as C13 has it, by other means than the client."""
        self.num_deaths += 1
        owners = {seq: self.reader_of(seq) for seq in seqs}
        for reader in self.readers:
            choices = [driver.owners[seq][1] for seq in seqs if owners[seq] is reader]
            if reader.stream.alive.intersection(choices):
                reader.deaths.add(self.num_deaths)
                reader.was_alone = set(owners.values()) == {reader}

    def check_parked(self) -> None:
        stats = self.client.stats
        alive = sum(len(each.stream.alive) for each in self.readers)
        assert (stats.running, stats.waiting, stats.in_flight) == (0, alive, 0)
        assert self.client.stalled_seconds == 0
        assert not self.client.is_attached

    @precondition(lambda self: self.late)
    @rule()
    def deliver_late(self) -> None:
        """Deliver what an earlier driver has sent.

        Its statistics arrive only before the next driver starts: the bus fences them by then.
        """
        message = self.late.pop()
        if self.driver is not None:
            message = msgspec.structs.replace(message, stats=self.driver.stats())
        self.client.on_report(message)

    @precondition(lambda self: self.readers)
    @rule(all_choices=st.booleans())
    def abort(self, all_choices: bool) -> None:
        reader = self.rng.choice(self.readers)
        num_choices = reader.stream.entry.n
        choices = range(num_choices) if all_choices else [self.rng.randrange(num_choices)]
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

    @precondition(lambda self: self.driver is None)
    @rule()
    def recovery_takes_too_long(self) -> None:
        if self.rng.random() < 0.9:
            return
        for reader in self.readers:
            reader.aborted |= reader.stream.alive
        self.client.reject_parked("too long")
        assert not any(each.stream.alive for each in self.readers)

    @invariant()
    def everything_is_exact_so_far(self) -> None:
        for reader in getattr(self, "readers", []):
            reader.check()

    @invariant()
    def suspects_run_alone(self) -> None:
        driver = getattr(self, "driver", None)
        suspects = [r for r in getattr(self, "readers", []) if r.stream.alive and len(r.deaths) > 1]
        if driver is not None and suspects:
            rows = {row.seq for plan in driver.plans for row in plan.rows}
            runners = {self.reader_of(seq) for seq in rows | set(driver.sequences)}
            assert len(runners) <= 1

    @invariant()
    def counters_do_not_fall(self) -> None:
        if hasattr(self, "client"):
            assert self.client.stats.steps >= self.num_steps
            self.num_steps = self.client.stats.steps

    def teardown(self) -> None:
        """Let all requests end."""
        if not hasattr(self, "readers"):
            return
        for _ in range(4000):
            if not any(each.stream.alive for each in self.readers):
                break
            if self.driver is None:
                self.attach()
            else:
                self.finish_step()
        self.check_ends()
        if self.driver is not None:
            self.driver.close()

    def finish_step(self) -> None:
        """Run one step without deaths but those of poison requests."""
        assert self.driver is not None
        if not self.driver.schedule(self.rng) and not self.driver.plans:
            self.client.on_report(self.driver.report())
            return
        while self.driver is not None and self.driver.plans:
            self.commit(1)

    def check_ends(self) -> None:
        for reader in self.readers:
            reader.check_ends()
            self.client.release(reader.stream)
        assert self.client.num_requests == 0
        assert self.client.stats.waiting == 0


TestEngineLife = EngineLife.TestCase
TestEngineLife.settings = settings(
    max_examples=num_examples(30, 1000), stateful_step_count=50, deadline=None, derandomize=True
)
