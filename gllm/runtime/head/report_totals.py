"""Totals of the pipeline's reports over all generations.

Each generation has a new scheduler and new stage instances, whose counters start at zero. The
totals add them up, so that a counter never decreases over a recovery.
"""

from itertools import zip_longest

import msgspec

from gllm.messages.reports import BubbleReport, StageUtilization
from gllm.scheduler.output_lengths import OutputLengthPredictor
from gllm.scheduler.plan import SchedulerStats


class ReportTotals:
    """Latest reports of the running generation plus the final counters of the earlier ones."""

    def __init__(self) -> None:
        self._stats = SchedulerStats()
        self._past_stats = SchedulerStats()
        self._ranks: dict[tuple[int, int], StageUtilization] = {}
        self._past_ranks: dict[tuple[int, int], StageUtilization] = {}
        self._bubbles = BubbleReport()
        self._past_bubbles = BubbleReport()
        self._output_lengths = OutputLengthPredictor(prior=0)

    @property
    def stats(self) -> SchedulerStats:
        """Gauges of the running generation, and counters of all generations."""
        return _add_stats(self._past_stats, self._stats)

    @property
    def rank_loads(self) -> dict[tuple[int, int], StageUtilization]:
        """Work done by each rank of each stage, by stage index and rank."""
        places = sorted({*self._past_ranks, *self._ranks})
        nothing = {place: StageUtilization(place[0], 0, 0.0, rank=place[1]) for place in places}
        past, present = {**nothing, **self._past_ranks}, {**nothing, **self._ranks}
        return {place: _add_utilization(past[place], present[place]) for place in places}

    @property
    def stage_loads(self) -> dict[int, StageUtilization]:
        """Work done by rank 0 of each stage, by stage index."""
        return {stage: load for (stage, rank), load in self.rank_loads.items() if rank == 0}

    @property
    def bubbles(self) -> BubbleReport:
        """Idle time of the stages while work was available; recoveries are left out."""
        return _add_bubbles(self._past_bubbles, self._bubbles)

    @property
    def output_lengths(self) -> dict[int, list[int]]:
        """Lengths of the last outputs by class, with which the next scheduler begins."""
        return self._output_lengths.recent_lengths

    def record_output(self, max_tokens: int, length: int) -> None:
        """Note the length of an output that has ended by itself."""
        self._output_lengths.record(max_tokens, length)

    def on_stats(self, stats: SchedulerStats) -> None:
        """Store the scheduler's latest statistics."""
        self._stats = stats

    def on_report(self, report: StageUtilization | BubbleReport) -> None:
        """Store a report of a rank or of the driver."""
        if isinstance(report, BubbleReport):
            self._bubbles = report
        else:
            self._ranks[report.stage, report.rank] = report

    def next_generation(self) -> None:
        """Keep the counters of the generation that has ended; its gauges become zero."""
        stats, ranks, bubbles = self.stats, self.rank_loads, self.bubbles
        self._past_stats, self._past_ranks, self._past_bubbles = stats, ranks, bubbles
        self._stats, self._ranks, self._bubbles = SchedulerStats(), {}, BubbleReport()


def _add_stats(past: SchedulerStats, present: SchedulerStats) -> SchedulerStats:
    """Return the present gauges and the sums of the counters."""
    return present._replace(
        steps=past.steps + present.steps,
        preemptions=past.preemptions + present.preemptions,
        prefix_queries=past.prefix_queries + present.prefix_queries,
        prefix_hits=past.prefix_hits + present.prefix_hits,
        prefill_tokens=past.prefill_tokens + present.prefill_tokens,
        decode_tokens=past.decode_tokens + present.decode_tokens,
        fetched_tokens=past.fetched_tokens + present.fetched_tokens,
        failed_fetches=past.failed_fetches + present.failed_fetches,
    )


def _add_utilization(past: StageUtilization, present: StageUtilization) -> StageUtilization:
    return msgspec.structs.replace(
        present,
        num_steps=past.num_steps + present.num_steps,
        busy_seconds=past.busy_seconds + present.busy_seconds,
        host_seconds=past.host_seconds + present.host_seconds,
        num_compilations=past.num_compilations + present.num_compilations,
    )


def _add_bubbles(past: BubbleReport, present: BubbleReport) -> BubbleReport:
    seconds = zip_longest(past.seconds, present.seconds, fillvalue=0.0)
    return BubbleReport(
        [before + now for before, now in seconds], past.work_seconds + present.work_seconds
    )
