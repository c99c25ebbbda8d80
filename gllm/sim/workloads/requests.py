"""Requests of a workload: lengths, arrival times (Poisson, gamma, bursts, static) and classes.

The same seed gives the same workload.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.workloads.agents import DEFAULT_PAUSES, sample_agent_turns
from gllm.sim.workloads.lengths import parse_numbers, read_workload_trace, sample_lengths
from gllm.sim.workloads.sessions import PromptPart, is_sessions, sample_turns

OUTPUT_TOKEN_ID = 1
"""Id of every simulated output token."""


def sample_arrival_times(kind: str, count: int, rate: float, seed: int) -> list[float]:
    """Sample the arrival times of requests in seconds.

    Args:
        kind: `poisson`; `gamma:CV` for interarrival times with that coefficient of variation;
            `burst:SIZE` for bursts at equal intervals; `static` for all at time 0.
        count: Number of requests.
        rate: Requests per second.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The kind is unknown or the rate is not positive.
    """
    if not 0 < rate < math.inf:
        raise ValueError(f"rate is {rate}, but must be above 0 requests per second")
    rng = random.Random(seed + 1)
    name, _, value = kind.partition(":")
    if kind == "static":
        return [0.0] * count
    if name == "burst":
        size = parse_numbers(value)
        if len(size) != 1 or size[0] < 1 or size[0] % 1:
            raise ValueError(f"arrivals {kind!r}: burst takes a whole number, as in burst:8")
        return [index // int(size[0]) * size[0] / rate for index in range(count)]
    if kind != "poisson" and name != "gamma":
        raise ValueError(
            f"arrivals {kind!r} is none of poisson, gamma:CV, burst:SIZE, static, replay"
        )
    variation = [1.0] if kind == "poisson" else parse_numbers(value)
    if len(variation) != 1 or variation[0] <= 0:
        raise ValueError(f"arrivals {kind!r}: gamma takes a CV above 0, as in gamma:2")
    shape = variation[0] ** -2
    gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)]
    return list(accumulate(gaps))


class WorkloadRequest(NamedTuple):
    """One request of a simulated workload: its arrival time, lengths in tokens and classes."""

    arrival_seconds: float
    """Arrival time in seconds from the start of the workload."""
    num_prompt_tokens: int
    num_output_tokens: int
    parts: tuple[PromptPart, ...] = ()
    """Parts of the prompt that other prompts may share; empty for a prompt that shares none."""
    session: str = ""
    """Conversation of the request; empty for none."""
    priority: int = 0
    """Smaller values run earlier."""
    slo_class: str = ""
    """Name of the SLO class, which has its own latency limits; empty for none."""
    predicted_output_tokens: int = 0
    """Predicted length of the output; 0 for none."""
    pause_seconds: float | None = None
    """Time from the end of the conversation's request before this one in the list to the arrival;
    None if it arrives at `arrival_seconds`."""


def make_workload(
    workload: str,
    count: int,
    rate: float = 1.0,
    arrivals: str = "poisson",
    seed: int = 0,
    time_scale: float = 1.0,
) -> list[WorkloadRequest]:
    """Return the requests of a workload: arrival times with prompt and output lengths.

    Args:
        workload: Name of a trace, a file of lengths, a length distribution, or `sessions` for
            conversations. `make_agents` makes those of agents.
        count: Number of requests.
        rate: Requests per second, unless the arrivals are `replay`.
        arrivals: Arrival process (`sample_arrival_times`), or `replay` for the first requests of a
            trace with its recorded arrival times.
        seed: Seed of the random numbers.
        time_scale: Factor of the recorded arrival times.

    Raises:
        ValueError: The workload or the arrivals are unknown, or the trace has fewer requests.
    """
    if arrivals == "replay":
        if not 0 < time_scale < math.inf:
            raise ValueError(f"time_scale is {time_scale}, but has to be above 0")
        trace = read_workload_trace(workload)
        if not trace.arrivals:
            raise ValueError(
                f"workload {workload!r} has no arrivals to replay: azure-conv has, and a file with "
                "the column arrival_s"
            )
        if count > len(trace.arrivals):
            raise ValueError(
                f"workload {workload!r} has {len(trace.arrivals)} requests to replay, not {count}: "
                "choose fewer, or other arrivals"
            )
        rows = zip(trace.arrivals[:count], trace.lengths[:count], strict=True)
        return [WorkloadRequest(arrival * time_scale, *lengths) for arrival, lengths in rows]
    times = sample_arrival_times(arrivals, count, rate, seed)
    if is_sessions(workload):
        turns = sample_turns(workload, count, seed)
        return [
            WorkloadRequest(
                time,
                sum(part.num_tokens for part in turn.parts),
                turn.num_output_tokens,
                turn.parts,
                str(turn.session),
            )
            for time, turn in zip(times, turns, strict=True)
        ]
    lengths = sample_lengths(workload, count, seed)
    return [WorkloadRequest(time, *pair) for time, pair in zip(times, lengths, strict=True)]


def make_agents(
    workload: str,
    rate: float,
    arrivals: str = "poisson",
    seed: int = 0,
    pauses: str = DEFAULT_PAUSES,
) -> list[WorkloadRequest]:
    """Return the requests of agents, of which all but the first of each have a pause.

    Args:
        workload: `agents`, with or without parameters.
        rate: Agents that begin per second.
        arrivals: Process by which agents begin (`sample_arrival_times`).
        seed: Seed of the random numbers.
        pauses: Distributions of the pauses; see PAUSES_HELP.

    Raises:
        ValueError: The workload, the arrivals or the pauses are invalid.
    """
    agents = sample_agent_turns(workload, pauses, seed)
    times = sample_arrival_times(arrivals, len(agents), rate, seed)
    return [
        WorkloadRequest(
            time,
            sum(part.num_tokens for part in turn.parts),
            turn.num_output_tokens,
            turn.parts,
            str(turn.session),
            pause_seconds=turn.pause_seconds if turn.turn else None,
        )
        for time, turns in zip(times, agents, strict=True)
        for turn in turns
    ]


def longest_job(jobs: Iterable[WorkloadRequest]) -> int:
    """Return the number of tokens of the longest request: prompt and output."""
    return max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)


def scale_request(job: WorkloadRequest, factor: float, most: int | None = None) -> WorkloadRequest:
    """Return a request with prompt and output length scaled, each at least 1 token.

    Args:
        job: The request.
        factor: Factor of both lengths.
        most: Limit of prompt plus output, at least 2: the output is limited to half of it, then the
            prompt to the remainder. None: no limit.

    Raises:
        ValueError: A request of a conversation is longer than `most`.
    """

    def scaled(num_tokens: int) -> int:
        return max(1, round(num_tokens * factor))

    parts = tuple(part._replace(num_tokens=scaled(part.num_tokens)) for part in job.parts)
    prompt = sum(part.num_tokens for part in parts) or scaled(job.num_prompt_tokens)
    output = scaled(job.num_output_tokens)
    if most is not None and prompt + output > most:
        if parts:
            raise ValueError(
                f"the workload has a conversation of {prompt + output} tokens, but at most {most} "
                "are permitted: choose fewer turns or shorter messages"
            )
        output = min(output, most // 2)
        prompt = min(prompt, most - output)
    return job._replace(num_prompt_tokens=prompt, num_output_tokens=output, parts=parts)


def cut_requests(
    jobs: list[WorkloadRequest], max_request_tokens: int | None
) -> list[WorkloadRequest]:
    """Return requests of which longer ones are cut to a number of tokens; None: none is cut."""
    if max_request_tokens is None:
        return jobs
    return [scale_request(job, 1.0, max_request_tokens) for job in jobs]


def iterate_scheduler_requests(
    jobs: Iterable[WorkloadRequest],
) -> Iterator[tuple[float, SchedulerRequest]]:
    """Yield the arrival time in seconds and the scheduler request of each request of a workload.

    Token ids are chosen such that prompts share KV blocks only where their parts are the same. A
    prompt without parts is a `range`, which takes no memory for its tokens.

    Args:
        jobs: Requests sorted by arrival time.
    """
    prompts = PromptTokens()
    for seq, job in enumerate(jobs):
        yield job.arrival_seconds, prompts.make_request(seq, job)


class PromptTokens:
    """Token ids of the prompts of a workload, which are equal where their parts are the same."""

    def __init__(self) -> None:
        self._base = 0
        self._first_ids: dict[int, int] = {}

    def make_request(self, seq: int, job: WorkloadRequest) -> SchedulerRequest:
        """Return a request of the workload as the scheduler gets it.

        Args:
            seq: Id of its sequence.
            job: The request.
        """
        return SchedulerRequest(
            seq,
            self._make_prompt(job),
            job.num_output_tokens,
            priority=job.priority,
            predicted_output_tokens=job.predicted_output_tokens,
            session=job.session,
        )

    def _make_prompt(self, job: WorkloadRequest) -> Sequence[int]:
        if not job.parts:
            prompt = range(self._base, self._base + job.num_prompt_tokens)
            self._base = prompt.stop
            return prompt
        token_ids: list[int] = []
        for part in job.parts:
            if part.is_output:
                token_ids += [OUTPUT_TOKEN_ID] * part.num_tokens
                continue
            first = self._first_ids.setdefault(part.key, self._base)
            self._base = max(self._base, first + part.num_tokens)
            token_ids += range(first, first + part.num_tokens)
        return token_ids
