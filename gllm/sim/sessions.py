"""Closed-loop load of a simulated engine: conversations whose next turn waits for the last one."""

from collections.abc import Callable, Sequence

from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.event_loop import ARRIVAL, EventLoop
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.session_turns import TurnResult
from gllm.sim.observer import PipelineObserver
from gllm.sim.workloads.requests import PromptTokens, WorkloadRequest


def has_pauses(jobs: Sequence[WorkloadRequest]) -> bool:
    """Return True if some requests arrive a pause after the end of others."""
    return any(job.pause_seconds is not None for job in jobs)


def find_next_turns(jobs: Sequence[WorkloadRequest]) -> list[int | None]:
    """Return for each request the position of the next one of its conversation; None if it ends."""
    following: list[int | None] = [None] * len(jobs)
    last: dict[str, int] = {}
    for index, job in enumerate(jobs):
        if job.session in last:
            following[last[job.session]] = index
        if job.session:
            last[job.session] = index
    return following


class TurnSender(PipelineObserver):
    """Sends the requests of a workload, each at its time or a pause after the turn before.

    The sequence of a request has its position in the workload as its id.

    Args:
        jobs: Requests; those without a pause are sorted by arrival time.
        prompts: Token ids of the prompts.
    """

    def __init__(self, jobs: Sequence[WorkloadRequest], prompts: PromptTokens) -> None:
        self._jobs, self._prompts = jobs, prompts
        self._next_turns = find_next_turns(jobs)
        self._cached_tokens: dict[int, int] = {}
        self._send: Callable[[float, SchedulerRequest], None] | None = None
        self._loop: EventLoop | None = None

    def start(self, loop: EventLoop, send: Callable[[float, SchedulerRequest], None]) -> None:
        """Schedule the requests that wait for no others.

        Args:
            loop: Event loop of the pipeline.
            send: Called at the arrival of a request with the time and the request.
        """
        self._loop, self._send = loop, send
        for index, job in enumerate(self._jobs):
            if job.pause_seconds is None:
                loop.push(job.arrival_seconds, ARRIVAL, self._send_turn, index)

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Note what was cached, and schedule the turns that follow those that have ended."""
        for first in output.first_tokens:
            self._cached_tokens[first.seq] = first.num_cached_tokens
        for finished in output.finished:
            index = self._next_turns[finished.seq]
            if index is None or self._loop is None:
                continue
            pause = self._jobs[index].pause_seconds
            if pause is not None:
                self._loop.push(now + pause, ARRIVAL, self._send_turn, index)

    def turns(self, record: RunRecord) -> list[TurnResult]:
        """Return the served requests of conversations, those of each in their order.

        Args:
            record: Record of the run.
        """
        return [
            TurnResult(
                job.session,
                job.num_prompt_tokens,
                job.num_output_tokens,
                self._cached_tokens[index],
                record.requests[index].line.ttft or 0.0,
            )
            for index, job in enumerate(self._jobs)
            if job.session and index in self._cached_tokens
        ]

    def _send_turn(self, now: float, index: int) -> None:
        assert self._send is not None
        self._send(now, self._prompts.make_request(index, self._jobs[index]))
