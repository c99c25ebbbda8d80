"""Driver: connects the pipeline's scheduler to the frontend and the stages.

It lives in the first stage's process, on its event loop: requests in, plans out, results in,
outputs out.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, encode
from gllm.messages.handoff import (
    HandOffSequence,
    KeepComputedKv,
    PrefetchKv,
    ReleaseKvHolds,
    RenewKvHolds,
)
from gllm.messages.kv_cache import AdoptKvBlocks, KvCacheEvents, WatchKvCache
from gllm.messages.kv_disk import (
    KvDiskCopied,
    KvDiskFailed,
    KvDiskLost,
    KvDiskOpened,
    KvDiskRecords,
    KvDiskWritten,
)
from gllm.messages.kv_transfer import (
    CopyKvBlocks,
    KvBlocksCopied,
    KvFetched,
    KvFetchStarted,
    KvMachineReport,
    KvMoverGone,
    KvRevoked,
)
from gllm.messages.lifecycle import CommandDone, ResetPrefixCache
from gllm.messages.reports import BubbleReport, LinkTimes, StageTimes, StepCostReport
from gllm.messages.requests import AbortSequences, EngineOutputs, RejectedRequest, SubmitRequest
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import GrammarReady, RegisterSequences, RunStep, StepDone
from gllm.observability.bubbles import BubbleMeter
from gllm.pacing.depth import LinkSeconds, PipelineSeconds
from gllm.pacing.pacer import PipelinePacer
from gllm.recovery.kept_blocks import contains_block
from gllm.runtime.driver.driver_kv import DriverKv
from gllm.runtime.driver.hash_file import HashFile
from gllm.runtime.driver.kv_movers import MoverGroup
from gllm.runtime.driver.plan_record import PlanRecord
from gllm.runtime.driver.staged_movers import StagedMovers
from gllm.scheduler.plan import FinishedSequence, StepOutput, StepPlan
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import compute_stage_work
from gllm.scheduler.step_cost import StepCostMeter

log = logging.getLogger(__name__)


class DriverPacing:
    """Adjusts the number of micro-batches in flight to measured stage times and network delays."""

    def __init__(self, scheduler: Scheduler, bytes_per_token: int) -> None:
        """Create the pacing of a pipeline, and set its first depth.

        Args:
            scheduler: scheduler of the pipeline.
            bytes_per_token: bytes of activations per token between two stages.
        """
        self._scheduler = scheduler
        self._bytes_per_token = bytes_per_token
        self._pacer = PipelinePacer(scheduler.config)
        scheduler.set_depth(*self._pacer.pace)

    def on_scheduled(self, plan: StepPlan) -> None:
        """Record a micro-batch that all stages will compute."""
        self._pacer.on_scheduled(compute_stage_work(plan.step, plan.rows))

    def on_stage_times(self, message: StageTimes) -> None:
        """Record the times of steps that a stage has computed."""
        self._pacer.on_stage_times(message.stage, message.steps)

    def on_link_times(self, message: LinkTimes) -> None:
        """Record the measured times of the links."""
        self._pacer.on_paths(convert_link_times(message, self._bytes_per_token))

    def update(self, now: float) -> None:
        """Change the number of micro-batches in flight if another number is faster by enough."""
        if not self._pacer.is_due(now):
            return
        before, stats = self._pacer.pace, self._scheduler.stats()
        pace = self._pacer.update(stats.decoding, stats.decode_context_tokens, now)
        if pace is None:
            return
        self._scheduler.set_depth(*pace)
        log.info(
            "micro-batches in flight: %d -> %d, prefill tokens in each: at most %d -> %d%s",
            before.depth,
            pace.depth,
            before.max_prefill_tokens,
            pace.max_prefill_tokens,
            ", decodes and prefill together" if pace.is_mixed else "",
        )


def convert_link_times(message: LinkTimes, bytes_per_token: int) -> PipelineSeconds:
    """Convert measured round trips and bandwidths of the stages' connections to seconds.

    The latency is half of the round trip; the bandwidth becomes seconds per token.

    Args:
        message: measured round trips and bytes per second of the connections between stages.
        bytes_per_token: size of one token's activations.
    """

    def seconds_per_token(rate: float | None) -> float:
        if rate is None:
            return 0.0
        return bytes_per_token / rate if rate else inf

    links = [
        LinkSeconds(
            link.round_trip_seconds / 2,
            seconds_per_token(link.bytes_per_second),
            seconds_per_token(link.min_bytes_per_second),
        )
        for link in message.links
    ]
    latencies = [seconds / 2 for seconds in message.driver_round_trips]
    return PipelineSeconds([], links, latencies, latencies[-1])


class MessageSender(Protocol):
    """Interface for sending messages to another process; sending never blocks."""

    def send(self, message: WireMessage) -> None:
        """Queue a message."""

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message."""


class HeldRequest(NamedTuple):
    """Request that is not scheduled yet because its grammar is still being compiled."""

    request: SchedulerRequest
    submit_time: float
    """Time at which the driver received it, which decides its position in the queue of waiting
    requests."""
    aborted: set[int]
    """Sequences of the request that were aborted since."""


class HeldRequests:
    """Requests that wait for their grammar, and their totals.

    The time of a change does not depend on their number.
    """

    def __init__(self) -> None:
        self._requests: dict[int, HeldRequest] = {}
        """By the id of the first sequence."""
        self._first_seqs: dict[int, int] = {}
        """Id of the first sequence of its request by the id of a sequence."""
        self.num_waiting_tokens = 0
        """Prefill tokens of all of them."""

    @property
    def num_seqs(self) -> int:
        """Number of their sequences."""
        return len(self._first_seqs)

    @property
    def seqs(self) -> Iterator[int]:
        """Ids of their sequences, in the order of their submission."""
        return iter(self._first_seqs)

    def add(self, request: SchedulerRequest, now: float) -> None:
        """Add a request that was submitted at `now`."""
        self._requests[request.seq] = HeldRequest(request, now, set())
        self._first_seqs |= dict.fromkeys(range(request.seq, request.seq + request.n), request.seq)
        self.num_waiting_tokens += _count_prefill_tokens(request)

    def pop(self, seq: int) -> HeldRequest | None:
        """Remove and return a request by the id of its first sequence; None if it is not held."""
        held = self._requests.pop(seq, None)
        if held is not None:
            for each in range(seq, seq + held.request.n):
                del self._first_seqs[each]
            self.num_waiting_tokens -= _count_prefill_tokens(held.request)
        return held

    def abort(self, seqs: Iterable[int]) -> list[int]:
        """Record aborted sequences; return the requests that have no other, by first sequence."""
        ended = []
        for seq in seqs:
            first = self._first_seqs.get(seq)
            if first is None:
                continue
            held = self._requests[first]
            held.aborted.add(seq)
            if len(held.aborted) == held.request.n:
                ended.append(first)
        return ended


class Driver:
    """Runs the scheduler: sends step plans to the stages, commits their results, reports outputs.

    It runs on the event loop of the first stage's worker process.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        first_stage: Callable[[RegisterSequences | RunStep | CopyKvBlocks], None],
        other_stages: list[MessageSender],
        frontend: MessageSender,
        last_stage_needs_prompts: bool = False,
        vocab_size: int | None = None,
        plan_record: PlanRecord | None = None,
        first_stage_ranks: MessageSender | None = None,
        pacing: DriverPacing | None = None,
        has_kv_mover: bool = False,
        all_stages_need_prompts: bool = False,
        kv_machines: Sequence[MessageSender] = (),
        num_staging_blocks: int = 0,
        num_workers: int = 1,
        hash_file: HashFile | None = None,
        has_kv_disk: bool = False,
        verifies_grammars: bool = True,
    ) -> None:
        """Create the driver.

        Args:
            scheduler: scheduler of the pipeline.
            first_stage: called with the messages for the stage of this process.
            other_stages: channels to the other stages, in order, each to all ranks of its stage.
            frontend: channel to the parent.
            last_stage_needs_prompts: True if the last stage needs all prompts, not only those that
                it samples by.
            vocab_size: token ids of requests have to be smaller; None for no check.
            plan_record: where uncommitted plans are recorded for the parent; None for nowhere.
            first_stage_ranks: channel to the other ranks of the first stage; None without any.
            pacing: sets the depth of the scheduler; None for a fixed one.
            has_kv_mover: True if KV blocks can be given to other engines and fetched from them.
            all_stages_need_prompts: True if every stage reads the tokens of its inputs.
            kv_machines: channels to the other machines' workers that pass on what their KV movers
                and the driver send each other.
            num_staging_blocks: staging blocks of each worker, if the KV caches are in the memory of
                devices; otherwise 0.
            num_workers: workers of all stages.
            hash_file: copy of the prefix cache's hashes that outlives this driver; None if no later
                driver can use the blocks.
            has_kv_disk: True if the KV movers keep blocks of the prefix cache on disk.
            verifies_grammars: True if the last stage can verify guesses of sequences with a
                grammar; otherwise these have none.
        """
        self.kv: DriverKv | None = None
        """Transfers of KV blocks; None if every request is computed here."""
        if has_kv_mover:
            sends = [machine.send for machine in kv_machines]

            def stage(movers: MoverGroup) -> StagedMovers:
                return StagedMovers(movers, num_staging_blocks, num_workers, self._copy_kv_blocks)

            staging = stage if num_staging_blocks else None
            self.kv = DriverKv(
                *(scheduler, frontend.send),
                machines=sends,
                staging=staging,
                has_disk=has_kv_disk and staging is None,
            )
        self._earlier_hashes: dict[int, bytes] = {}
        self._earlier_tails: dict[int, bytes] = {}
        """Hash of each block that the driver before had published, until blocks are adopted."""
        if hash_file is not None:
            self._earlier_hashes = hash_file.earlier
            self._earlier_tails = hash_file.earlier_tails
            scheduler.kv_cache.names_tails = True
            scheduler.kv_cache.block_pool.listeners.append(hash_file)
        self._pacing = pacing
        self._plan_record = plan_record
        self._vocab_size = vocab_size
        self._last_stage_needs_prompts = last_stage_needs_prompts
        self._verifies_grammars = verifies_grammars
        self._all_stages_need_prompts = all_stages_need_prompts
        self.scheduler = scheduler
        self._first_stage = first_stage
        self._other_stages = other_stages
        self._first_stage_ranks = first_stage_ranks
        # First those that compute a step at the same time as this process.
        self._receivers = ([first_stage_ranks] if first_stage_ranks else []) + other_stages
        """Channels to all other processes."""
        self._frontend = frontend
        self._outputs: list[tuple[StepOutput, list[SampleDetails]]] = []
        """Not sent to the frontend yet."""
        self._held = HeldRequests()
        self._has_new_stats = False
        """True if requests or plans changed since the frontend got the last statistics."""
        self._meter = BubbleMeter(scheduler.config.stages, time.monotonic())
        self._step_costs = StepCostMeter(scheduler.config.stages)
        self._num_cache_events = 0
        """Reports on the prefix cache since the frontend began to watch it."""

    def handle(self, message: AnyMessage) -> None:
        """Handle a message of the frontend, of a stage, or of the process that transfers KV blocks.

        Raises:
            ValueError: the driver handles no such messages.
        """
        match message:
            case SubmitRequest():
                self.submit(message)
            case RejectedRequest():
                self.reject(message)
            case AbortSequences():
                self.abort(message)
            case ResetPrefixCache():
                self.reset_prefix_cache(message)
            case WatchKvCache():
                self.watch_kv_cache(message)
            case AdoptKvBlocks():
                self.adopt_kv_blocks(message)
            case StepDone():
                self.commit(message)
            case GrammarReady():
                self.on_grammar_ready(message)
            case StageTimes():
                self.on_stage_times(message)
            case LinkTimes():
                if self._pacing is not None:
                    self._pacing.on_link_times(message)
            case (
                KvFetchStarted()
                | KvFetched()
                | KvRevoked()
                | KvMoverGone()
                | KvMachineReport()
                | KvBlocksCopied()
                | KvDiskRecords()
                | KvDiskOpened()
                | KvDiskFailed()
                | KvDiskCopied()
                | KvDiskWritten()
                | KvDiskLost()
                | PrefetchKv()
                | ReleaseKvHolds()
                | RenewKvHolds()
                | HandOffSequence()
                | KeepComputedKv()
            ):
                # Blocks of other engines, of which some may be free afterwards.
                if self.kv is not None:
                    self.kv.on_message(message)
                    self._has_new_stats = True
            case _:
                raise ValueError(f"the driver has no use for {type(message).__name__}")

    def submit(self, message: SubmitRequest) -> None:
        """Add a request to the scheduler and register its sequences with the stages.

        A request that cannot run ends with an error; other requests are not affected.
        """
        self._has_new_stats = True
        try:
            self._submit(message)
        except Exception as error:
            if not isinstance(error, ValueError):
                log.exception("request %d could not be submitted", message.seq)
            if self._held.pop(message.seq) is not None:
                self._record_held()
            self._fail(message.seq, message.n, str(error) or type(error).__name__)

    def reject(self, message: RejectedRequest) -> None:
        """End a request that could not be decoded."""
        log.error("request %d: %s", message.seq, message.error)
        self._fail(message.seq, message.n, message.error)

    def _submit(self, message: SubmitRequest) -> None:
        """Add a request.

        Raises:
            ValueError: it can never run.
        """
        request = SchedulerRequest(
            message.seq,
            message.prompt,
            message.max_tokens,
            frozenset(message.stop_ids),
            message.priority,
            message.cache_salt,
            message.n,
            message.sampling.prompt_logprobs is None,
            message.outputs,
            message.age_seconds,
            predicted_output_tokens=message.predicted_output_tokens,
            client=message.client,
            session=message.session,
            allows_guesses=self._verifies_grammars or not message.sampling.grammar,
        )
        if self.kv is not None:
            request = self.kv.add_transfer_fields(request, message)
        request.check(self.scheduler.config.max_model_len)
        message.check(self._vocab_size)
        now = time.monotonic()
        if message.sampling.grammar:
            self._held.add(request, now)
            self._record_held()
        else:
            self.scheduler.add(request, now)
        self._register(message)

    def on_grammar_ready(self, message: GrammarReady) -> None:
        """Schedule a request whose grammar is compiled, or end it if it cannot be sampled.

        Requests wait until their grammar is compiled, so that no step waits for it.
        """
        self._has_new_stats = True
        # Also a failed request: the scheduler makes the stages release its sequences.
        count = self._add_held_request(message.seq) or message.n
        if message.error:
            self._fail(message.seq, count, message.error)

    def abort(self, message: AbortSequences) -> None:
        """Abort sequences, for example because their client has disconnected."""
        self._has_new_stats = True
        for seq in self._held.abort(message.seqs):
            # The scheduler makes the stages release the registered sequences.
            self._add_held_request(seq)
        self.scheduler.abort(message.seqs)

    def _add_held_request(self, seq: int) -> int:
        """Add a held request to the scheduler, without its aborted choices.

        Returns:
            The number of its choices; 0 if it is not held.
        """
        held = self._held.pop(seq)
        if held is None:
            return 0
        self._record_held()
        now = time.monotonic()
        age = held.request.age_seconds + now - held.submit_time
        request = held.request._replace(age_seconds=age)
        self.scheduler.add(request, now)
        self.scheduler.abort(sorted(held.aborted))
        return request.n

    def _record_held(self) -> None:
        """Record the held requests: a death may be due to the compilation of a grammar."""
        if self._plan_record is not None:
            self._plan_record.on_held(self._held.seqs)

    def reset_prefix_cache(self, message: ResetPrefixCache) -> None:
        """Empty the prefix cache."""
        self.scheduler.reset_prefix_cache()
        self._frontend.send(CommandDone(message.command_id, stage=0))

    def adopt_kv_blocks(self, message: AdoptKvBlocks) -> None:
        """Begin with the KV blocks of the epoch before that are intact on all workers.

        Those that no committed step has published are not among them.
        """
        earlier, self._earlier_hashes = self._earlier_hashes, {}
        earlier_tails, self._earlier_tails = self._earlier_tails, {}
        full = message.intact.full
        kept = {block: digest for block, digest in earlier.items() if contains_block(full, block)}
        tails = {}
        for block, digest in earlier_tails.items():
            num_slots = message.intact.begun.get(block, 0)
            if contains_block(full, block):
                # The last step that wrote to it has not been committed.
                num_slots = self.scheduler.config.block_size
            if num_slots:
                tails[block] = digest, num_slots
        if kept or tails:
            self.scheduler.adopt_blocks(kept, tails)
        log.info(
            "KV blocks kept from before: %d of %d, and %d of %d that were not full",
            *(len(kept), len(earlier), len(tails), len(earlier_tails)),
        )

    def watch_kv_cache(self, message: WatchKvCache) -> None:
        """Start or stop the reports on the prefix cache; the first report is a snapshot."""
        self._num_cache_events = 0
        if message.is_on:
            self.scheduler.kv_cache.watch(message.with_tokens)
        else:
            self.scheduler.kv_cache.unwatch()

    def commit(self, message: StepDone) -> None:
        """Commit a step's result.

        Raises:
            ValueError: it is not the next step.
        """
        output = self.scheduler.commit(message.result)
        if self.kv is not None:
            self.kv.report_first_chunks()
        if self._plan_record is not None:
            self._plan_record.on_committed(message.result.step)
        details = message.details
        if details:
            # A row past the end of its sequence has no output.
            num_left = Counter(output.seqs)
            kept = []
            for row in details:
                num_left[row.seq] -= 1
                if num_left[row.seq] >= 0:
                    kept.append(row)
            details = kept
        self._outputs.append((output, details))

    def on_stage_times(self, message: StageTimes) -> None:
        """Report step times to the scheduler, idle time and step costs to the frontend."""
        self.scheduler.record_step_times(message.stage, message.steps)
        if self._pacing is not None:
            self._pacing.on_stage_times(message)
        meter = self._meter
        meter.record_steps(message.stage, message.steps, message.complete_until)
        self._frontend.send(BubbleReport(meter.totals.bubble_seconds, meter.totals.work_seconds))
        if (coefficients := self._step_costs.on_stage_times(message.steps)) is not None:
            self._frontend.send(StepCostReport(coefficients))
            if self.kv is not None:
                self.kv.set_step_cost(coefficients)

    def run_iteration(self) -> None:
        """Schedule until the pipeline is full, then report; called after each batch of messages.

        Statistics go with the outputs; without outputs they are sent if they have changed.
        """
        if self._pacing is not None:
            self._pacing.update(time.monotonic())
        if self.kv is not None:
            self.kv.start_fetches()
        while not self._awaits_disk():
            now = time.monotonic()
            plan = self.scheduler.schedule(now)
            self._meter.record_parallelism(now, self.scheduler.available_parallelism())
            if plan is None:
                break
            self._step_costs.on_scheduled(plan)
            if self._pacing is not None:
                self._pacing.on_scheduled(plan)
            self._has_new_stats = True
            if self._plan_record is not None:
                # First: a stage may die as soon as it has the plan.
                self._plan_record.on_scheduled(plan)
            step = RunStep(plan)
            payload = encode(step) if self._receivers else b""
            for receiver in self._receivers:
                receiver.send_encoded(payload)
            self._first_stage(step)
        if self.kv is not None:
            self.kv.report_transfers()
        outputs, self._outputs = self._outputs, []
        if self._has_new_stats and not outputs:
            outputs = [(StepOutput([], [], [], []), [])]
        self._has_new_stats = False
        if outputs:
            # Held requests count as waiting.
            stats = self.scheduler.stats()
            stats = stats._replace(
                waiting=stats.waiting + self._held.num_seqs,
                waiting_tokens=stats.waiting_tokens + self._held.num_waiting_tokens,
            )
            for output, details in outputs:
                self._frontend.send(EngineOutputs(output, stats, details))
        # There are events only while the frontend watches the prefix cache.
        if (events := self.scheduler.kv_cache.pop_events()) is not None:
            self._frontend.send(KvCacheEvents(self._num_cache_events, *events))
            self._num_cache_events += 1

    def _awaits_disk(self) -> bool:
        """Return True if no step may begin yet: requests should find the blocks on disk."""
        disk = None if self.kv is None else self.kv.disk
        has_work = bool(self.scheduler.table.sequences)
        return disk is not None and has_work and disk.is_opening(time.monotonic())

    def _copy_kv_blocks(self, command: CopyKvBlocks) -> None:
        """Let the workers of all stages copy KV blocks of their devices."""
        for receiver in self._receivers:
            receiver.send(command)
        self._first_stage(command)

    def _fail(self, seq: int, n: int, error: str) -> None:
        """End the sequences seq .. seq + n - 1 with an error, scheduled or not."""
        seqs = range(seq, seq + n)
        self.scheduler.abort(list(seqs))
        ends = [FinishedSequence(sequence, "error", error=error) for sequence in seqs]
        self._outputs.append((StepOutput([], [], [], ends), []))

    def _register(self, message: SubmitRequest) -> None:
        """Register a request's sequences with all ranks of all stages.

        The first stage gets the prompt, or all stages do if they need it. The last one gets the
        sampling parameters and the outputs of earlier processes, with the prompt if it needs that.
        """
        ids_only = RegisterSequences(message.seq, len(message.prompt), n=message.n)
        with_prompt = msgspec.structs.replace(ids_only, prompt=message.prompt)
        between = with_prompt if self._all_stages_need_prompts else ids_only
        needs_prompt = self._last_stage_needs_prompts or message.sampling.needs_prompt
        needs_prompt |= self._all_stages_need_prompts
        base = with_prompt if not self._other_stages or needs_prompt else ids_only
        last = msgspec.structs.replace(
            base, sampling=message.sampling, choices=message.choices, outputs=message.outputs
        )
        first = with_prompt if self._other_stages else last
        if self._first_stage_ranks is not None:
            self._first_stage_ranks.send(first)
        self._first_stage(first)
        for stage in self._other_stages[:-1]:
            stage.send(between)
        if self._other_stages:
            self._other_stages[-1].send(last)


def _count_prefill_tokens(request: SchedulerRequest) -> int:
    """Return the tokens of a request to prefill; its choices share the prompt."""
    return len(request.prompt_token_ids) + sum(map(len, request.outputs))
