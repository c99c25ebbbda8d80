"""Requests of a cluster: unfinished ones, and the joined record of all their submissions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.scheduler.output_lengths import UNKNOWN_LENGTH, LengthEstimate
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.metrics.run_record import ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest


@dataclass(eq=False, slots=True)
class ClusterRequest:
    """Unfinished request of a simulated cluster, with its output so far.

    Several engines may compute it one after the other, for example after a crash.
    """

    index: int
    """Position in the workload."""
    job: WorkloadRequest
    request: SchedulerRequest
    """Request as sent to the scheduler, with the output tokens of earlier engines."""
    arrival_time: float
    """Time in seconds at which the router received the request."""
    kv_ticket: int = 0
    """Number that identifies the KV blocks which the next engine keeps after prefill, for a decode
    engine; 0 if the next engine also decodes."""
    kv_source_tokens: int = 0
    """Number of tokens whose KV cache the next engine fetches from another one; 0 for none."""
    length_estimate: LengthEstimate = UNKNOWN_LENGTH
    """The router's prediction of the whole output."""
    slo: Slo | None = None
    """Its limits of latency, as the router knows them; None for none."""
    is_moved: bool = False
    """True if an engine has had the request and returned it unfinished."""

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens that earlier engines have generated."""
        return len(self.request.outputs[0]) if self.request.outputs else 0

    @property
    def num_tokens(self) -> int:
        """Number of prompt tokens plus the maximum number of output tokens."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def rank(self) -> tuple[int, float, int]:
        """Order of service: priority, then arrival."""
        return self.request.priority, self.arrival_time, self.index

    def describe_submission(self) -> "Submission":
        """Return the record of the next submission."""
        return Submission(self.index, self.num_output_tokens, self.kv_source_tokens > 0)

    def submission(self, seq: int, now: float) -> SchedulerRequest:
        """Return the request as it is submitted to an engine at a time, as sequence `seq`."""
        request = self.request._replace(seq=seq, age_seconds=now - self.arrival_time)
        if self.kv_ticket:
            max_tokens = self.num_output_tokens + 1
            return request._replace(max_tokens=max_tokens, kv_ticket=self.kv_ticket)
        if self.kv_source_tokens:
            return request._replace(kv_source_tokens=self.kv_source_tokens)
        return request


class Submission(NamedTuple):
    """Record that a request was sent to an engine; a request moved or rerouted has several."""

    request_index: int
    """Position of the request in the workload."""
    num_resumed_tokens: int
    """Number of output tokens from earlier engines."""
    is_handoff: bool
    """True if the earlier engine was to compute only the prompt."""


def join_submissions(
    records: Iterable[Mapping[int, ServedRequest]], submissions: Sequence[Submission]
) -> dict[int, tuple[int, ServedRequest]]:
    """Merge the records of requests that were sent to several engines into one record per request.

    Args:
        records: Records of each engine by sequence id; each submission to an engine has its own id.
        submissions: Request and reason of each submission, indexed by sequence id.

    Returns:
        By position of the request in the workload: the id of its first sequence, and its merged
        record with one timeline.
    """
    parts: dict[int, list[tuple[int, ServedRequest]]] = {}
    for seq, served in sorted(
        ((seq, served) for record in records for seq, served in record.items()),
        key=lambda item: item[0],
    ):
        parts.setdefault(submissions[seq].request_index, []).append((seq, served))
    return {
        index: (served[0][0], served[0][1] if len(served) == 1 else _join(served, submissions))
        for index, served in sorted(parts.items())
    }


def _join(
    parts: Sequence[tuple[int, ServedRequest]], submissions: Sequence[Submission]
) -> ServedRequest:
    """Return the record of a request of several submissions, in order of their ids."""
    first = parts[0][1]
    line = RequestTimeline(first.line.arrival)
    for seq, served in parts:
        num_resumed = submissions[seq].num_resumed_tokens
        # The record of a resumed sequence begins with an entry for the tokens that it has already.
        num_known = 1 if num_resumed and num_resumed == line.num_tokens else 0
        line.times += served.line.times[num_known:]
        line.num_tokens = served.line.num_tokens
    times = [part.first_scheduled_time for _, part in parts]
    return ServedRequest(
        first.num_prompt_tokens,
        # An engine that hands over has a limit of its own.
        max(part.max_tokens for _, part in parts),
        line,
        received_time=parts[-1][1].received_time,
        num_preemptions=sum(part.num_preemptions for _, part in parts),
        num_resumptions=sum(not submissions[seq].is_handoff for seq, _ in parts[1:]),
        first_scheduled_time=next((time for time in times if time is not None), None),
        preempted_seconds=sum(part.preempted_seconds for _, part in parts),
    )
