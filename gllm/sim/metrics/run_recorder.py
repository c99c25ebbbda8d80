"""Record a simulated run directly, without a step log in between."""

from collections.abc import Callable

from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import StartEvent
from gllm.scheduler.plan import ScheduledRow, StepOutput, StepPlan, count_tokens
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.metrics.micro_batch_table import MicroBatchTable
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.observer import PipelineObserver, SchedulerCall

NUM_UNRECORDED_STEPS = 128
"""Steps whose tokens wait for their timelines. Many engines in turns displace the timelines from
the CPU's cache, so that each step alone would load them again."""


class RunRecorder(PipelineObserver):
    """Pipeline observer that builds the RunRecord of a simulated run, from one start to its end.

    The record equals that of `build_run_record` from the run's step log, but without stage reports,
    which only a replay needs.

    Args:
        start: First event of the run's log.
        delivery_seconds: Time from the commit of so many tokens until the client has them, at which
            the timelines have them; None: they have them at the commit.
    """

    def __init__(
        self, start: StartEvent, delivery_seconds: Callable[[int], float] | None = None
    ) -> None:
        self._delivery_seconds = delivery_seconds
        self._delivered_time = start.time
        """When the client had the newest tokens."""
        self._micro_batches = MicroBatchTable(len(start.layers))
        self._record = RunRecord(start, micro_batches=self._micro_batches)
        self._requests = self._record.requests
        self._parallelism = 0
        self._received_time = start.time
        """Time of the last news that the driver received."""
        self._news: list[ServedRequest] = []
        """Requests added since the last schedule."""
        self._committed_steps: list[int] = []
        """Steps committed since the last schedule."""
        self._prefilled: dict[int, int] = {}
        """By unfinished sequence, its preemptions when a prefill was last planned to its end."""
        self._chunk_times: dict[int, float] = {}
        """By unfinished sequence, time of the last commit of a prefill chunk."""
        self._prefill_counts: dict[int, int] = {}
        """Number of prefill rows of each step in flight, by step."""
        self._fetched_tokens: dict[int, int] = {}
        """Tokens whose KV another engine has, by sequence that has not been scheduled yet."""
        self._unrecorded: list[tuple[list[int], float]] = []
        """Sequences with a token and time of the committed steps that no timeline has yet."""

    @property
    def record(self) -> RunRecord:
        """Return the record of the run so far."""
        self._record_tokens()
        return self._record

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Begin the timelines of a request's sequences."""
        self._received_time = now
        prompt_len = len(request.prompt_token_ids)
        for index in range(request.n):
            line = RequestTimeline(now - request.age_seconds)
            if request.outputs:
                line.record_output(now, len(request.outputs[index]))
            served = ServedRequest(prompt_len, request.max_tokens, line)
            self._requests[request.seq + index] = served
            self._news.append(served)
        if request.kv_source_tokens:
            self._fetched_tokens[request.seq] = request.kv_source_tokens

    def on_aborted(self, seqs: list[int], now: float) -> None:
        """Drop the state of aborted sequences."""
        self._received_time = now
        for seq in seqs:
            self._forget(seq)

    def on_scheduled(self, call: SchedulerCall, now: float) -> None:
        """Add a micro-batch, and the parallelism if it has changed."""
        plan, work, parallelism, kv_usage = call
        if parallelism != self._parallelism:
            self._parallelism = parallelism
            self._record.parallelism.append((now, parallelism))
        received_time = self._received_time
        if self._news:
            for served in self._news:
                served.received_time = received_time
            self._news.clear()
        if self._committed_steps:
            for step in self._committed_steps:
                self._micro_batches.set_received(step, received_time)
            self._committed_steps.clear()
        if plan is None or work is None:
            return
        if self._fetched_tokens:
            self._record_fetched_rows(plan.rows, now)
        num_prefill_rows = self._record_prefill_rows(plan.rows, now)
        self._prefill_counts[plan.step] = num_prefill_rows
        self._micro_batches.append_planned(
            now,
            received_time,
            kv_usage,
            work,
            count_tokens(plan.rows[: len(plan.rows) - num_prefill_rows]),
        )

    def _record_fetched_rows(self, rows: list[ScheduledRow], now: float) -> None:
        """Record the starts of sequences that decode without a prefill, because KV was fetched."""
        for row in rows:
            num_tokens = self._fetched_tokens.pop(row.seq, None)
            if num_tokens is not None and row.start == num_tokens:
                self._record_schedule(row, now)
                self._prefilled[row.seq] = row.num_preemptions

    def _record_prefill_rows(self, rows: list[ScheduledRow], now: float) -> int:
        """Record the starts and preemptions of prefilled sequences; return their number.

        Prefill rows are the last ones of a plan, and a sequence that has lost its blocks prefills
        first. So the rows before need no look.
        """
        for index in range(len(rows) - 1, -1, -1):
            row = rows[index]
            if self._prefilled.get(row.seq) == row.num_preemptions:
                return len(rows) - 1 - index
            self._record_schedule(row, now)
            if row.should_sample:
                self._prefilled[row.seq] = row.num_preemptions
        return len(rows)

    def _record_schedule(self, row: ScheduledRow, now: float) -> None:
        """Record a row of a sequence; after a preemption with the time of its last commit."""
        served = self._requests[row.seq]
        last_commit_time = now
        if (
            served.first_scheduled_time is not None
            and row.num_preemptions != served.num_preemptions
        ):
            self._record_tokens()
            chunk_time = self._chunk_times.get(row.seq, served.line.arrival)
            last_commit_time = min(now, max([*served.line.times[-1:], chunk_time]))
        served.record_schedule(row.num_preemptions, now, last_commit_time)

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Record when a stage computed a step."""
        self._received_time = end
        self._micro_batches.set_stage_time(step, stage, start, end)

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Record the tokens of a step."""
        self._received_time = now
        self._micro_batches.set_committed(plan.step, now)
        self._committed_steps.append(plan.step)
        num_prefill_rows = self._prefill_counts.pop(plan.step)
        for row in plan.rows[len(plan.rows) - num_prefill_rows :]:
            self._chunk_times[row.seq] = now
        delivered_time = now
        if self._delivery_seconds is not None and output.seqs:
            # The tokens of a step are not delivered before those of the step before.
            delivered_time = max(
                self._delivered_time, now + self._delivery_seconds(len(output.seqs))
            )
            self._delivered_time = delivered_time
        self._unrecorded.append((output.seqs, delivered_time))
        if len(self._unrecorded) == NUM_UNRECORDED_STEPS:
            self._record_tokens()
        for finished in output.finished:
            self._forget(finished.seq)

    def _record_tokens(self) -> None:
        """Add the tokens of the last steps to the timelines."""
        requests = self._requests
        for seqs, now in self._unrecorded:
            for seq in seqs:
                line = requests[seq].line
                line.times.append(now)
                line.num_tokens += 1
        self._unrecorded.clear()

    def _forget(self, seq: int) -> None:
        """Drop the state of a sequence that has ended."""
        self._prefilled.pop(seq, None)
        self._chunk_times.pop(seq, None)
        self._fetched_tokens.pop(seq, None)
