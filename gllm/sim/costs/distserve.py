"""Step times by the coefficients of DistServe's simulator: OPT models on A100-80G.

A prefill of prompts of n tokens takes (a + b sum(n) + c sum(n^2)) / pp + pp milliseconds on each of
pp stages, a decode step of a batch (a + b sum(context) + c batch) / pp + pp, with other
coefficients from a threshold of the batch on.

Source: Zhong et al., "DistServe", OSDI 2024, simdistserve/estimators of its artifact. Extended here
in two points, because its engines never do this: a chunk of n tokens after s others counts
(s + n)^2 - s^2 in place of n^2, and a micro-batch of both phases takes the sum of both without the
smaller constant, because the weights are read once. Some coefficients of OPT-175B are negative and
count as 0.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel
from gllm.sim.data_tables import read_table

COEFFICIENTS_FILE = "distserve_coefficients.csv"
CAPACITIES_FILE = "distserve_max_num_tokens.csv"
SYSTEMS = ("distserve", "vllm")
"""Engines of the measurements."""
MS = 1e-3
STAGE_CONSTANT_MS = 1.0
"""Milliseconds that each stage adds per stage of the pipeline."""


class PhaseCoefficients(NamedTuple):
    """Milliseconds of one phase: constant, per token, and per squared token or request."""

    constant: float
    per_token: float
    third: float


class DistServeCoefficients(NamedTuple):
    """Coefficients of one system, model and tensor parallel size."""

    prefill: PhaseCoefficients
    small_decode: PhaseCoefficients
    large_decode: PhaseCoefficients
    batch_threshold: int
    """Requests from which `large_decode` holds."""


def read_coefficients(system: str, model: str, tp: int) -> DistServeCoefficients:
    """Return the published coefficients, negative ones as 0.

    Raises:
        ValueError: There are none; the message names those there are.
    """
    row = _select(COEFFICIENTS_FILE, {"system": system, "model": model, "tp": str(tp)})

    def phase(name: str) -> PhaseCoefficients:
        return PhaseCoefficients(*(max(0.0, float(row[f"{name}_{key}"])) for key in "abc"))

    return DistServeCoefficients(
        phase("prefill"),
        phase("decode_small"),
        phase("decode_large"),
        int(row["batch_threshold"]),
    )


def read_kv_capacity(model: str, tp: int, pp: int) -> int:
    """Return the tokens that the KV cache of A100-80G devices holds.

    Raises:
        ValueError: The capacity was not published; the message names those there are.
    """
    row = _select(CAPACITIES_FILE, {"model": model, "tp": str(tp), "pp": str(pp)})
    return int(row["max_num_tokens"])


class DistServeCostModel(BaseCostModel):
    """Pipeline of `stages` stages with published coefficients.

    Args:
        coefficients: Of the model on the devices of one stage.
        stages: Number of stages.
        has_prefill: False for an engine that gets its prompts' KV cache from another one: a prefill
            takes no time.
    """

    def __init__(
        self, coefficients: DistServeCoefficients, stages: int = 1, has_prefill: bool = True
    ) -> None:
        self._coefficients = coefficients
        self._stages = stages
        self._has_prefill = has_prefill

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch, the same on all stages."""
        constants, milliseconds = [], 0.0
        if work.prefill_chunks and self._has_prefill:
            constant, per_token, per_square = self._coefficients.prefill
            constants.append(constant)
            for start, tokens in work.prefill_chunks:
                milliseconds += per_token * tokens
                milliseconds += per_square * tokens * (2 * start + tokens)
        if work.num_decodes:
            is_small = work.num_decodes < self._coefficients.batch_threshold
            decode = (
                self._coefficients.small_decode if is_small else self._coefficients.large_decode
            )
            constants.append(decode.constant)
            milliseconds += decode.per_token * work.num_decode_context_tokens
            milliseconds += decode.third * work.num_decodes
        if not constants:
            return 0.0
        total = (max(constants) + milliseconds) / self._stages
        return (total + STAGE_CONSTANT_MS * self._stages) * MS


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
