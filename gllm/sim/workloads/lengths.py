"""Prompt and output lengths of a workload by its name, or by a distribution."""

import random
from collections.abc import Callable
from functools import partial

from gllm.sim.workloads.distributions import LENGTH_DISTRIBUTIONS, parse_numbers
from gllm.sim.workloads.published import PUBLISHED_WORKLOADS, sample_published
from gllm.sim.workloads.sessions import SESSIONS
from gllm.sim.workloads.traces import TRACES, Lengths, load_trace, read_lengths

SHAREGPT_RATIOS = (5.21, 1.66)
"""Prompt and output lengths of the Azure trace over ShareGPT's, as reported in arXiv 2504.14775."""


FILE = "file"
"""Kind of a workload whose lengths are those of a CSV file."""


def _sample_trace(name: str, rng: random.Random, count: int) -> Lengths:
    return _sample_rows(load_trace(TRACES[name]).lengths, rng, count)


def _sample_rows(lengths: Lengths, rng: random.Random, count: int) -> Lengths:
    """Sample lengths without replacement as long as there are enough."""
    full, remainder = divmod(count, len(lengths))
    return [pair for _ in range(full) for pair in lengths] + rng.sample(lengths, remainder)


def _sharegpt_like(rng: random.Random, count: int) -> Lengths:
    prompt_ratio, output_ratio = SHAREGPT_RATIOS
    return [
        (max(1, round(prompt / prompt_ratio)), max(1, round(output / output_ratio)))
        for prompt, output in _sample_trace("azure-conv", rng, count)
    ]


def _mixed(rng: random.Random, count: int) -> Lengths:
    """Half conversations, a quarter code, a quarter long documents."""
    quarter = count // 4
    pairs = _sample_trace("azure-conv", rng, count - 2 * quarter)
    pairs += _sample_trace("azure-code", rng, quarter) + _sample_trace("arxiv-4k", rng, quarter)
    rng.shuffle(pairs)
    return pairs


NAMED_WORKLOADS: dict[str, Callable[[random.Random, int], Lengths]] = {
    **{name: partial(_sample_trace, name) for name in TRACES},
    **{name: partial(sample_published, name) for name in PUBLISHED_WORKLOADS},
    "sharegpt-like": _sharegpt_like,
    "mixed": _mixed,
}
"""Functions that sample the lengths of a number of requests, by the name of the workload."""

WORKLOAD_HELP = (
    f"{', '.join(NAMED_WORKLOADS)}; or numbers for the prompt's length, then the output's: "
    "fixed:512,128, uniform:LOW,HIGH,LOW,HIGH, lognormal:MEDIAN,P90,MOST,MEDIAN,P90,MOST, "
    "zipf:EXPONENT,MOST,EXPONENT,MOST; or file:PATH, the rows of a CSV file with prompt_tokens and "
    "output_tokens, as GET /workload of a router has them; or conversations, "
    "sessions:SESSIONS,TURNS,PROMPTS,SYSTEM,USER,OUTPUT"
)
"""Text for the help of a flag that takes a workload."""


def sample_lengths(workload: str, count: int, seed: int) -> Lengths:
    """Sample prompt and output lengths of `count` requests.

    Args:
        workload: A name of NAMED_WORKLOADS, or a distribution such as `uniform:16,512,16,64`, with
            the parameters of the prompt before those of the output.
        count: Number of requests.
        seed: Seed of the random numbers.

    Raises:
        ValueError: The workload is unknown, or its file cannot be read.
    """
    rng = random.Random(seed)
    if workload in NAMED_WORKLOADS:
        return NAMED_WORKLOADS[workload](rng, count)
    kind, _, text = workload.partition(":")
    if kind == FILE:
        try:
            return _sample_rows(read_lengths(text), rng, count)
        except OSError as error:
            raise ValueError(f"workload {workload}: cannot be read: {error.strerror}") from None
    if kind not in LENGTH_DISTRIBUTIONS:
        kinds = [
            *NAMED_WORKLOADS,
            f"{FILE}:PATH",
            SESSIONS,
            *(f"{name}:..." for name in LENGTH_DISTRIBUTIONS),
        ]
        names = ", ".join(kinds)
        raise ValueError(f"workload {workload!r} is none of {names}")
    names_of_values, sound, draw = LENGTH_DISTRIBUTIONS[kind]
    width = len(names_of_values)
    values = parse_numbers(text)
    prompt, output = values[:width], values[width:]
    if not (len(output) == width and sound(prompt) and sound(output)):
        example = ",".join(names_of_values)
        raise ValueError(
            f"workload {workload!r}: {kind} takes {example} of the prompt, then the same of the "
            f"output: {2 * width} numbers, lengths at least 1 and in this order"
        )
    return [(draw(rng, prompt), draw(rng, output)) for _ in range(count)]
