"""A driver over stages whose model is arithmetic of integers, and what its clients get.

Each stage keeps block tables and a KV cache, and computes what is there: a token's value depends on
the values in all slots of its context, whatever they are. Nothing tells a stage which guesses are
right. The last one samples with the sampler of the CPU, which verifies the windows. `Reference`
computes the same model from the tokens alone, so that a wrong token is noticed when it is reported.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import torch

from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_stage, encode
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences, RunStep, StepDone
from gllm.runtime.driver.driver import Driver
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.sampling import (
    SamplingMetadata,
    SamplingState,
    build_sampling_metadata,
    create_sampling_states,
    create_window,
    to_sampled_tokens,
)
from gllm.scheduler.block_table_replica import BlockTableReplica
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ON_DEVICE, ScheduledRow, StepPlan, StepResult, StepTime
from gllm.scheduler.policy import SchedulerLoad, SchedulingPolicy
from gllm.scheduler.policy_registry import create_policy
from gllm.scheduler.scheduler import Scheduler

VOCABULARY = 40
NUM_VALUES = 2**61
"""Values are below this, ids of tokens below VOCABULARY."""


def attend(token_value: int, context: Sequence[int], total: int) -> int:
    """Return the value of a token.

    Args:
        token_value: of the stage before; the token id on the first stage.
        context: the last values before it, of which the very last one counts.
        total: sum of all values before it.
    """
    return hash((token_value, context[-1] if context else 0, total)) % NUM_VALUES


class Reference:
    """The model's answer to one text, computed from its tokens alone."""

    def __init__(self, num_stages: int, tokens: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.next_token = 0
        """Greedy token after all tokens so far."""
        self._values: list[list[int]] = [[] for _ in range(num_stages)]
        self._totals = [0] * num_stages
        self.extend(tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        for token in tokens:
            value = token
            for stage, values in enumerate(self._values):
                value = attend(value, values, self._totals[stage])
                values[:] = [value]
                self._totals[stage] += value
            self.tokens.append(token)
            self.next_token = value % VOCABULARY

    def copy(self) -> "Reference":
        """Return a reference that goes on by itself."""
        other = Reference(0, [])
        other.tokens, other.next_token = [*self.tokens], self.next_token
        other._values, other._totals = [[*each] for each in self._values], [*self._totals]
        return other


class ScriptedDrafter:
    """Guesses the reference's tokens, and is wrong or silent at random; one for each sequence."""

    def __init__(self, rng: Random, num_stages: int, acceptance: float) -> None:
        self._rng, self._acceptance = rng, acceptance
        self._known = Reference(num_stages, [])

    def go_on(self, token_ids: "array[int]", guesses: Sequence[int]) -> Reference:
        """Return the reference after a text and guesses behind it."""
        self._known.extend(token_ids[len(self._known.tokens) :])
        reference = self._known.copy()
        reference.extend(guesses)
        return reference

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` tokens; see Drafter."""
        reference = self.go_on(token_ids, guesses)
        num_known = len(reference.tokens)
        for _ in range(self._rng.choice([0, num_tokens, num_tokens, num_tokens // 2])):
            is_right = self._rng.random() < self._acceptance
            reference.extend(
                [reference.next_token if is_right else self._rng.randrange(VOCABULARY)]
            )
        return reference.tokens[num_known:]


class RecordedPolicy:
    """A policy that keeps the budgets of the latest micro-batch."""

    def __init__(self, policy: SchedulingPolicy) -> None:
        self._policy = policy
        self.decode_limit = self.prefill_limit = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the policy's budget for decodes."""
        self.decode_limit = self._policy.decode_budget(load)
        return self.decode_limit

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the policy's budget for prefill."""
        self.prefill_limit = self._policy.prefill_budget(load)
        return self.prefill_limit


class ScriptedStage:
    """Block tables and KV cache of one stage."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self.replica = BlockTableReplica()
        self._cache: dict[int, int] = {}
        """Value by slot."""
        self.queue: deque[tuple[StepPlan, list[list[int]]]] = deque()
        """Steps that are not computed, with the slots of each row's sequence."""

    def prepare(self, plan: StepPlan) -> None:
        """Apply a plan's block tables and queue it."""
        size = self._block_size
        tables = []
        for row, view in zip(plan.rows, self.replica.apply(plan), strict=True):
            num_tokens = row.start + row.num_tokens
            assert len(view.block_ids) * size >= num_tokens, "the row's slots are allocated"
            slots = [slot for b in view.block_ids for slot in range(b * size, (b + 1) * size)]
            tables.append(slots[:num_tokens])
        self.replica.release(plan.released_seqs)
        self.queue.append((plan, tables))

    def compute(self, inputs: list[list[int]]) -> list[list[int]]:
        """Compute the oldest step; return the value of each token of each row.

        inputs: values of the stage before.
        """
        plan, tables = self.queue.popleft()
        outputs = []
        for row, slots, values in zip(plan.rows, tables, inputs, strict=True):
            context = [self._cache[slot] for slot in slots[: row.start]]
            total, outputs_of_row = sum(context), []
            for slot, value in zip(slots[row.start :], values, strict=True):
                result = attend(value, context, total)
                self._cache[slot] = result
                context = [result]
                total += result
                outputs_of_row.append(result)
            outputs.append(outputs_of_row)
        return outputs


@dataclass
class Client:
    """Requested and reported tokens of one sequence."""

    request: SubmitRequest
    reference: Reference
    tokens: list[int] = field(default_factory=list)
    finish_reason: str = ""


class _Channel:
    def __init__(self, pipeline: "ScriptedPipeline", stage: int) -> None:
        self._pipeline, self._stage = pipeline, stage

    def send(self, message: WireMessage) -> None:
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        self._pipeline.on_stage_message(self._stage, decode_for_stage(payload))


class ScriptedPipeline:
    """A real driver and scheduler over scripted stages, with its clients.

    Everything that it is given is checked: budgets of each plan, each reported token and each
    log-probability, and at the end what is left.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        rng: Random,
        acceptance: float,
        drafter: type[ScriptedDrafter] = ScriptedDrafter,
    ) -> None:
        """Create an idle pipeline.

        Args:
            config: resolved, with a `speculative_config` and one lane.
            rng: decides the guesses and when the stages compute.
            acceptance: probability that a guess is right.
            drafter: guesses.
        """
        self.config: Any = config
        self._rng = rng
        self.policy = RecordedPolicy(create_policy(config))
        num_stages = config.stages
        self.scheduler = Scheduler(
            config,
            self.policy,
            create_drafter=lambda _: drafter(rng, num_stages, acceptance),
        )
        self.stages = [ScriptedStage(config.block_size) for _ in range(num_stages)]
        first, *others = [_Channel(self, stage) for stage in range(num_stages)]
        self.driver = Driver(self.scheduler, first.send, [*others], self, vocab_size=VOCABULARY)
        self.clients: dict[int, Client] = {}
        self.alive: set[int] = set()
        self.plans: deque[StepPlan] = deque()
        """Plans that are not committed, the oldest first."""
        self.counts: Counter[str] = Counter()
        """Number of events by name, such as preemptions."""
        self._states: dict[int, SamplingState] = {}
        self._sampled: dict[int, int] = {}
        """Latest token of each sequence on the device."""
        self._between: list[deque[list[list[int]]]] = [deque() for _ in range(num_stages)]
        """Activations that a stage has sent and the next one has not computed, by sender."""

    # Clients.

    def submit(self, seq: int, prompt: list[int], max_tokens: int, **fields: Any) -> None:
        """Submit a request; `fields` are further ones of SubmitRequest, and `logprobs`."""
        sampling = SequenceSamplingParams(temperature=0.0, logprobs=fields.pop("logprobs", None))
        stop_ids = fields.pop("stop_ids", [])
        message = SubmitRequest(seq, prompt, sampling, max_tokens, stop_ids, **fields)
        for each in range(seq, seq + message.n):
            self.clients[each] = Client(message, Reference(len(self.stages), prompt))
            self.alive.add(each)
        self.driver.submit(message)
        self.driver.run_iteration()

    def abort(self, seqs: list[int]) -> None:
        """Abort sequences."""
        rows = [row for plan in self.plans for row in plan.rows]
        self.counts["aborted windows"] += any(
            row.seq in seqs and row.num_draft_tokens for row in rows
        )
        self.alive -= set(seqs)
        self.driver.abort(AbortSequences(seqs))
        self.driver.run_iteration()

    def send(self, message: WireMessage) -> None:
        """Check a report of the driver."""
        if not isinstance(message, EngineOutputs):
            return
        output = message.outcome
        details = {each.seq: deque[SampleDetails]() for each in message.details}
        for each in message.details:
            details[each.seq].append(each)
        for seq, token in zip(output.seqs, output.token_ids, strict=True):
            client = self.clients[seq]
            assert seq in self.alive, "nothing is reported after the end"
            assert token == client.reference.next_token, "the text is that without guesses"
            client.reference.extend([token])
            client.tokens.append(token)
            if client.request.sampling.logprobs is not None:
                sampled = details[seq].popleft().sampled
                assert sampled is not None
                assert (sampled.token, sampled.rank) == (token, 1), "of a token of the text"
        assert not any(details.values()), "no row of a rejected window is reported"
        for end in output.finished:
            assert not end.error, end.error
            if end.seq in self.alive:
                self.alive.remove(end.seq)
                self.clients[end.seq].finish_reason = end.finish_reason

    def send_encoded(self, payload: bytes) -> None:
        """Not used: the driver sends the frontend messages."""
        raise AssertionError

    # Stages.

    def on_stage_message(self, stage: int, message: Any) -> None:
        """Handle a message of the driver to a stage."""
        match message:
            case RegisterSequences():
                for seq in range(message.seq, message.seq + message.n):
                    self.stages[stage].replica.register(seq, message.prompt_len, message.prompt)
                if stage == len(self.stages) - 1:
                    states = create_sampling_states(message)
                    self._states.update(enumerate(states, start=message.seq))
            case RunStep(plan):
                if stage == 0:
                    self._check_plan(plan)
                    self.plans.append(plan)
                self.stages[stage].prepare(plan)
                if stage == len(self.stages) - 1:
                    for seq in plan.released_seqs:
                        self._states.pop(seq, None)

    def _compute(self, stage: int, num_steps: int) -> None:
        """Let a stage compute steps; those before it have computed them."""
        for _ in range(num_steps):
            plan, _ = self.stages[stage].queue[0]
            if stage:
                inputs = self._between[stage - 1].popleft()
            else:
                inputs = [self._tokens_of(row) for row in plan.rows]
            self._between[stage].append(self.stages[stage].compute(inputs))

    def _tokens_of(self, row: ScheduledRow) -> list[int]:
        prompt = self.clients[row.seq].request.prompt
        tokens = [*prompt[row.start : row.start + row.num_tokens], *row.token_ids]
        assert len(tokens) == row.num_tokens
        if ON_DEVICE in tokens:
            assert tokens.index(ON_DEVICE) == len(tokens) - 1
            assert not row.num_draft_tokens, "no guess follows a placeholder"
            tokens[-1] = self._sampled[row.seq]
        return tokens

    def run_ahead(self) -> None:
        """Let the stages compute some of the steps that they can; only a single stage waits."""
        if len(self.stages) == 1:
            return  # Placeholders need the sample of the step before.
        num_before = self._rng.randint(0, len(self.stages[0].queue))
        self._compute(0, num_before)
        for stage in range(1, len(self.stages)):
            self._compute(stage, self._rng.randint(0, len(self._between[stage - 1])))

    def commit(self) -> None:
        """Compute the oldest step to its end and report its result to the driver."""
        plan = self.plans.popleft()
        for stage, each in enumerate(self.stages):
            while each.queue and each.queue[0][0].step <= plan.step:
                self._compute(stage, 1)
        values = self._between[-1].popleft()
        sampling, chosen = self._build_sampling(plan, values)
        logits = torch.zeros(len(chosen), VOCABULARY)
        logits[torch.arange(len(chosen)), torch.tensor(chosen, dtype=torch.int64)] = 9.0
        output = sample_rows(logits, sampling)
        results = to_sampled_tokens(sampling, output)
        for result in results:
            self._sampled[result.seq] = (result.token_id, *result.further_token_ids)[-1]
        windows = [row for row in plan.rows if row.num_draft_tokens]
        num_void = len({row.seq for row in windows} - {result.seq for result in results})
        self.counts["void windows"] += num_void
        for stage in range(len(self.stages)):
            seconds = 1 + self._rng.random()
            self.scheduler.record_step_times(stage, [StepTime(plan.step, 0.0, seconds)])
        self.driver.commit(StepDone(StepResult(plan.step, results), output.details))
        self.driver.run_iteration()

    def _build_sampling(
        self, plan: StepPlan, values: list[list[int]]
    ) -> tuple[SamplingMetadata, list[int]]:
        """Return the sampling rows of a step, as an executor builds them, and their tokens."""
        owners: list[tuple[int, int]] = []
        indices: list[int] = []
        states, windows, chosen = [], [], []
        for row, values_of_row in zip(plan.rows, values, strict=True):
            if not row.should_sample:
                continue
            num_samples = row.num_samples
            windows.append(create_window(row, len(owners)))
            owners += [(row.seq, row.num_preemptions)] * num_samples
            states += [self._states[row.seq]] * num_samples
            prompt_len = len(self.clients[row.seq].request.prompt)
            last_index = row.start + row.num_tokens - prompt_len
            indices += range(last_index - num_samples + 1, last_index + 1)
            chosen += [value % VOCABULARY for value in values_of_row[-num_samples:]]
        metadata = build_sampling_metadata(owners, states, indices)
        return replace(metadata, windows=windows), chosen

    # Checks.

    def _check_plan(self, plan: StepPlan) -> None:
        """Check the budgets of a plan, and count what happens in it."""
        config, guesses = self.config, self.config.speculative_config
        assert sum(row.num_tokens for row in plan.rows) <= config.max_num_batched_tokens
        sequences = self.scheduler.table.sequences
        num_decodes = num_prefill = 0
        for row in plan.rows:
            sequence = sequences[row.seq]
            end = row.start + row.num_tokens
            in_flight = [r for p in self.plans for r in p.rows if r.seq == row.seq]
            if row.num_draft_tokens:
                num_first = row.num_draft_tokens == row.num_tokens
                assert row.num_draft_tokens <= guesses.num_speculative_tokens + num_first
                assert end <= sequence.prompt_len + sequence.request.max_tokens - 1
                most = guesses.max_windows_in_flight
                assert most is None or len(in_flight) < most
                self.counts["windows"] += 1
                self.counts["windows behind windows"] += any(
                    each.num_draft_tokens for each in in_flight
                )
            if row.start < sequence.num_prefill_tokens:
                num_prefill += row.num_tokens
                self.counts["chunks"] += end < sequence.num_prefill_tokens
            else:
                num_decodes += 1
        self.counts["guesses beside prefill"] += num_prefill > 0 and any(
            row.num_draft_tokens for row in plan.rows
        )
        is_forced = len(plan.rows) == 1 and not self.plans
        if not is_forced:
            # The last row may exceed a budget: each decode costs at least its token.
            assert num_decodes < self.policy.decode_limit + 1
            assert num_prefill < self.policy.prefill_limit + 1

    def drain(self) -> None:
        """Run until every sequence has ended."""
        for _ in range(100_000):
            if not self.alive:
                break
            assert self.plans, "requests wait, nothing is in flight, nothing is planned"
            self.run_ahead()
            self.commit()
        assert not self.alive, "no end in sight"
        while self.plans:
            self.commit()

    def check_end(self, seq: int) -> None:
        """Check that all texts are whole and nothing is left; `seq` is a free id."""
        for client in self.clients.values():
            if client.finish_reason == "length":
                assert len(client.tokens) == client.request.max_tokens
            elif client.finish_reason == "stop":
                assert client.tokens[-1] in client.request.stop_ids
            assert not set(client.tokens[:-1]) & set(client.request.stop_ids)
        stats = self.scheduler.stats()
        assert (stats.running, stats.waiting, stats.in_flight, stats.unfinished) == (0, 0, 0, 0)
        references, cached, free = self.scheduler.kv_cache.block_pool.describe()
        assert not references, "no block is leaked"
        assert len(cached) + len(free) == self.config.num_blocks
        queues = self.scheduler.describe()
        assert (queues.waiting_seqs, queues.ready_seqs, len(queues.decoding_seqs)) == ([], [], 0)
        assert stats.decode_context_tokens == stats.waiting_tokens == 0
        speculation: Any = self.scheduler._speculation
        assert speculation._sequences == {}, "no drafter is leaked"
        assert sum(stats.accepted_per_position) == stats.accepted_tokens <= stats.draft_tokens
        self.counts["preemptions"] += stats.preemptions
        self.counts["prefix hits"] += stats.prefix_hits
        self.counts["right guesses"] += stats.accepted_tokens
        self.counts["wrong guesses"] += stats.draft_tokens - stats.accepted_tokens
        # The next plan releases the sequences on the stages.
        self.submit(seq, [1], 1)
        self.drain()
        self.submit(seq + 1, [1], 1)
        for stage in self.stages:
            assert stage.replica.sequences.keys() == {seq + 1}
        assert self._states.keys() == {seq + 1}
        self.drain()
