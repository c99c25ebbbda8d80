"""Step times by the coefficients of DistServe's simulator: OPT models on A100-80G.

A prefill of prompts of n tokens takes (a + b sum(n) + c sum(n^2)) / pp + pp milliseconds on each of
pp stages, a decode step of a batch (a + b sum(context) + c batch) / pp + pp, with other
coefficients from a threshold of the batch on.

Source: Zhong et al., "DistServe", OSDI 2024, simdistserve/estimators of its artifact. Extended here
in two points, because its engines never do this: a chunk of n tokens after s others counts
(s + n)^2 - s^2 in place of n^2, and a micro-batch of both phases takes the sum of both without the
smaller constant, because the weights are read once. Some coefficients of OPT-175B are negative and
count as 0.

The artifact measured batches of equal prompts, prefills and decodes alike, on a grid (its
evaluation of single forward passes, at commit e2d4dca): 1 to 192 requests of 4 to 2,020 tokens, as
many tokens as the KV cache held. Micro-batches above it raise CostRangeError. No grid is
published for OPT-66B at TP 8 and for OPT-175B, so these state no range.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, MeasuredRanges
from gllm.sim.data_tables import read_table

COEFFICIENTS_FILE = "distserve_coefficients.csv"
CAPACITIES_FILE = "distserve_max_num_tokens.csv"
SOURCE = "DistServe's profile"
SYSTEMS = ("distserve", "vllm")
"""Engines of the measurements."""
MS = 1e-3
STAGE_CONSTANT_MS = 1.0
"""Milliseconds that each stage adds per stage of the pipeline."""
GRID_BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192)
"""Requests of the measured batches."""
GRID_LENGTHS = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 284, 512, 768, 1024, 1536, 2020)
"""Tokens of each of their prompts."""
GRID_TOKENS = {
    ("opt-13b", 1): 49152,
    ("opt-13b", 2): 98304,
    ("opt-13b", 4): 250000,
    ("opt-66b", 2): 8192,
    ("opt-66b", 3): 36864,
    ("opt-66b", 4): 65000,
}
"""Limit of the tokens of a batch, in blocks of 16 per prompt, by model and tensor parallel size."""
GRID_BLOCK_TOKENS = 16
MAX_LENGTH = 2048
"""Context of OPT in tokens: the longest measured prompt, 2,020, stands for all longer ones."""
PREFILL_TOKENS, LENGTH = "prefill tokens", "prompt length"
DECODES, CONTEXT = "decodes", "decode context"


class PhaseCoefficients(NamedTuple):
    """Coefficients in milliseconds of the time of a prefill or decode step, as DistServe fits it.

    The time of a step is a constant, plus a time per prompt or context token, plus a time per
    squared prompt token (prefill) or per request (decode).
    """

    constant: float
    per_token: float
    third: float
    """Milliseconds per squared prompt token (prefill), or per request (decode)."""


class DistServeCoefficients(NamedTuple):
    """Step time coefficients that DistServe published for one engine, model and TP size."""

    prefill: PhaseCoefficients
    small_decode: PhaseCoefficients
    large_decode: PhaseCoefficients
    batch_threshold: int
    """Requests from which `large_decode` holds."""
    ranges: Mapping[str, tuple[float, float]]
    """Measured range of each quantity, both ends inclusive; empty if the grid was not published."""


def read_coefficients(system: str, model: str, tp: int) -> DistServeCoefficients:
    """Return the step time coefficients that DistServe published, with negative ones set to 0.

    Args:
        system: Measured engine: distserve or vllm.
        model: Name of an OPT model, such as opt-13b.
        tp: Tensor parallel size.

    Raises:
        ValueError: None are published for these; the message lists those that are.
    """
    row = _select(COEFFICIENTS_FILE, {"system": system, "model": model, "tp": str(tp)})

    def phase(name: str) -> PhaseCoefficients:
        return PhaseCoefficients(*(max(0.0, float(row[f"{name}_{key}"])) for key in "abc"))

    return DistServeCoefficients(
        phase("prefill"),
        phase("decode_small"),
        phase("decode_large"),
        int(row["batch_threshold"]),
        measured_ranges(model, tp),
    )


def interpolate_coefficients(system: str, model: str, tp: int) -> DistServeCoefficients:
    """Return DistServe's step time coefficients, interpolated for an unpublished TP size.

    Interpolation is linear in 1 / tp, because most times are nearly proportional to it. An
    interpolated result has no measured ranges.

    Args:
        system: Measured engine: distserve or vllm.
        model: Name of an OPT model, such as opt-13b.
        tp: Tensor parallel size.

    Raises:
        ValueError: The size is below the smallest or above the largest published one.
    """
    rows = [
        row for row in read_table(COEFFICIENTS_FILE)
        if (row["system"], row["model"]) == (system, model)
    ]  # fmt: skip
    sizes = sorted(int(row["tp"]) for row in rows)
    if tp in sizes or not sizes or not sizes[0] < tp < sizes[-1]:
        return read_coefficients(system, model, tp)
    below = max(size for size in sizes if size < tp)
    above = min(size for size in sizes if size > tp)
    share = (1 / below - 1 / tp) / (1 / below - 1 / above)
    lower, upper = (read_coefficients(system, model, size) for size in (below, above))

    def mix(first: PhaseCoefficients, second: PhaseCoefficients) -> PhaseCoefficients:
        pairs = zip(first, second, strict=True)
        return PhaseCoefficients(*((1 - share) * a + share * b for a, b in pairs))

    return DistServeCoefficients(
        mix(lower.prefill, upper.prefill),
        mix(lower.small_decode, upper.small_decode),
        mix(lower.large_decode, upper.large_decode),
        lower.batch_threshold,
        {},
    )


def measured_ranges(model: str, tp: int) -> dict[str, tuple[float, float]]:
    """Return the ranges of tokens, lengths and batch sizes that DistServe's measurements cover.

    Args:
        model: Name of an OPT model, such as opt-13b.
        tp: Tensor parallel size.

    Returns:
        Smallest and largest value by name of the quantity; empty if they are not published.
    """
    limit = GRID_TOKENS.get((model, tp))
    if limit is None:
        return {}
    blocks = GRID_BLOCK_TOKENS
    totals = [
        batch * length
        for batch in GRID_BATCHES
        for length in GRID_LENGTHS
        if batch * -(-length // blocks) * blocks <= limit
    ]
    tokens = float(min(totals)), float(max(totals))
    return {
        PREFILL_TOKENS: tokens,
        LENGTH: (float(GRID_LENGTHS[0]), float(MAX_LENGTH)),
        DECODES: (float(GRID_BATCHES[0]), float(GRID_BATCHES[-1])),
        CONTEXT: tokens,
    }


def read_kv_capacity(model: str, tp: int, pp: int) -> int:
    """Return the number of tokens in the KV cache of an OPT model on A100-80G, by DistServe's data.

    Args:
        model: Name of an OPT model, such as opt-13b.
        tp: Tensor parallel size.
        pp: Number of pipeline stages.

    Raises:
        ValueError: The capacity is not published; the message lists those that are.
    """
    row = _select(CAPACITIES_FILE, {"model": model, "tp": str(tp), "pp": str(pp)})
    return int(row["max_num_tokens"])


class DistServeCostModel(CostModel):
    """Cost model that predicts step times by the coefficients that DistServe published.

    Args:
        coefficients: Coefficients of the model at the tensor parallel size of one stage.
        stages: Number of pipeline stages.
        extrapolates_context: True to accept decode contexts longer than the measured ones, as
            DistServe's simulator does.
    """

    def __init__(
        self,
        coefficients: DistServeCoefficients,
        stages: int = 1,
        extrapolates_context: bool = False,
    ) -> None:
        self._coefficients = coefficients
        self._stages = stages
        ranges = dict(coefficients.ranges)
        if extrapolates_context:
            ranges.pop(CONTEXT, None)
        self._ranges = MeasuredRanges(ranges, SOURCE)

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch, the same on all stages.

        Raises:
            CostRangeError: The micro-batch is above the measured range.
        """
        constants, milliseconds = [], 0.0
        if work.prefill_chunks:
            constant, per_token, per_square = self._coefficients.prefill
            constants.append(constant)
            total = sum(tokens for _, tokens in work.prefill_chunks)
            milliseconds += per_token * self._clamp(PREFILL_TOKENS, total)
            for start, tokens in work.prefill_chunks:
                self._clamp(LENGTH, start + tokens)
                milliseconds += per_square * tokens * (2 * start + tokens)
        if work.num_decodes:
            is_small = work.num_decodes < self._coefficients.batch_threshold
            decode = (
                self._coefficients.small_decode if is_small else self._coefficients.large_decode
            )
            constants.append(decode.constant)
            context = self._clamp(CONTEXT, work.num_decode_context_tokens)
            milliseconds += decode.per_token * context
            milliseconds += decode.third * self._clamp(DECODES, work.num_decodes)
        if not constants:
            return 0.0
        share = (max(constants) + milliseconds) / self._stages
        return (share + STAGE_CONSTANT_MS * self._stages) * MS

    def _clamp(self, name: str, value: float) -> float:
        """Return a value within its measured range, if there is one. Raises CostRangeError."""
        return self._ranges.clamp(name, value) if name in self._ranges.ranges else value


def _select(file: str, keys: Mapping[str, str]) -> Mapping[str, str]:
    """Return the row of a table with these values.

    Raises:
        ValueError: There is none.
    """
    rows = read_table(file)
    for row in rows:
        if all(row[name] == value for name, value in keys.items()):
            return row
    *groups, last = keys
    known: dict[str, set[str]] = {}
    for row in rows:
        known.setdefault(" ".join(row[name] for name in groups), set()).add(row[last])
    choices = "; ".join(
        f"{group} with {last} {', '.join(sorted(values))}"
        for group, values in sorted(known.items())
    )
    wanted = ", ".join(f"{name} {value}" for name, value in keys.items())
    raise ValueError(f"DistServe published nothing for {wanted}: choose from {choices}")


class PrefillSample(NamedTuple):
    """One measured prefill step: prompt lengths of its batch and its duration in milliseconds."""

    lengths: Sequence[int]
    """Tokens of each prompt."""
    milliseconds: float


class DecodeSample(NamedTuple):
    """One measured decode step: context lengths of its batch and duration in milliseconds."""

    contexts: Sequence[int]
    """Context tokens of each request."""
    milliseconds: float


def fit_prefill(samples: Sequence[PrefillSample]) -> PhaseCoefficients:
    """Fit the coefficients of the prefill time to measured prefill steps.

    The time is a constant, plus a time per token, plus a time per squared token (DistServe,
    Appendix A). The fit minimizes the squares of the relative errors, as DistServe's artifact does.

    Args:
        samples: Measured prefill steps.

    Raises:
        ValueError: The samples do not determine the coefficients, or a time is not above 0.
    """
    return _fit(
        [(1.0, sum(sample.lengths), sum(n * n for n in sample.lengths)) for sample in samples],
        [sample.milliseconds for sample in samples],
    )


def fit_decode(samples: Sequence[DecodeSample]) -> PhaseCoefficients:
    """Fit the coefficients of the decode time to measured decode steps.

    The time is a constant, plus a time per context token, plus a time per request (DistServe,
    Appendix A). The fit minimizes the squares of the relative errors, as DistServe's artifact does.

    Args:
        samples: Measured decode steps.

    Raises:
        ValueError: The samples do not determine the coefficients, or a time is not above 0.
    """
    return _fit(
        [(1.0, sum(sample.contexts), len(sample.contexts)) for sample in samples],
        [sample.milliseconds for sample in samples],
    )


def _fit(rows: Sequence[tuple[float, float, float]], times: Sequence[float]) -> PhaseCoefficients:
    """Return the least-squares solution of the relative errors."""
    if not times or min(times) <= 0:
        raise ValueError("every sample needs a time above 0 milliseconds")
    matrix = np.array(rows, dtype=float) / np.array(times)[:, None]
    # Columns of one size, because squares of lengths are a million times the constant.
    sizes = np.linalg.norm(matrix, axis=0)
    solution, _, rank, _ = np.linalg.lstsq(matrix / sizes, np.ones(len(times)), rcond=None)
    if rank < matrix.shape[1]:
        raise ValueError(
            f"{len(times)} samples do not determine three coefficients: measure other batches"
        )
    return PhaseCoefficients(*(float(value) for value in solution / sizes))
