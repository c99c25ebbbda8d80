"""Lower bounds of the times at which the requests of a simulated engine end."""

from collections.abc import Container
from heapq import heappop, heappush, heapreplace
from math import inf

from gllm.sim.costs.base import CostModel
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.stage import ROUNDING_SECONDS


class EarliestEnds:
    """Requests of an engine, with a lower bound of each one's end.

    A request with n tokens to generate passes all stages n times, one after the other, in first
    come, first served micro-batches. Later arrivals can delay it only.

    Args:
        cost: Predictor of the engine's times.
        num_stages: Number of stages.
    """

    def __init__(self, cost: CostModel, num_stages: int) -> None:
        least = [cost.least_stage_seconds(stage) for stage in range(num_stages)]
        self._token_seconds = sum(max(0.0, seconds - ROUNDING_SECONDS) for seconds in least)
        """Least time between two tokens of a request."""
        self._heap: list[tuple[float, int]] = []
        """Lower bounds and sequences. A bound holds for good, but later ones are higher."""

    @property
    def time(self) -> float:
        """Return the time before which no request ends; infinite without requests."""
        return self._heap[0][0] if self._heap else inf

    def add(self, seq: int, num_tokens: int, now: float) -> None:
        """Add a request that arrives now, with `num_tokens` tokens to generate."""
        heappush(self._heap, (now + num_tokens * self._token_seconds, seq))

    def update(self, pipeline: SimulatedPipeline, unfinished: Container[int], now: float) -> None:
        """Raise `time` as far as the state of the pipeline permits.

        Args:
            pipeline: The pipeline, with all events before `now` processed.
            unfinished: Sequences that have not ended.
            now: Time in seconds.
        """
        heap, commits = self._heap, None
        while heap:
            known, seq = heap[0]
            if seq not in unfinished:
                heappop(heap)
                continue
            if commits is None:
                commits = pipeline.earliest_commits(now)
            begin = next((time for time, batch in commits if seq in batch.seqs), now)
            num_tokens = pipeline.scheduler.table.sequences[seq].num_unscheduled_tokens
            bound = begin + num_tokens * self._token_seconds
            # The first one that cannot be raised is the least of all bounds of this time.
            if bound <= max(known, now):
                return
            heapreplace(heap, (bound, seq))
