"""Client of the driver in the parent process: requests out, token deltas back to their readers.

While no driver is attached the running requests are parked; the next driver gets them again with
the tokens that were delivered. Each epoch has a new scheduler and new stage instances, whose
counters start at zero; the totals add them up, so that no counter decreases over a recovery.
"""

from collections import Counter
from collections.abc import Callable, Collection
from itertools import zip_longest

import msgspec

from gllm.messages.reports import BubbleReport, StageUtilization, StepCostReport
from gllm.messages.requests import AbortSequences, EngineOutputs
from gllm.messages.sampling import SequenceSamplingParams
from gllm.routing.lengths.accuracy import MeasuredLengthPredictor
from gllm.routing.lengths.registry import make_length_predictor
from gllm.runtime.head.journal import JournalEntry
from gllm.runtime.head.request_client import RequestClient, SendFunction
from gllm.runtime.head.request_stream import RequestStream, SubmittedChoice, deliver_outputs
from gllm.runtime.head.suspects import SuspectTracker
from gllm.scheduler.output_lengths import LengthQuery, LimitLengthPredictor
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients

_POISON_ERROR = (
    "a worker died each time that it computed this request, the last time while no other request "
    "ran; it is not tried again"
)


class EngineClient(RequestClient):
    """Sends requests to the scheduler's process and returns their tokens; collects statistics.

    While no scheduler runs, as during a recovery, the requests wait. The next scheduler gets them
    with the tokens that were generated so far.

    Args:
        clock: returns the time in seconds; None for time.monotonic.
        length_predictor: name or file of the predictor of output lengths whose predictions requests
            carry to the scheduler, unless a router has predicted them; None: the scheduler predicts
            them itself.

    Raises:
        ValueError: there is no such predictor, or its file cannot be used.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        length_predictor: str | None = None,
    ) -> None:
        super().__init__(clock)
        self.output_lengths: MeasuredLengthPredictor | None = None
        """Predictor of output lengths with its accuracy; None if the scheduler predicts them."""
        if length_predictor is not None:
            self.output_lengths = MeasuredLengthPredictor(
                length_predictor, make_length_predictor(length_predictor)
            )
        self.step_sizes: Counter[int] = Counter()
        """Number of micro-batches by their tokens, rounded up to a power of two."""
        self.coefficients: StepCostCoefficients | None = None
        """Latest fit of the time of a step on the slowest stage; None before the first. It stays
        when an epoch ends."""
        self._send: SendFunction | None = None
        """None while requests are parked."""
        self._choices: dict[int, SubmittedChoice] = {}
        """By wire id, of submitted requests."""
        self._last_progress = self._clock()
        """Time of the last finished step."""
        self.totals = ReportTotals()
        """Reports, added up over all epochs."""
        self._is_reporting = False
        """False from the end of a scheduler to the start of the next one."""
        self._suspects: SuspectTracker[RequestStream] = SuspectTracker()
        self._is_isolating = False
        """True while suspects run one after the other and other requests are parked."""
        self._on_stats: Callable[[], None] | None = None
        self._retired: dict[int, RequestStream] = {}
        """Requests that were taken back from the driver for that, by wire id, until it is idle."""

    @property
    def stalled_seconds(self) -> float:
        """Seconds since the last finished step, while a driver has requests; else 0."""
        since = max(self._last_progress, self._busy_since)
        return self._clock() - since if self._choices else 0.0

    @property
    def is_attached(self) -> bool:
        """True if requests go to a driver."""
        return self._send is not None

    @property
    def stats(self) -> SchedulerStats:
        """Counters and gauges of the scheduler, summed over recoveries.

        Choices without a scheduler count as waiting.
        """
        stats = self.totals.stats
        if self._send is not None and not self._is_isolating:
            return stats
        parked = [stream.entry for stream in self._streams if stream.entry.is_parked]
        return stats._replace(
            waiting=stats.waiting + sum(len(entry.alive) for entry in parked),
            waiting_tokens=stats.waiting_tokens + sum(entry.num_prefill_tokens for entry in parked),
        )

    def set_stats_listener(self, listener: Callable[[], None]) -> None:
        """Call a function after each report of `stats`."""
        self._on_stats = listener

    def predict_recompute_seconds(self) -> float:
        """Return the predicted seconds in which a new driver computes the running requests again.

        It is the time of the slowest stage by its fitted step cost; 0 before the first fit.
        """
        if self.coefficients is None:
            return 0.0
        lengths = (stream.entry.num_prefill_tokens for stream in self._streams)
        return self.coefficients.predict_prefill_seconds(lengths)

    def attach(self, send: SendFunction) -> None:
        """Submit the waiting requests to a driver in order of arrival, and then each new request.

        Requests suspected of crashing workers run alone before, one after the other.
        """
        self._send = send
        self._is_reporting = True
        self._is_isolating = bool(self._suspects.suspects(self._streams))
        if self._is_isolating:
            self._continue_isolation(is_idle=True)
        else:
            self._submit_parked()

    def detach(self, cause: str) -> None:
        """Stop submitting requests, because the driver has ended; a warm-up fails with the cause.

        Running requests wait for the next driver.
        """
        self._send = None
        for stream in {choice.stream: None for choice in self._choices.values()}:
            stream.entry.seqs.clear()
            if stream not in self._streams:
                self._end(stream, stream.alive, "error", cause)
        self._choices.clear()
        self._suspects.isolated = None
        self._is_isolating = self._is_reporting = False
        self._retired.clear()
        self.totals.next_epoch()
        self._notify()

    def on_death(self, seqs: Collection[int]) -> bool:
        """Count a worker crash for the requests that were being computed; called before `detach`.

        Args:
            seqs: ids of the sequences with rows in uncommitted plans.

        Returns:
            True if one request is found to cause the crashes; it has ended with an error.
        """
        owners = self._retired | {seq: choice.stream for seq, choice in self._choices.items()}
        poison = self._suspects.on_death(seqs, owners)
        if poison is None:
            return False
        entry = poison.entry
        self._poison.add(entry.prompt, entry.sampling, self._clock())
        self._end(poison, poison.alive, "error", _POISON_ERROR, "poison")
        self._notify()
        return True

    def submit_warm_up(self, send: SendFunction) -> RequestStream:
        """Send a request of one token to a driver that is not attached yet.

        It is not in the journal, so it ends with an error when its driver does, and needs no
        release.
        """
        self._is_reporting = True
        greedy = SequenceSamplingParams(temperature=0)
        entry = JournalEntry([0], greedy, 1, [], 1, 0, "", arrival=self._clock())
        stream = RequestStream(entry, "", self._pending)
        self._submit(stream, send, self._choices)
        return stream

    def submit_entry(self, entry: JournalEntry, request_id: str = "") -> RequestStream:
        """Predict the output length of a request, then send it as `RequestClient` does."""
        if self.output_lengths is not None and not entry.predicted_output_tokens:
            query = LengthQuery(len(entry.prompt), entry.max_tokens, entry.prompt)
            entry.length_estimate = self.output_lengths.estimate(query)
            if entry.length_estimate.is_known:
                # Counted from the prompt; an engine may continue what another one began.
                num_generated = min(map(len, entry.outputs.values()))
                predicted = entry.length_estimate.likely(num_generated)
                entry.predicted_output_tokens = max(1, round(predicted))
        return super().submit_entry(entry, request_id)

    def on_report(
        self, message: EngineOutputs | StageUtilization | BubbleReport | StepCostReport
    ) -> None:
        """Handle a report of the pipeline; reports of a driver that was detached are ignored."""
        if not self._is_reporting:
            return
        if isinstance(message, EngineOutputs):
            self._on_outputs(message)
        elif isinstance(message, StepCostReport):
            self.coefficients = message.coefficients
        else:
            self.totals.on_report(message)

    def fail_all(self, cause: str) -> None:
        """End every request with an error, because the engine has died."""
        self.detach(cause)
        super().fail_all(cause)

    def _dispatch(self, stream: RequestStream) -> None:
        if self._send is not None and not self._is_isolating:
            self._submit(stream, self._send, self._choices)
        else:
            self._check_encoding(stream)

    def _on_removed(self, stream: RequestStream) -> None:
        self._suspects.clear(stream)

    def _submit_parked(self) -> None:
        """Submit all parked requests."""
        assert self._send is not None
        for stream in list(self._streams):
            if stream.entry.is_parked:
                self._submit(stream, self._send, self._choices)

    def _continue_isolation(self, is_idle: bool) -> None:
        """Let the next suspect run alone, or all requests if there is none.

        Args:
            is_idle: the driver has no request, so another one would run alone.
        """
        if self._send is None or self._suspects.isolated is not None:
            return
        suspects = self._suspects.suspects(self._streams)
        if not suspects:
            self._is_isolating = False
            self._submit_parked()
            return
        for stream in {choice.stream: None for choice in self._choices.values()}:
            self._park(stream)
        if is_idle:
            self._retired.clear()
            # Who is to blame has seldom come far, and nobody waits any more once it is found.
            suspect = min(suspects, key=lambda stream: stream.entry.num_output_tokens)
            self._submit(suspect, self._send, self._choices)
            self._suspects.isolate(suspect, suspect.entry.seqs.values())

    def _park(self, stream: RequestStream) -> None:
        """Take a running request back from the driver."""
        assert self._send is not None
        seqs = list(stream.entry.seqs.values())
        stream.entry.seqs.clear()
        for seq in seqs:
            self._retired[seq] = self._choices.pop(seq).stream
        self._send(AbortSequences(seqs))

    def _abort_seqs(self, stream: RequestStream, seqs: list[int]) -> None:
        """Abort sequences in the driver; a suspect that ran alone may have been among them."""
        if seqs and self._send is not None:
            self._send(AbortSequences(seqs))
        if self._is_isolating:
            self._continue_isolation(is_idle=False)

    def _on_outputs(self, message: EngineOutputs) -> None:
        """Deliver the output of a step and store the statistics."""
        tokens, stats = message.outcome.num_step_tokens, message.stats
        if tokens or message.outcome.finished:
            self._last_progress = self._clock()
        self.totals.latest_stats = stats
        if self._on_stats is not None:
            self._on_stats()
        if tokens:
            self.step_sizes[1 << (tokens - 1).bit_length()] += 1
        ended = deliver_outputs(message, self._choices)
        for end in message.outcome.finished:
            target = self._choices.get(end.seq)
            # Only outputs that have ended by themselves, as the scheduler does.
            if target is not None and end.finish_reason in ("stop", "length"):
                entry = target.stream.entry
                length = len(entry.outputs[target.choice])
                self.totals.output_lengths.record(entry.max_tokens, length)
                if entry.length_estimate is not None:
                    entry.length_estimate.record(length)
        if self._suspects.has_deaths:
            self._clear_suspects(message.outcome.seqs)
        for stream, choice, _ in ended:
            self._remove(stream, [choice])
        if self._is_isolating:
            self._continue_isolation(is_idle=not (stats.unfinished or stats.in_flight))
        self._notify()

    def _clear_suspects(self, seqs: list[int]) -> None:
        """Forget the deaths of requests that have a new token."""
        for seq in seqs:
            if choice := self._choices.get(seq):
                self._suspects.clear(choice.stream)


class ReportTotals:
    """Load and counters reported by the pipeline, with counters summed over its restarts."""

    def __init__(self) -> None:
        self.latest_stats = SchedulerStats()
        """Latest report of the running epoch's scheduler."""
        self._past_stats = SchedulerStats()
        self._ranks: dict[tuple[int, int], StageUtilization] = {}
        self._past_ranks: dict[tuple[int, int], StageUtilization] = {}
        self._bubbles = BubbleReport()
        self._past_bubbles = BubbleReport()
        self.output_lengths = LimitLengthPredictor(prior=0)
        """Lengths of the last outputs by class, with which the next scheduler begins."""

    @property
    def stats(self) -> SchedulerStats:
        """Gauges of the running epoch, and counters of all epochs."""
        past, present = self._past_stats, self.latest_stats
        return present._replace(
            steps=past.steps + present.steps,
            preemptions=past.preemptions + present.preemptions,
            prefix_queries=past.prefix_queries + present.prefix_queries,
            prefix_hits=past.prefix_hits + present.prefix_hits,
            prefill_tokens=past.prefill_tokens + present.prefill_tokens,
            decode_tokens=past.decode_tokens + present.decode_tokens,
            fetched_tokens=past.fetched_tokens + present.fetched_tokens,
            failed_fetches=past.failed_fetches + present.failed_fetches,
            drafts=past.drafts + present.drafts,
            draft_tokens=past.draft_tokens + present.draft_tokens,
            accepted_tokens=past.accepted_tokens + present.accepted_tokens,
            accepted_per_position=tuple(
                before + now
                for before, now in zip_longest(
                    past.accepted_per_position, present.accepted_per_position, fillvalue=0
                )
            ),
            resumed_cached_tokens=past.resumed_cached_tokens + present.resumed_cached_tokens,
            resumed_computed_tokens=past.resumed_computed_tokens + present.resumed_computed_tokens,
        )

    @property
    def rank_loads(self) -> dict[tuple[int, int], StageUtilization]:
        """Work done by each rank of each stage, by stage index and rank."""
        loads = {}
        for stage, rank in sorted({*self._past_ranks, *self._ranks}):
            nothing = StageUtilization(stage, 0, 0.0, rank=rank)
            past = self._past_ranks.get((stage, rank), nothing)
            present = self._ranks.get((stage, rank), nothing)
            loads[stage, rank] = msgspec.structs.replace(
                present,
                num_steps=past.num_steps + present.num_steps,
                busy_seconds=past.busy_seconds + present.busy_seconds,
                host_seconds=past.host_seconds + present.host_seconds,
                num_compilations=past.num_compilations + present.num_compilations,
                late_seconds=past.late_seconds + present.late_seconds,
            )
        return loads

    @property
    def stage_loads(self) -> dict[int, StageUtilization]:
        """Work done by rank 0 of each stage, by stage index."""
        return {stage: load for (stage, rank), load in self.rank_loads.items() if rank == 0}

    @property
    def bubbles(self) -> BubbleReport:
        """Idle time of the stages while work was available; recoveries are left out."""
        past, present = self._past_bubbles, self._bubbles
        seconds = zip_longest(past.seconds, present.seconds, fillvalue=0.0)
        return BubbleReport(list(map(sum, seconds)), past.work_seconds + present.work_seconds)

    def on_report(self, report: StageUtilization | BubbleReport) -> None:
        """Store a report of a rank or of the driver."""
        if isinstance(report, BubbleReport):
            self._bubbles = report
        else:
            self._ranks[report.stage, report.rank] = report

    def next_epoch(self) -> None:
        """Add the counters of the epoch that has ended to the totals, and reset the gauges."""
        stats, ranks, bubbles = self.stats, self.rank_loads, self.bubbles
        self._past_stats, self._past_ranks, self._past_bubbles = stats, ranks, bubbles
        self.latest_stats, self._ranks, self._bubbles = SchedulerStats(), {}, BubbleReport()
