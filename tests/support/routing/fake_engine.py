"""An engine of a fleet whose messages take time, in both directions."""

import random
from collections import deque

from gllm.messages.codec import decode_for_head, encode
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.scheduler.plan import FinishedSequence, StepOutput
from tests.support.engines.fake_driver import FakeDriver


class FakeEngine:
    """A session with a router: a driver, and the messages that have not arrived."""

    def __init__(self, name: str, numerics: str) -> None:
        self.name = name
        self.driver = FakeDriver(numerics=numerics)
        self.inbox: deque[SubmitRequest | AbortSequences] = deque()
        self.outbox: deque[EngineOutputs] = deque()
        self.aborted: set[int] = set()
        """Wire ids that the router has aborted here."""

    def send(self, message: SubmitRequest | AbortSequences) -> None:
        """Send a message to the engine."""
        self.inbox.append(message)
        if isinstance(message, AbortSequences):
            self.aborted.update(message.seqs)

    def receive(self, count: int) -> None:
        """Let messages of the router arrive."""
        while self.inbox and count:
            self.driver.send(self.inbox.popleft())
            count -= 1

    def commit(self, batch: int) -> None:
        """Commit the oldest step."""
        self._report(self.driver.commit(batch))

    def give_back(self, rng: random.Random, share: float) -> None:
        """End a share of the sequences, for the router to take them elsewhere."""
        seqs = [seq for seq in self.driver.sequences if rng.random() < share]
        self._end(seqs, "unavailable")

    def end_poison(self, seqs: list[int]) -> None:
        """End a request that has killed workers."""
        self._end(seqs, "poison")

    def close(self) -> None:
        self.driver.close()

    def _end(self, seqs: list[int], kind: str) -> None:
        for seq in seqs:
            del self.driver.sequences[seq]
        ends = [FinishedSequence(seq, "error", error=kind) for seq in seqs]
        outcome, kinds = StepOutput([], [], [], ends), [(seq, kind) for seq in seqs]
        self._report(EngineOutputs(outcome, self.driver.stats(), [], kinds))  # type: ignore[arg-type]

    def _report(self, message: EngineOutputs) -> None:
        decoded = decode_for_head(encode(message))
        assert isinstance(decoded, EngineOutputs)
        self.outbox.append(decoded)
