"""Workloads of which only statistics of the lengths are published, as truncated lognormals.

Sources: Vidur (arXiv 2405.05465), Table 1, in Llama-2 tokens: mean, median and 90th percentile;
DistServe (OSDI'24), its figure of the lengths, in OPT tokens: means. docs/simulator.md states the
assumptions.
"""

import random
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

from gllm.sim.workloads.distributions import TruncatedLognormal
from gllm.sim.workloads.traces import Lengths

ASSUMED_SIGMA = 0.6
"""Sigma of lengths of which only the mean is published: the 90th percentile is 2.2 times the
median. In the published workloads it is 1.3 to 4 times the median."""
VIDUR_MOST = 4096
"""Longest request of Vidur's workloads in tokens, prompt and output."""
DISTSERVE_MOST = 2040
"""Longest request of DistServe's workloads in tokens: the script of its artifact that prepares the
data sets cuts LongBench's prompts to it, because OPT has 2,048 positions."""
CHAT_OUTPUT_MOST, BWB_OUTPUT_MOST = 720, 2402
"""Longest outputs in tokens, with which the means of the truncated lognormals are within 2 % of the
published ones: 197 and 1,612."""


class LengthModel(NamedTuple):
    """Independent distributions of prompt and output."""

    prompt: TruncatedLognormal
    output: TruncatedLognormal
    most: int
    """Longest request in tokens; the prompt of a longer one is cut."""

    def sample(self, rng: random.Random) -> tuple[int, int]:
        """Sample the lengths of prompt and output in tokens."""
        prompt, output = self.prompt.sample(rng), self.output.sample(rng)
        return min(prompt, self.most - output), output


def _chat() -> LengthModel:
    return LengthModel(
        TruncatedLognormal.from_quantiles(417, 1678, VIDUR_MOST),
        TruncatedLognormal.from_quantiles(139, 484, CHAT_OUTPUT_MOST),
        VIDUR_MOST,
    )


def _bilingual_books() -> LengthModel:
    return LengthModel(
        TruncatedLognormal.from_quantiles(1037, 1453, VIDUR_MOST),
        TruncatedLognormal.from_quantiles(1601, 2149, BWB_OUTPUT_MOST),
        VIDUR_MOST,
    )


def _by_means(prompt: float, output: float) -> LengthModel:
    """Return the model of a workload of DistServe by its mean lengths in tokens."""
    return LengthModel(
        TruncatedLognormal.from_mean(prompt, ASSUMED_SIGMA, DISTSERVE_MOST),
        TruncatedLognormal.from_mean(output, ASSUMED_SIGMA, DISTSERVE_MOST // 2),
        DISTSERVE_MOST,
    )


PUBLISHED_WORKLOADS: dict[str, Callable[[], LengthModel]] = {
    "chat-1m": _chat,
    "bwb-4k": _bilingual_books,
    "humaneval": lambda: _by_means(171, 98),
    "longbench": lambda: _by_means(1738, 91),
}
"""Functions that fit the distributions of each workload."""


@cache
def fit_published_lengths(name: str) -> LengthModel:
    """Return the distributions of a workload of PUBLISHED_WORKLOADS."""
    return PUBLISHED_WORKLOADS[name]()


def sample_published(name: str, rng: random.Random, count: int) -> Lengths:
    """Sample the lengths of `count` requests of a workload of PUBLISHED_WORKLOADS."""
    model = fit_published_lengths(name)
    return [model.sample(rng) for _ in range(count)]
