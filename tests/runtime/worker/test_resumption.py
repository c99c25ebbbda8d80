"""The client's journal with real drivers and schedulers that end at any moment."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from gllm.messages.codec import decode_for_head, decode_for_worker, encode
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.runtime.driver.plan_record import PlanRecord, read_uncommitted
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.request_stream import RequestStream
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from tests.support.engines.fake_driver import STOP, text_of, token_at

MAX_MODEL_LEN = 64


@dataclass
class Epoch:
    """A driver with one stage, whose tokens follow from prompt, choice and position."""

    rng: random.Random
    is_asynchronous: bool
    plans: list[StepPlan] = field(default_factory=list)
    choices: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    outbox: list[EngineOutputs] = field(default_factory=list)

    def __post_init__(self) -> None:
        config = SchedulerConfig(
            block_size=4,
            max_num_batched_tokens=16,
            async_scheduling=self.is_asynchronous,
            max_num_seqs=8,
        ).resolve(2, 40, MAX_MODEL_LEN)
        self.descriptor = os.memfd_create("test-plans")
        self.record = PlanRecord(self.descriptor, 8, 8)
        frontend: Any = self
        self.driver = Driver(
            Scheduler(config), self.on_stage_message, [], frontend, plan_record=self.record
        )

    def on_stage_message(self, message: Any) -> None:
        if isinstance(message, RunStep):
            self.plans.append(message.plan)
            return
        for i in range(message.n):
            choice = message.choices[i] if message.choices else i
            self.choices[message.seq + i] = (message.prompt, choice)

    def receive(self, message: Any) -> None:
        """Handle a message of the client."""
        request = decode_for_worker(encode(message))
        if isinstance(request, SubmitRequest):
            self.driver.submit(request)
        else:
            self.driver.abort(request)  # type: ignore[arg-type]
        self.driver.run_iteration()

    def send(self, message: Any) -> None:
        """Receive a report of the driver."""
        report = decode_for_head(encode(message))
        if isinstance(report, EngineOutputs):
            self.outbox.append(report)

    def step(self) -> None:
        """Commit the oldest step."""
        plan = self.plans.pop(0)
        rows = [
            self.sample(row.seq, row.num_preemptions, row.start + row.num_tokens)
            for row in plan.rows
        ]
        sampled = [token for row, token in zip(plan.rows, rows, strict=True) if row.should_sample]
        self.driver.commit(StepDone(StepResult(plan.step, sampled)))
        assert read_uncommitted(self.descriptor) == self.seqs_in_flight()
        self.driver.run_iteration()
        assert read_uncommitted(self.descriptor) == self.seqs_in_flight()

    def seqs_in_flight(self) -> set[int]:
        return {row.seq for plan in self.plans for row in plan.rows}

    def sample(self, seq: int, num_preemptions: int, position: int) -> SampledToken:
        """Return the token after a position, sometimes with tokens that it forces."""
        prompt, choice = self.choices[seq]
        index = position - len(prompt)
        num_forced = 0 if self.is_asynchronous else self.rng.choice([0, 0, 1, 2])
        tokens = [token_at(prompt, choice, index + i) for i in range(1 + num_forced)]
        return SampledToken(seq, num_preemptions, tokens[0], further_token_ids=tuple(tokens[1:]))

    def close(self) -> None:
        self.record.close()
        os.close(self.descriptor)


@dataclass
class Reader:
    stream: RequestStream
    prompt: list[int]
    tokens: dict[int, list[int]] = field(default_factory=dict)
    reasons: dict[int, str] = field(default_factory=dict)

    def read(self) -> None:
        for choice, delta in self.stream.pop_deltas().items():
            self.tokens.setdefault(choice, []).extend(delta.tokens)
            if delta.end is not None:
                assert choice not in self.reasons
                self.reasons[choice] = delta.end.finish_reason
            self.check_no_end_is_missing(choice)

    def check_no_end_is_missing(self, choice: int) -> None:
        """A choice with its last token has ended: both arrive in one message."""
        output = self.tokens[choice]
        is_complete = len(output) == self.stream.entry.max_tokens or STOP in output
        assert is_complete == (choice in self.reasons)


def lives(seed: int) -> Iterator[tuple[EngineClient, list[Reader], random.Random]]:
    """Yield a client with requests of random kinds, twice."""
    rng = random.Random(seed)
    for _ in range(2):
        client, readers = EngineClient(), []
        for number in range(12):
            prompt = [1, 2, 3, 4, 5, number][rng.randrange(5) :]
            prompt = prompt * rng.randint(1, 4)
            sampling = SequenceSamplingParams(seed=number)
            stream = client.submit(
                prompt, sampling, rng.randint(1, 30), [STOP], rng.randint(1, 3), priority=number % 2
            )
            readers.append(Reader(stream, prompt))
            stream.set_listener(readers[-1].read)
        yield client, readers, rng


@pytest.mark.parametrize("is_asynchronous", [False, True])
@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))]
)
def test_every_reader_gets_the_exact_output_once(seed: int, is_asynchronous: bool) -> None:
    num_deaths = 0
    for client, readers, rng in lives(seed):
        while any(reader.stream.alive for reader in readers):
            run_epoch(client, Epoch(rng, is_asynchronous), rng)
            num_deaths += 1
        for reader in readers:
            for choice in range(reader.stream.entry.n):
                text = text_of(reader.prompt, choice, reader.stream.entry.max_tokens)
                assert reader.tokens[choice] == text
                assert reader.reasons[choice] == ("stop" if text[-1] == STOP else "length")
        assert client.num_resumed_requests > len(readers) / 2
    assert num_deaths > 5


def run_epoch(client: EngineClient, epoch: Epoch, rng: random.Random) -> None:
    """Run some steps; messages of the driver may be lost with it."""
    steps = client.stats.steps
    client.attach(epoch.receive)
    for _ in range(rng.randint(0, 25)):
        if not epoch.plans:
            break
        epoch.step()
        while epoch.outbox and rng.random() < 0.8:
            client.on_report(epoch.outbox.pop(0))
    # A planned restart: random deaths would sometimes make a suspect end.
    client.detach("restart")
    assert client.stats.steps >= steps
    epoch.close()
