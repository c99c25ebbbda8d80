"""The driver: the pipeline's one scheduler, between the frontend and the stages.

Owns the order of things at the pipeline's head: requests in, plans out, results in, tokens out.
Knows nothing of tensors and sockets; it lives in the first stage's process, on its event loop.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from gllm.messages.base import WireMessage
from gllm.messages.codec import encode
from gllm.messages.control import CommandDone, ResetPrefixCache
from gllm.messages.reports import BubbleReport, StageTimes
from gllm.messages.requests import AbortSequences, EngineOutputs, RejectedRequest, SubmitRequest
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.observability.bubbles import BubbleMeter
from gllm.scheduler.plan import FinishedSequence, SchedulerStats, StepOutput, StepPlan
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

log = logging.getLogger(__name__)


class MessageSender(Protocol):
    """A way to another process."""

    def send(self, message: WireMessage) -> None:
        """Queue a message."""

    def send_encoded(self, payload: bytes) -> None:
        """Queue a message that was encoded before."""


class Driver:
    """Feeds the pipeline. `local` is the first stage itself, `others` are the stages after it."""

    def __init__(
        self,
        scheduler: Scheduler,
        local: Callable[[RegisterSequences | RunStep], None],
        others: list[MessageSender],
        frontend: MessageSender,
        last_needs_prompts: bool = False,
        vocab_size: int | None = None,
    ) -> None:
        """`last_needs_prompts`: the last stage has to know all prompts, not only those that it
        samples by. `vocab_size`: token ids of requests have to be below it; None: unchecked."""
        self._vocab_size = vocab_size
        self._last_needs_prompts = last_needs_prompts
        self.scheduler = scheduler
        self._local = local
        self._others = others
        self._frontend = frontend
        self._outcomes: list[tuple[StepOutput, list[SampleDetails]]] = []
        self._held: dict[int, SchedulerRequest] = {}
        """Requests whose grammars are being compiled, by their first sequence."""
        self._cancelled: dict[int, set[int]] = {}
        """Choices of those that were aborted meanwhile."""
        self._accepted = False
        """Requests came or went since the frontend got the last statistics."""
        self._meter = BubbleMeter(scheduler.config.stages, time.monotonic())

    def submit(self, message: SubmitRequest) -> None:
        """Add a request and register its sequences with the stages that need them.

        A request that cannot be run ends with an error, and nothing else does.
        """
        self._accepted = True
        try:
            self._submit(message)
        except Exception as error:
            if not isinstance(error, ValueError):
                log.exception("request %d could not be submitted", message.seq)
            self._held.pop(message.seq, None)
            self._fail(message.seq, message.n, str(error) or type(error).__name__)

    def reject(self, message: RejectedRequest) -> None:
        """End a request that could not be decoded."""
        log.error("request %d: %s", message.seq, message.error)
        self._fail(message.seq, message.n, message.error)

    def _submit(self, message: SubmitRequest) -> None:
        """Add a request. Raises ValueError for one that can never run."""
        request = SchedulerRequest(
            message.seq,
            message.prompt,
            message.max_tokens,
            frozenset(message.stop_ids),
            message.priority,
            message.cache_salt,
            message.n,
            reads_prefix_cache=message.sampling.prompt_logprobs is None,
        )
        request.check(self.scheduler.config.max_model_len)
        if self._vocab_size is not None:
            if max(message.prompt) >= self._vocab_size:
                raise ValueError(f"prompt has ids out of the vocabulary 0..{self._vocab_size - 1}")
            message.sampling.check_ids(self._vocab_size)
        if message.sampling.grammar:
            self._held[message.seq] = request
        else:
            self.scheduler.add(request, time.monotonic())
        self._register(message)

    def begin(self, message: GrammarReady) -> None:
        """Run a held request, whose grammar is compiled so that no step has to wait for it; end any
        request that the last stage cannot sample."""
        self._accepted = True
        # Failed or not: the scheduler has the stages forget it.
        count = self._admit(message.seq) or message.n
        if message.error:
            self._fail(message.seq, count, message.error)

    def abort(self, message: AbortSequences) -> None:
        """End sequences nobody waits for."""
        self._accepted = True
        aborted = set(message.seqs)
        for seq, request in list(self._held.items()):
            own = aborted.intersection(range(seq, seq + request.n))
            cancelled = self._cancelled.setdefault(seq, set()) if own else own
            cancelled |= own
            if len(cancelled) == request.n:
                # The scheduler lets the stages forget what they were told of it.
                self._admit(seq)
        self.scheduler.abort(message.seqs)

    def _admit(self, seq: int) -> int:
        """Give a held request to the scheduler, without the choices that were aborted meanwhile;
        the number of its choices, 0 where it is not held."""
        request = self._held.pop(seq, None)
        if request is None:
            return 0
        self.scheduler.add(request, time.monotonic())
        self.scheduler.abort(sorted(self._cancelled.pop(seq, ())))
        return request.n

    def forget_prefixes(self, message: ResetPrefixCache) -> None:
        """Empty the prefix cache."""
        self.scheduler.reset_prefix_cache()
        self._frontend.send(CommandDone(message.question, stage=0))

    def commit(self, message: StepDone) -> None:
        """Take a step's result in. Raises ValueError where it is not the next one's."""
        outcome = self.scheduler.commit(message.result)
        logprobs = message.logprobs
        if logprobs:
            # A row past its sequence's end has brought nothing.
            kept = set(outcome.seqs)
            logprobs = [row for row in logprobs if row.seq in kept]
        self._outcomes.append((outcome, logprobs))

    def observe(self, message: StageTimes) -> None:
        """Hear how long a stage took."""
        self.scheduler.record_step_times(message.stage, message.steps)
        meter = self._meter
        meter.record_steps(message.stage, message.steps, message.until)
        self._frontend.send(BubbleReport(meter.seconds, meter.work_seconds))

    def turn(self) -> None:
        """After a batch of messages: fill the pipeline first, then report to the frontend.

        Statistics go with the outcomes; without any, alone, if the turn has changed them.
        """
        while (plan := self._schedule()) is not None:
            self._accepted = True
            step = RunStep(plan)
            payload = encode(step) if self._others else b""
            for stage in self._others:
                stage.send_encoded(payload)
            self._local(step)
        outcomes, self._outcomes = self._outcomes, []
        if self._accepted and not outcomes:
            outcomes = [(StepOutput([], [], [], []), [])]
        self._accepted = False
        for outcome, logprobs in outcomes:
            self._frontend.send(EngineOutputs(outcome, self._stats(), logprobs))

    def _stats(self) -> SchedulerStats:
        """The scheduler's statistics; requests whose grammars are being compiled wait as well."""
        stats = self.scheduler.stats()
        num_held = sum(request.n for request in self._held.values())
        return stats._replace(waiting=stats.waiting + num_held)

    def _fail(self, seq: int, n: int, error: str) -> None:
        """End the sequences seq .. seq + n - 1 with an error, scheduled or not."""
        seqs = range(seq, seq + n)
        self.scheduler.abort(list(seqs))
        ends = [FinishedSequence(each, "error", error=error) for each in seqs]
        self._outcomes.append((StepOutput([], [], [], ends), []))

    def _schedule(self) -> StepPlan | None:
        """The next plan; what work is left beside it is noted."""
        now = time.monotonic()
        plan = self.scheduler.schedule(now)
        self._meter.record_parallelism(now, self.scheduler.available_parallelism())
        return plan

    def _register(self, message: SubmitRequest) -> None:
        """The sampling goes to the last stage, ids to all, the prompt to the first, and to the last
        where it has use for it."""
        bare = RegisterSequences(message.seq, len(message.prompt), n=message.n)
        first = msgspec.structs.replace(bare, prompt=message.prompt)
        needed = self._last_needs_prompts or message.sampling.needs_prompt
        known = first if not self._others or needed else bare
        last = msgspec.structs.replace(known, sampling=message.sampling)
        self._local(first if self._others else last)
        for stage in self._others[:-1]:
            stage.send(bare)
        if self._others:
            self._others[-1].send(last)
