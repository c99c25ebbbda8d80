"""Workloads by their mean lengths: HexGen-2's four classes of Azure's conversations, or a trace."""

from functools import cache
from random import Random
from statistics import fmean
from typing import NamedTuple

from gllm.sim.workloads.lengths import NAMED_WORKLOADS, sample_lengths
from gllm.sim.workloads.requests import WorkloadRequest, scale_request
from gllm.sim.workloads.traces import TRACES, Lengths, load_trace

HEAVY_PROMPT, HEAVY_OUTPUT = 512, 128
"""Tokens above which a prompt or an output is heavy (HexGen-2, section 5.1)."""
CLASSES = ("HPLD", "HPHD", "LPHD", "LPLD")
"""Heavy or light prefill, heavy or light decode."""
CLASS_TRACE = "azure-conv"
NUM_SAMPLES = 4096
"""Requests whose mean stands for a workload that is no trace."""


MAX_SPREAD = 8
"""Largest number of prompts whose longest one is computed."""


class MeanLengths(NamedTuple):
    """Mean prompt and output length of a workload in tokens, and the spread of prompt lengths."""

    prompt: float
    output: float
    spread: tuple[float, ...] = ()
    """Expected longest of 1, 2, ... prompts, relative to the mean prompt; empty: equal lengths."""
    longest: int = 0
    """Tokens of the longest request, which every engine has to hold; 0: those of a mean one."""

    @property
    def total(self) -> float:
        """Tokens of a request at its end, prompt and output."""
        return self.prompt + self.output


def length_class(prompt: int, output: int) -> str:
    """Return HexGen-2's workload class of a request: heavy or light prefill and decode.

    Args:
        prompt: Prompt tokens.
        output: Output tokens.

    Returns:
        A name of CLASSES, such as HPLD for heavy prefill and light decode.
    """
    heavy_prompt = "H" if prompt > HEAVY_PROMPT else "L"
    return f"{heavy_prompt}P{'H' if output > HEAVY_OUTPUT else 'L'}D"


@cache
def _lengths_by_class() -> dict[str, Lengths]:
    lengths: dict[str, Lengths] = {name: [] for name in CLASSES}
    for pair in load_trace(TRACES[CLASS_TRACE]).lengths:
        lengths[length_class(*pair)].append(pair)
    return lengths


def cut_lengths(pairs: Lengths, most: int | None) -> Lengths:
    """Return the lengths with longer requests cut to `most` tokens, as `gllm simulate` cuts them.

    Args:
        pairs: (prompt tokens, output tokens) of each request.
        most: Limit of prompt plus output; None: no limit.
    """
    if most is None:
        return pairs
    jobs = (scale_request(WorkloadRequest(0.0, *pair), 1.0, most) for pair in pairs)
    return [(job.num_prompt_tokens, job.num_output_tokens) for job in jobs]


def share_above(workload: str, num_tokens: int) -> float:
    """Return the share (0..1) of a workload's requests that are longer than a number of tokens."""
    pairs = sample_workload(workload, 0, 0)
    return sum(prompt + output > num_tokens for prompt, output in pairs) / len(pairs)


@cache
def mean_lengths(workload: str, most: int | None = None) -> MeanLengths:
    """Return the mean prompt and output length of a workload.

    Args:
        workload: A name of CLASSES, or of a workload of the simulator.
        most: Tokens to which longer requests are cut; None: none is cut.

    Raises:
        ValueError: The workload is unknown.
    """
    pairs = cut_lengths(sample_workload(workload, 0, 0), most)
    prompts = sorted(prompt for prompt, _ in pairs)
    mean = fmean(prompts)
    spread = [
        sum(
            prompt * (((index + 1) / len(prompts)) ** number - (index / len(prompts)) ** number)
            for index, prompt in enumerate(prompts)
        )
        for number in range(1, MAX_SPREAD + 1)
    ]
    outputs = fmean(output for _, output in pairs)
    longest = max(prompt + output for prompt, output in pairs)
    return MeanLengths(mean, outputs, tuple(each / mean for each in spread), longest)


def sample_workload(workload: str, count: int, seed: int) -> Lengths:
    """Return (prompt tokens, output tokens) of a number of requests of a workload.

    Requests of a class are a stratified sample in random order, because the lengths of its trace
    change over time.

    Args:
        workload: A name of CLASSES, or of a workload of the simulator.
        count: Number of requests; 0: all requests of a trace or class.
        seed: Seed of the sample.

    Raises:
        ValueError: The workload is unknown; the message lists the names.
    """
    if workload in CLASSES:
        pairs = _lengths_by_class()[workload]
        if not count:
            return pairs
        return _stratified_sample(pairs, count, Random(seed))
    if workload in TRACES and not count:
        return load_trace(TRACES[workload]).lengths
    try:
        return sample_lengths(workload, count or NUM_SAMPLES, seed)
    except ValueError as error:
        names = ", ".join([*CLASSES, *NAMED_WORKLOADS])
        raise ValueError(f"workload {workload!r}: {error}; names: {names}") from None


def _stratified_sample(pairs: Lengths, count: int, rng: Random) -> Lengths:
    """Return a random row of each of `count` equal parts of the sorted rows, shuffled."""
    ordered = sorted(pairs)
    sample = [ordered[int((index + rng.random()) * len(ordered) / count)] for index in range(count)]
    rng.shuffle(sample)
    return sample
