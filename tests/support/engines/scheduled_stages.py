"""A scheduler and real stages without processes, which serve several requests together."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.batch import Batch
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.engines.epochs import Stages


@dataclass
class ScheduledStages:
    """Schedules, computes and commits steps.

    Steps are prepared when they are planned, and computed when they are committed: as many are in
    flight as in a pipeline.
    """

    stages: Stages
    config: SchedulerConfig
    outputs: dict[int, list[int]] = field(default_factory=dict)
    """Tokens by sequence, in the order of requests and choices."""
    ended: dict[int, str] = field(default_factory=dict)
    """Finish reason by sequence."""
    drafts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Text of a sequence, prompt included, and the guesses that the last stage reported for it."""

    def __post_init__(self) -> None:
        """Create the scheduler."""
        self.scheduler = Scheduler(self.config)
        self._plans: deque[tuple[StepPlan, list[Batch]]] = deque()
        self._prompts: dict[int, list[int]] = {}
        self._now = 0.0

    def add(self, prompt: list[int], max_tokens: int = 16, n: int = 1, **sampling: Any) -> int:
        """Submit a request and return its first sequence."""
        seq, self.stages.next_seq = self.stages.next_seq, self.stages.next_seq + n
        params = SequenceSamplingParams(**{"temperature": 0.0} | sampling)
        for executor in self.stages.executors:
            message = RegisterSequences(seq, len(prompt), prompt, params, n)
            executor.register(message)
        self.scheduler.add(SchedulerRequest(seq, prompt, max_tokens, n=n), self._now)
        for choice in range(seq, seq + n):
            self.outputs[choice], self._prompts[choice] = [], prompt
        return seq

    def abort(self, seq: int) -> None:
        """End a sequence."""
        self.scheduler.abort([seq])
        self.ended[seq] = "abort"

    def step(self) -> None:
        """Fill the pipeline, then compute and commit the oldest step."""
        self._now += 1.0
        while (plan := self.scheduler.schedule(self._now)) is not None:
            self._plans.append(
                (plan, [executor.prepare(plan) for executor in self.stages.executors])
            )
        plan, batches = self._plans.popleft()
        hidden = None
        for executor, batch in zip(self.stages.executors, batches, strict=True):
            hidden = executor.compute(batch, hidden)
        assert hidden is not None
        sampled, _ = self.stages.executors[-1].sample(batches[-1], hidden)
        output = self.scheduler.commit(StepResult(plan.step, sampled))
        for seq, token_id in zip(output.seqs, output.token_ids, strict=True):
            self.outputs[seq].append(token_id)
        for token in sampled:
            if token.draft_token_ids:
                text = self._prompts[token.seq] + self.outputs[token.seq]
                self.drafts.append((text, list(token.draft_token_ids)))
        self.ended.update((end.seq, end.finish_reason) for end in output.finished)

    def run(self) -> list[list[int]]:
        """Run until all sequences have ended; return their tokens, in the order of `outputs`."""
        while len(self.ended) < len(self.outputs) or self._plans:
            self.step()
        return list(self.outputs.values())
