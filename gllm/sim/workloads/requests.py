"""Workloads: requests with lengths and arrival times, from traces and distributions.

The same seed gives the same workload.
"""

import csv
import gzip
import math
import random
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from itertools import accumulate
from typing import NamedTuple

from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.workloads.sessions import SESSIONS, PromptPart, is_sessions, sample_turns

SHAREGPT_RATIOS = (5.21, 1.66)
"""Prompt and output lengths of the Azure trace over ShareGPT's, as reported in arXiv 2504.14775."""

Lengths = list[tuple[int, int]]
"""(prompt tokens, output tokens), each at least 1."""


class WorkloadRequest(NamedTuple):
    """A request of a workload, by its lengths in tokens."""

    arrival_seconds: float
    """Seconds from the beginning."""
    num_prompt_tokens: int
    num_output_tokens: int
    parts: tuple[PromptPart, ...] = ()
    """Parts of the prompt; empty for a prompt that shares nothing with others."""
    session: str = ""
    """Conversation of the request; empty for none."""


class WorkloadTrace(NamedTuple):
    """A recorded workload; `arrivals` is empty where only lengths were recorded."""

    arrivals: list[float]
    lengths: Lengths


@cache
def load_trace(file: str) -> WorkloadTrace:
    """Return a trace that ships with gllm; data/README.md names sources and licences."""
    with gzip.open(str(files("gllm.sim") / "data" / f"{file}.csv.gz"), "rt") as lines:
        rows = list(csv.DictReader(lines))
    arrivals = [float(row["arrival_s"]) for row in rows if "arrival_s" in row]
    lengths = [(int(row["prompt_tokens"]), int(row["output_tokens"])) for row in rows]
    return WorkloadTrace(arrivals, lengths)


TRACES = {
    "azure-conv": "azure_llm_2023_conv",
    "azure-code": "azure_llm_2023_code",
    "arxiv-4k": "vidur_arxiv4k_lengths",
}


def _sampled(name: str) -> Callable[[random.Random, int], Lengths]:
    """Lengths of a trace, drawn without replacement as long as there are enough."""

    def draw(rng: random.Random, count: int) -> Lengths:
        lengths = load_trace(TRACES[name]).lengths
        full, rest = divmod(count, len(lengths))
        return [pair for _ in range(full) for pair in lengths] + rng.sample(lengths, rest)

    return draw


def _sharegpt(rng: random.Random, count: int) -> Lengths:
    prompt_ratio, output_ratio = SHAREGPT_RATIOS
    return [
        (max(1, round(prompt / prompt_ratio)), max(1, round(output / output_ratio)))
        for prompt, output in _sampled("azure-conv")(rng, count)
    ]


def _mixed(rng: random.Random, count: int) -> Lengths:
    """Half conversations, a quarter code, a quarter long documents."""
    quarter = count // 4
    pairs = _sampled("azure-conv")(rng, count - 2 * quarter)
    pairs += _sampled("azure-code")(rng, quarter) + _sampled("arxiv-4k")(rng, quarter)
    rng.shuffle(pairs)
    return pairs


NAMED_WORKLOADS: dict[str, Callable[[random.Random, int], Lengths]] = {
    **{name: _sampled(name) for name in TRACES},
    "sharegpt-like": _sharegpt,
    "mixed": _mixed,
}


def _fixed(rng: random.Random, values: list[float]) -> int:
    return round(values[0])


def _uniform(rng: random.Random, values: list[float]) -> int:
    return rng.randint(round(values[0]), round(values[1]))


def _lognormal(rng: random.Random, values: list[float]) -> int:
    """By median and 90th percentile, cut off at the third value."""
    median, p90, most = values
    sigma = math.log(p90 / median) / 1.2816
    while (draw := round(rng.lognormvariate(math.log(median), sigma))) > round(most):
        pass
    return max(1, draw)


@cache
def _zipf_weights(exponent: float, most: int) -> list[float]:
    return list(accumulate(rank**-exponent for rank in range(1, most + 1)))


def _zipf(rng: random.Random, values: list[float]) -> int:
    """Lengths 1 .. second value, the k-th with weight k ** -first value."""
    weights = _zipf_weights(values[0], round(values[1]))
    return bisect_left(weights, rng.random() * weights[-1]) + 1


class LengthDistribution(NamedTuple):
    """A distribution of one length."""

    values: tuple[str, ...]
    """Names of the numbers that describe it."""
    sound: Callable[[list[float]], bool]
    """Return True if the numbers describe lengths of at least 1."""
    draw: Callable[[random.Random, list[float]], int]


LENGTH_DISTRIBUTIONS = {
    "fixed": LengthDistribution(("LENGTH",), lambda v: v[0] >= 1, _fixed),
    "uniform": LengthDistribution(("LOW", "HIGH"), lambda v: 1 <= v[0] <= v[1], _uniform),
    "lognormal": LengthDistribution(
        ("MEDIAN", "P90", "MOST"), lambda v: 1 <= v[0] <= min(v[1:]), _lognormal
    ),
    "zipf": LengthDistribution(("EXPONENT", "MOST"), lambda v: v[0] > 0 and v[1] >= 1, _zipf),
}
"""By name; `fixed:512,128` describes two lengths."""


def sample_lengths(workload: str, count: int, seed: int) -> Lengths:
    """Sample prompt and output lengths of `count` requests.

    Args:
        workload: A name of NAMED_WORKLOADS, or a distribution such as `uniform:16,512,16,64`, with
            the parameters of the prompt before those of the output.
        count: Number of requests.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The workload is unknown.
    """
    rng = random.Random(seed)
    if workload in NAMED_WORKLOADS:
        return NAMED_WORKLOADS[workload](rng, count)
    kind, _, text = workload.partition(":")
    if kind not in LENGTH_DISTRIBUTIONS:
        kinds = [*NAMED_WORKLOADS, SESSIONS, *(f"{name}:..." for name in LENGTH_DISTRIBUTIONS)]
        names = ", ".join(kinds)
        raise ValueError(f"workload {workload!r} is none of {names}")
    names_of_values, sound, draw = LENGTH_DISTRIBUTIONS[kind]
    width = len(names_of_values)
    values = _numbers(text)
    prompt, output = values[:width], values[width:]
    if not (len(output) == width and sound(prompt) and sound(output)):
        example = ",".join(names_of_values)
        raise ValueError(
            f"workload {workload!r}: {kind} takes {example} of the prompt, then the same of the "
            f"output: {2 * width} numbers, lengths at least 1 and in this order"
        )
    return [(draw(rng, prompt), draw(rng, output)) for _ in range(count)]


def _numbers(text: str) -> list[float]:
    """Finite numbers between commas; none where one is not."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []


def sample_arrival_times(kind: str, count: int, rate: float, seed: int) -> list[float]:
    """Sample arrival times in seconds.

    Args:
        kind: poisson; gamma:CV, gaps with that coefficient of variation; burst:SIZE, bursts at
            equal intervals; static, all at time 0.
        count: Number of arrivals.
        rate: Arrivals per second.
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
        size = _numbers(value)
        if len(size) != 1 or size[0] < 1 or size[0] % 1:
            raise ValueError(f"arrivals {kind!r}: burst takes a whole number, as in burst:8")
        return [index // int(size[0]) * size[0] / rate for index in range(count)]
    if kind != "poisson" and name != "gamma":
        raise ValueError(
            f"arrivals {kind!r} is none of poisson, gamma:CV, burst:SIZE, static, replay"
        )
    variation = [1.0] if kind == "poisson" else _numbers(value)
    if len(variation) != 1 or variation[0] <= 0:
        raise ValueError(f"arrivals {kind!r}: gamma takes a CV above 0, as in gamma:2")
    shape = variation[0] ** -2
    gaps = [rng.gammavariate(shape, 1 / (rate * shape)) for _ in range(count)]
    return list(accumulate(gaps))


def make_workload(
    workload: str,
    count: int,
    rate: float = 1.0,
    arrivals: str = "poisson",
    seed: int = 0,
    time_scale: float = 1.0,
) -> list[WorkloadRequest]:
    """Return the requests of a workload with their arrival times.

    `replay` takes the first `count` rows of a trace with their times, multiplied by `time_scale`.
    All other arrivals sample lengths, and times at `rate` requests per second.

    Raises:
        ValueError: The workload or the arrivals are unknown.
    """
    if arrivals == "replay":
        if not 0 < time_scale < math.inf:
            raise ValueError(f"time_scale is {time_scale}, but has to be above 0")
        trace = load_trace(TRACES[workload]) if workload in TRACES else WorkloadTrace([], [])
        if not trace.arrivals:
            raise ValueError(f"workload {workload!r} has no arrivals to replay: azure-conv has")
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


def scale_request(job: WorkloadRequest, factor: float, most: int | None = None) -> WorkloadRequest:
    """Return a request with scaled lengths, each at least 1 token.

    Args:
        job: The request.
        factor: Multiplies both lengths.
        most: Maximum of prompt plus output, at least 2: the output is limited to half of it, then
            the prompt to the remainder. None: no limit.

    Raises:
        ValueError: A prompt of parts is longer than `most`.
    """
    if job.parts:
        return _scale_parts(job, factor, most)
    prompt, output = (
        max(1, round(job.num_prompt_tokens * factor)),
        max(1, round(job.num_output_tokens * factor)),
    )
    if most is not None and prompt + output > most:
        output = min(output, most // 2)
        prompt = min(prompt, most - output)
    return WorkloadRequest(job.arrival_seconds, prompt, output)


def _scale_parts(job: WorkloadRequest, factor: float, most: int | None) -> WorkloadRequest:
    """Return a request with scaled parts of its prompt."""
    parts = tuple(
        PromptPart(part.key, max(1, round(part.num_tokens * factor))) for part in job.parts
    )
    prompt = sum(part.num_tokens for part in parts)
    output = max(1, round(job.num_output_tokens * factor))
    if most is not None and prompt + output > most:
        raise ValueError(
            f"the workload has a conversation of {prompt + output} tokens, but at most {most} are "
            "permitted: choose fewer turns or shorter messages"
        )
    return job._replace(num_prompt_tokens=prompt, num_output_tokens=output, parts=parts)


def to_scheduler_requests(jobs: list[WorkloadRequest]) -> list[tuple[float, SchedulerRequest]]:
    """Return scheduler requests whose prompts share no KV block, except for common parts."""
    requests, base = [], 0
    first_ids: dict[int, int] = {}
    for seq, job in enumerate(jobs):
        prompt: list[int] = []
        # A prompt without parts is one that nobody shares.
        for key, num_tokens in job.parts or [(-1 - seq, job.num_prompt_tokens)]:
            first = first_ids.setdefault(key, base)
            base = max(base, first + num_tokens)
            prompt += range(first, first + num_tokens)
        requests.append((job.arrival_seconds, SchedulerRequest(seq, prompt, job.num_output_tokens)))
    return requests
