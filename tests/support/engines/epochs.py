"""A driver and real stages, which end at any position of a request and continue in a new driver.

Owns the part of the frontend that keeps what each choice has reported and submits it again. The
processes are left out: messages are encoded and decoded, steps are computed when they are planned.
"""

import copy
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_stage, decode_for_worker, encode
from gllm.messages.requests import EngineOutputs, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.runtime.driver.driver import Driver
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.executor import Executor
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.speculation import CreateDrafter

BLOCK_SIZE, NUM_BLOCKS, MAX_MODEL_LEN = 8, 64, 128
CHUNKED = {"max_prefill_tokens": 12, "min_prefill_tokens": 4, "max_num_batched_tokens": 40}


@dataclass
class ChoiceOutput:
    """Output that a choice has reported."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_first_tokens: int = 0
    """Reports of the figures of the first token."""
    end: tuple[str, int | None, str] | None = None
    """Finish reason, stop token and error."""

    def cut(self, length: int, keeps_prompt_logprobs: bool) -> "ChoiceOutput":
        """Return the output reported when it had `length` tokens."""
        if not length:
            return ChoiceOutput()
        prompt_logprobs = self.prompt_logprobs if keeps_prompt_logprobs else []
        return ChoiceOutput(self.tokens[:length], self.logprobs[:length], prompt_logprobs, 1)


@dataclass
class Request:
    """A request as it was first submitted."""

    prompt: list[int]
    sampling: SequenceSamplingParams
    max_tokens: int = 16
    stop_ids: list[int] = field(default_factory=list)
    n: int = 1

    def submission(self, seq: int, outputs: list[ChoiceOutput]) -> tuple[SubmitRequest, list[int]]:
        """The message that continues the unfinished choices, and these."""
        choices = [index for index, output in enumerate(outputs) if output.end is None]
        sampling = self.sampling
        if any(output.prompt_logprobs for output in outputs):
            fields = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
            sampling = SequenceSamplingParams(**fields | {"prompt_logprobs": None})
        message = SubmitRequest(
            seq,
            self.prompt,
            sampling,
            self.max_tokens,
            self.stop_ids,
            len(choices),
            choices=choices,
            outputs=[outputs[index].tokens for index in choices],
            age_seconds=1.5,
        )
        return message, choices


class Stages:
    """Loaded stages of a model, used by one epoch after the other."""

    def __init__(
        self,
        executors: Sequence[Executor],
        scheduler: SchedulerConfig,
        keeps_tokens: bool = False,
        synchronize: Callable[[], None] = lambda: None,
    ) -> None:
        """Keep what each epoch uses.

        Args:
            executors: of the stages.
            scheduler: resolved.
            keeps_tokens: the last stage needs every sequence's prompt.
            synchronize: waits for the activations of a stage.
        """
        self.executors = executors
        self.scheduler_config = scheduler
        self.keeps_tokens = keeps_tokens
        self.synchronize = synchronize
        self.next_seq = 0
        self.create_drafter: CreateDrafter | None = None
        """Creates what guesses tokens, if the stages speculate; None for the configured method."""


def stages_on_cpu(folder: Path, num_stages: int = 1, **options: Any) -> Stages:
    """Stages of a model folder on the CPU."""
    model = read_config(folder)
    config = EngineConfig.from_options(
        str(folder),
        **{"block_size": BLOCK_SIZE, "dtype": "float32", "max_model_len": MAX_MODEL_LEN} | options,
    )
    executors = [
        CpuExecutor(model, config, num_stages, layers)
        for layers in split_layers(model.model, num_stages)
    ]
    for executor in executors:
        executor.load(folder, lambda done, total: None)
        executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = config.scheduler.resolve(num_stages, NUM_BLOCKS, MAX_MODEL_LEN)
    return Stages(executors, scheduler, executors[0].needs_all_prompts)


class _Channel:
    """Channel to a stage of an epoch."""

    def __init__(self, epoch: "Epoch", stage: int) -> None:
        self._epoch, self._stage = epoch, stage

    def send(self, message: WireMessage) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        self._epoch.on_stage_message(self._stage, decode_for_stage(payload))


class Epoch:
    """One driver over the stages, and what one request's choices have reported."""

    def __init__(self, stages: Stages, request: Request, outputs: list[ChoiceOutput]) -> None:
        self.outputs = copy.deepcopy(outputs)
        self._stages, self._synchronize = stages.executors, stages.synchronize
        self._plans: deque[StepPlan] = deque()
        self._batches: dict[int, dict[int, Batch]] = {}
        """By step, the micro-batch of each stage."""
        first, *others = [_Channel(self, stage) for stage in range(len(self._stages))]
        self.scheduler = Scheduler(stages.scheduler_config, create_drafter=stages.create_drafter)
        self._driver = Driver(
            self.scheduler,
            first.send,
            [*others],
            self,
            stages.keeps_tokens,
            self._stages[0].model.vocab_size,
            verifies_grammars=self._stages[0].verifies_grammars,
        )
        message, choices = request.submission(stages.next_seq, outputs)
        self._choices = dict(enumerate(choices, start=stages.next_seq))
        stages.next_seq += len(choices)
        self._grammars: list[tuple[RegisterSequences, Any]] = []
        received = decode_for_worker(encode(message))
        assert isinstance(received, SubmitRequest)
        self._driver.submit(received)
        for registration, compiled in self._grammars:
            error = compiled.exception(60)
            self._driver.on_grammar_ready(
                GrammarReady(registration.seq, str(error or ""), registration.n)
            )

    @property
    def has_ended(self) -> bool:
        """True if every choice has ended."""
        return all(output.end for output in self.outputs)

    def on_stage_message(self, stage: int, message: Any) -> None:
        """Handle a message of the driver to a stage."""
        executor = self._stages[stage]
        match message:
            case RegisterSequences():
                if (compiled := executor.register(message)) is not None:
                    self._grammars.append((message, compiled))
            case RunStep(plan):
                batches = self._batches.setdefault(plan.step, {})
                batches[stage] = executor.prepare(plan)
                if stage == 0:
                    self._plans.append(plan)

    def send(self, message: WireMessage) -> None:
        """Record a report of the driver."""
        if not isinstance(message, EngineOutputs):
            return
        outcome = message.outcome
        for details in message.details:
            output = self.outputs[self._choices[details.seq]]
            output.prompt_logprobs += details.prompt_logprobs
            if details.sampled is not None:
                output.logprobs.append(details.sampled)
        for seq, token in zip(outcome.seqs, outcome.token_ids, strict=True):
            self.outputs[self._choices[seq]].tokens.append(token)
        for first in outcome.first_tokens:
            self.outputs[self._choices[first.seq]].num_first_tokens += 1
        for end in outcome.finished:
            output = self.outputs[self._choices[end.seq]]
            output.end = end.finish_reason, end.stop_token_id, end.error

    def send_encoded(self, payload: bytes) -> None:
        """Not used: the driver sends the frontend messages."""
        raise AssertionError

    def commit(self) -> None:
        """Compute and commit the oldest step."""
        self._driver.run_iteration()
        if self.has_ended:
            return
        plan = self._plans.popleft()
        batches = self._batches.pop(plan.step)
        hidden = None
        for stage, executor in enumerate(self._stages):
            hidden = executor.compute(batches[stage], hidden)
            if not executor.is_last:
                self._synchronize()
        assert hidden is not None
        sampled, details = self._stages[-1].sample(batches[len(self._stages) - 1], hidden)
        self._driver.commit(StepDone(StepResult(plan.step, sampled), details))
        self._driver.run_iteration()

    def run(self) -> list[ChoiceOutput]:
        """Run to the end; everything that each choice has reported, here and before."""
        while not self.has_ended:
            self.commit()
        return self.outputs


def run_undisturbed(stages: Stages, request: Request) -> list[list[ChoiceOutput]]:
    """Outputs of the choices before the first and after each commit."""
    epoch = Epoch(stages, request, [ChoiceOutput() for _ in range(request.n)])
    snapshots = [copy.deepcopy(epoch.outputs)]
    while not epoch.has_ended:
        epoch.commit()
        snapshots.append(copy.deepcopy(epoch.outputs))
    return snapshots


def tensor_tokens(length: int, seed: int) -> list[int]:
    """Random token ids of the demo model."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 2048, (length,), generator=generator).tolist()
