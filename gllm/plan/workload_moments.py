"""Moments of a workload that closed forms need."""

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from gllm.observability.latency import percentile
from gllm.sim.workloads.requests import WorkloadRequest


class WorkloadMoments(NamedTuple):
    """Mean lengths of the requests of a workload, and sorted lengths, in tokens."""

    num_requests: int
    prompt_tokens: float
    """Tokens that are prefilled: without parts of prompts that requests share."""
    square_prompt_tokens: float
    """Mean square of the prompt's length."""
    decode_steps: float
    """Output tokens but the first, which the prefill samples."""
    context_tokens: float
    """Tokens that all decode steps of a request attend to together."""
    longest_tokens: int
    """Prompt and output of the longest request."""
    prompts: tuple[int, ...]
    """Length of each prefilled prompt, rising."""
    steps: tuple[int, ...]
    """Decode steps of each request, rising."""
    is_shared: bool = False
    """True if requests share parts of their prompts, and so KV blocks."""

    @property
    def mean_context_tokens(self) -> float:
        """Mean KV tokens of a sequence over its decode steps; 0 without such steps."""
        return self.context_tokens / self.decode_steps if self.decode_steps else 0.0

    def prompt_percentile(self, percent: float) -> int:
        """Return a percentile (0..100) of the prompts' lengths, rounded down."""
        return max(1, int(percentile(self.prompts, percent)))

    def step_percentile(self, percent: float) -> float:
        """Return a percentile (0..100) of the decode steps per request."""
        return percentile(self.steps, percent)


def measure_workload(jobs: Sequence[WorkloadRequest]) -> WorkloadMoments:
    """Return the mean and sorted lengths of a workload with at least one request."""
    prompts = [job.parts[-1].num_tokens if job.parts else job.num_prompt_tokens for job in jobs]
    steps = [job.num_output_tokens - 1 for job in jobs]
    contexts = [
        count * job.num_prompt_tokens + count * (count + 1) / 2
        for job, count in zip(jobs, steps, strict=True)
    ]
    return WorkloadMoments(
        len(jobs),
        fmean(prompts),
        fmean(tokens**2 for tokens in prompts),
        fmean(steps),
        fmean(contexts),
        max(job.num_prompt_tokens + job.num_output_tokens for job in jobs),
        tuple(sorted(prompts)),
        tuple(sorted(steps)),
        any(job.parts for job in jobs),
    )
