"""Prompt and output lengths of a workload by its name, or by a distribution."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from functools import cache, partial
from itertools import accumulate, islice
from statistics import NormalDist
from typing import NamedTuple

from gllm.sim.workloads.sessions import SESSIONS
from gllm.sim.workloads.traces import TRACES, Lengths, WorkloadTrace, load_trace, read_trace

NORMAL = NormalDist()
BISECTION_STEPS = 100
"""Halvings of an interval in which a parameter is searched; more than a double can resolve."""


def _normal_cdf(value: float) -> float:
    """Return the normal distribution function, precise far below zero too."""
    return math.erfc(-value / math.sqrt(2)) / 2


class TruncatedLognormal(NamedTuple):
    """Lognormal distribution of token counts, truncated at a longest length."""

    mu: float
    """Mean of the logarithm, before truncation."""
    sigma: float
    """Standard deviation of the logarithm, before truncation."""
    most: float
    """Longest length in tokens."""

    @staticmethod
    def from_quantiles(median: float, p90: float, most: float) -> "TruncatedLognormal":
        """Return the distribution with this median and 90th percentile after truncation.

        Without truncation sigma is ln(p90 / median) / 1.2816. With a share c of the lognormal
        below `most`, the two percentiles are its quantiles 0.5 c and 0.9 c.

        Raises:
            ValueError: No lognormal has these percentiles below `most`.
        """

        def fit(share: float) -> TruncatedLognormal:
            low, high = NORMAL.inv_cdf(0.5 * share), NORMAL.inv_cdf(0.9 * share)
            sigma = math.log(p90 / median) / (high - low)
            return TruncatedLognormal(math.log(median) - sigma * low, sigma, most)

        low, high = 1e-9, 1.0
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            # The share below `most` of the fitted distribution exceeds the assumed one where the
            # assumed one is too small.
            low, high = (middle, high) if fit(middle).share > middle else (low, middle)
        fitted = fit(high)
        if not math.isclose(fitted.quantile(0.9), p90, rel_tol=1e-3):
            raise ValueError(f"no lognormal below {most} has median {median} and p90 {p90}")
        return fitted

    @staticmethod
    def from_mean(mean: float, sigma: float, most: float) -> "TruncatedLognormal":
        """Return the distribution with this sigma and, after truncation, this mean.

        Raises:
            ValueError: The mean is not below `most`.
        """
        if not 0 < mean < most:
            raise ValueError(f"mean is {mean}, but has to be above 0 and below {most}")
        low = math.log(mean) - sigma**2
        high = math.log(most) + sigma**2 * most / (most - mean)
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            is_below = TruncatedLognormal(middle, sigma, most).mean < mean
            low, high = (middle, high) if is_below else (low, middle)
        return TruncatedLognormal(high, sigma, most)

    @property
    def share(self) -> float:
        """Share of the lognormal below `most`."""
        return _normal_cdf((math.log(self.most) - self.mu) / self.sigma)

    @property
    def mean(self) -> float:
        """Mean in tokens."""
        bound = (math.log(self.most) - self.mu) / self.sigma
        untruncated = math.exp(self.mu + self.sigma**2 / 2)
        return untruncated * _normal_cdf(bound - self.sigma) / _normal_cdf(bound)

    def quantile(self, share: float) -> float:
        """Return the length, in tokens, below which a share of all lengths lies, 0 < share < 1."""
        return math.exp(self.mu + self.sigma * NORMAL.inv_cdf(share * self.share))

    def sample(self, rng: random.Random) -> int:
        """Sample a length, at least 1."""
        # The share is never 0 or 1, whose quantiles are infinite.
        return max(1, round(self.quantile((rng.getrandbits(52) + 0.5) / 2**52)))


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
    """Family of length distributions, such as uniform: parameter names, validation and sampling."""

    values: tuple[str, ...]
    """Names of the parameters."""
    sound: Callable[[list[float]], bool]
    """Returns True if parameters are valid: all lengths are at least 1."""
    draw: Callable[[random.Random, list[float]], int]
    """Returns a random length in tokens, from a random number generator and the parameters."""


LENGTH_DISTRIBUTIONS = {
    "fixed": LengthDistribution(("LENGTH",), lambda v: v[0] >= 1, _fixed),
    "uniform": LengthDistribution(("LOW", "HIGH"), lambda v: 1 <= v[0] <= v[1], _uniform),
    "lognormal": LengthDistribution(
        ("MEDIAN", "P90", "MOST"), lambda v: 1 <= v[0] <= min(v[1:]), _lognormal
    ),
    "zipf": LengthDistribution(("EXPONENT", "MOST"), lambda v: v[0] > 0 and v[1] >= 1, _zipf),
}
"""By name; `fixed:512,128` describes two lengths."""


def parse_numbers(text: str) -> list[float]:
    """Parse finite numbers separated by commas; return an empty list if one is invalid."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []


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
    """Independent distributions of the prompt and output lengths of a workload, in tokens."""

    prompt: TruncatedLognormal
    output: TruncatedLognormal
    most: int
    """Longest request (prompt plus output) in tokens; prompts are shortened to it."""

    def sample(self, rng: random.Random) -> tuple[int, int]:
        """Sample the lengths of prompt and output in tokens."""
        prompt, output = self.prompt.sample(rng), self.output.sample(rng)
        return min(prompt, self.most - output), output


def _by_quantiles(
    prompt: tuple[float, float], output: tuple[float, float], longest_output: int
) -> LengthModel:
    """Return the model of a workload of Vidur by median and 90th percentile of its lengths."""
    return LengthModel(
        TruncatedLognormal.from_quantiles(*prompt, VIDUR_MOST),
        TruncatedLognormal.from_quantiles(*output, longest_output),
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
    "chat-1m": lambda: _by_quantiles((417, 1678), (139, 484), CHAT_OUTPUT_MOST),
    "bwb-4k": lambda: _by_quantiles((1037, 1453), (1601, 2149), BWB_OUTPUT_MOST),
    "humaneval": lambda: _by_means(171, 98),
    "longbench": lambda: _by_means(1738, 91),
}
"""Functions that fit the distributions of workloads of which only statistics are published.

Sources: Vidur (arXiv 2405.05465), Table 1, in Llama-2 tokens: mean, median and 90th percentile;
DistServe (OSDI'24), its figure of the lengths, in OPT tokens: means. docs/simulator.md states the
assumptions."""


@cache
def fit_published_lengths(name: str) -> LengthModel:
    """Return length distributions fitted to the published statistics of a workload; cached.

    Args:
        name: A name of PUBLISHED_WORKLOADS.
    """
    return PUBLISHED_WORKLOADS[name]()


def sample_published(name: str, rng: random.Random, count: int) -> Lengths:
    """Sample prompt and output lengths from the published statistics of a workload.

    Args:
        name: A name of PUBLISHED_WORKLOADS.
        rng: Random number generator.
        count: Number of requests.
    """
    model = fit_published_lengths(name)
    return [model.sample(rng) for _ in range(count)]


SHAREGPT_RATIOS = (5.21, 1.66)
"""Prompt and output lengths of the Azure trace over ShareGPT's, as reported in arXiv 2504.14775."""


FILE = "file"
"""Kind of a workload with lengths from a CSV file."""


def _sample_trace(name: str, rng: random.Random, count: int) -> Lengths:
    return _sample_rows(load_trace(TRACES[name]).lengths, rng, count)


def _sample_rows(lengths: Lengths, rng: random.Random, count: int) -> Lengths:
    """Sample lengths in random order, each row as often as the others or once more.

    Fewer rows are the first ones of more, whatever their number.
    """
    rows: Lengths = []
    while len(rows) < count:
        rows += _sample_once(lengths, rng, min(count - len(rows), len(lengths)))
    return rows


def _sample_once(lengths: Lengths, rng: random.Random, count: int) -> Lengths:
    """Sample different rows in random order; `Random.sample` depends on their number."""
    indices: dict[int, None] = {}
    # Beyond half of the rows, most of the drawn ones are known.
    num_drawn = min(count, len(lengths) // 2)
    while len(indices) < num_drawn:
        indices[rng.randrange(len(lengths))] = None
    if count > num_drawn:
        others = [index for index in range(len(lengths)) if index not in indices]
        rng.shuffle(others)
        indices.update(dict.fromkeys(others[: count - num_drawn]))
    return [lengths[index] for index in indices]


def _sharegpt_like(rng: random.Random, count: int) -> Lengths:
    prompt_ratio, output_ratio = SHAREGPT_RATIOS
    return [
        (max(1, round(prompt / prompt_ratio)), max(1, round(output / output_ratio)))
        for prompt, output in _sample_trace("azure-conv", rng, count)
    ]


def _mixed(rng: random.Random, count: int) -> Lengths:
    """Half conversations, a quarter code, a quarter long documents: so of each four requests."""
    shares = {"azure-conv": 2, "azure-code": 1, "arxiv-4k": 1}
    order = random.Random(rng.getrandbits(64))
    num_groups = -(-count // sum(shares.values()))
    rows = {
        name: iter(_sample_trace(name, random.Random(rng.getrandbits(64)), share * num_groups))
        for name, share in shares.items()
    }
    group = [name for name, share in shares.items() for _ in range(share)]
    names = (name for _ in range(num_groups) for name in order.sample(group, len(group)))
    return [next(rows[name]) for name in islice(names, count)]


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
    "output_tokens, as GET /workload of a router has them, in random order (replay: in their own, "
    "at their arrival_s); or conversations, "
    "sessions:SESSIONS,TURNS,PROMPTS,SYSTEM,USER,OUTPUT"
)
"""Text for the help of a flag that takes a workload."""


def read_workload_trace(workload: str) -> WorkloadTrace:
    """Return the recorded requests of a workload, in their order; empty if it has none.

    Args:
        workload: A name of TRACES, or `file:PATH`; any other workload has no record.

    Raises:
        ValueError: The file cannot be read.
    """
    if workload in TRACES:
        return load_trace(TRACES[workload])
    kind, _, path = workload.partition(":")
    if kind != FILE:
        return WorkloadTrace([], [])
    try:
        return read_trace(path)
    except OSError as error:
        raise ValueError(f"workload {workload}: cannot be read: {error.strerror}") from None


def sample_lengths(workload: str, count: int, seed: int) -> Lengths:
    """Sample the prompt and output lengths of a workload's requests, in tokens.

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
        return _sample_rows(read_workload_trace(workload).lengths, rng, count)
    if kind not in LENGTH_DISTRIBUTIONS:
        distributions = (f"{name}:..." for name in LENGTH_DISTRIBUTIONS)
        names = ", ".join([*NAMED_WORKLOADS, f"{FILE}:PATH", SESSIONS, *distributions])
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
