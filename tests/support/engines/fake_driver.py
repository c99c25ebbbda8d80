"""A driver without stages, whose tokens follow from prompt, choice and position."""

import os
import random
from dataclasses import dataclass, field
from zlib import crc32

from gllm.messages.codec import decode_for_worker, encode
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SampleDetails, TokenLogprobs
from gllm.runtime.driver.plan_record import PlanRecord, read_uncommitted
from gllm.scheduler.plan import (
    FinishedSequence,
    FirstToken,
    ScheduledRow,
    SchedulerStats,
    StepOutput,
    StepPlan,
)

STOP = 0
MAX_IN_FLIGHT = 3


def token_at(prompt: list[int], choice: int, index: int, numerics: str = "") -> int:
    """Return the output token of a choice, which depends on the numerics too."""
    return crc32((repr((prompt, choice, index)) + numerics).encode()) % 40


def text_of(prompt: list[int], choice: int, max_tokens: int, numerics: str = "") -> list[int]:
    """Return the whole output of a choice."""
    tokens = [token_at(prompt, choice, index, numerics) for index in range(max_tokens)]
    return tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens


def logprob_of(token: int) -> TokenLogprobs:
    return TokenLogprobs(token, -float(token), 1, [token], [-float(token)])


@dataclass
class FakeSequence:
    request: SubmitRequest
    choice: int
    output: list[int]
    num_new: int = 0


@dataclass
class FakeDriver:
    """Runs what a client sends, one token per sequence and step."""

    numerics: str = ""
    sequences: dict[int, FakeSequence] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    steps: int = 0
    highest_seq: int = -1
    owners: dict[int, tuple[list[int], int]] = field(default_factory=dict)
    """Prompt and choice of each sequence that was ever submitted."""

    def __post_init__(self) -> None:
        self.descriptor = os.memfd_create("test-plans")
        self.record = PlanRecord(self.descriptor, MAX_IN_FLIGHT, max_rows=512)

    def send(self, message: SubmitRequest | AbortSequences) -> None:
        """Handle a message of the client."""
        request = decode_for_worker(encode(message))
        assert request == message
        if isinstance(request, AbortSequences):
            for seq in request.seqs:
                self.sequences.pop(seq, None)
            return
        assert isinstance(request, SubmitRequest)
        assert request.seq > self.highest_seq
        assert request.age_seconds >= 0
        self.highest_seq = request.seq + request.n - 1
        choices = request.choices or list(range(request.n))
        outputs = request.outputs or [[] for _ in choices]
        assert len(choices) == len(outputs) == request.n
        for i, (choice, output) in enumerate(zip(choices, outputs, strict=True)):
            text = text_of(request.prompt, choice, request.max_tokens, self.numerics)
            assert output == text[: len(output)]
            assert len(output) < len(text), "a choice that has all its tokens has ended"
            self.owners[request.seq + i] = (request.prompt, choice)
            self.sequences[request.seq + i] = FakeSequence(request, choice, list(output))

    def schedule(self, rng: random.Random) -> bool:
        """Plan a step of some sequences that have no row in flight."""
        busy = {row.seq for plan in self.plans for row in plan.rows}
        free = [seq for seq in self.sequences if seq not in busy]
        if not free or len(self.plans) == MAX_IN_FLIGHT:
            return False
        rows = rng.sample(free, rng.randint(1, len(free)))
        plan = StepPlan(self.steps, [ScheduledRow(seq, 0, 0, 1, [], [], True) for seq in rows], [])
        self.steps += 1
        self.record.on_scheduled(plan)
        self.plans.append(plan)
        return True

    def commit(self, batch: int = 1) -> EngineOutputs:
        """Return the output of the oldest step; `batch` tokens per sequence, as forced ones."""
        plan = self.plans.pop(0)
        self.record.on_committed(plan.step)
        output = StepOutput([], [], [], [], len(plan.rows))
        details: list[SampleDetails] = []
        for row in plan.rows:
            for _ in range(batch):
                if sequence := self.sequences.get(row.seq):
                    self._append(row.seq, sequence, output, details)
        return EngineOutputs(output, self.stats(), details)

    def _append(
        self, seq: int, sequence: FakeSequence, output: StepOutput, details: list[SampleDetails]
    ) -> None:
        request, index = sequence.request, len(sequence.output)
        token = token_at(request.prompt, sequence.choice, index, self.numerics)
        sequence.output.append(token)
        output.seqs.append(seq)
        output.token_ids.append(token)
        if not sequence.num_new:
            output.first_tokens.append(FirstToken(seq, self.steps, 0.5))
        sampling = request.sampling
        is_first = seq == request.seq and not sequence.num_new
        prompt = request.prompt[1:] if is_first and sampling.prompt_logprobs is not None else []
        embedding = b"vector" if is_first and sampling.embeds else b""
        sampled = logprob_of(token) if sampling.logprobs is not None else None
        if sampled or prompt or embedding:
            details.append(SampleDetails(seq, sampled, [logprob_of(t) for t in prompt], embedding))
        sequence.num_new += 1
        if token == STOP or len(sequence.output) == request.max_tokens:
            reason = "stop" if token == STOP else "length"
            output.finished.append(FinishedSequence(seq, reason))
            del self.sequences[seq]

    def report(self) -> EngineOutputs:
        """Return the statistics alone."""
        return EngineOutputs(StepOutput([], [], [], []), self.stats())

    def stats(self) -> SchedulerStats:
        busy = {row.seq for plan in self.plans for row in plan.rows}
        running = len(busy | set(self.sequences))
        return SchedulerStats(running, 0, 0.5, len(self.plans), self.steps)

    def uncommitted(self) -> set[int]:
        """Return what the parent reads after a death."""
        return read_uncommitted(self.descriptor)

    def close(self) -> None:
        """Free the record, as after the death of the driver."""
        self.record.close()
        os.close(self.descriptor)
