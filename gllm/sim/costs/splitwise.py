"""Step times by Splitwise's measurements: Llama-2-70B and BLOOM-176B on DGX-A100 and DGX-H100.

A batch of prompts takes a time that is piecewise linear over its tokens, a decode step one that is
piecewise linear over its requests; the function goes through the medians of the measurements. A
batch of both phases takes 1.1 times the prompt time of all its tokens. Batches below the smallest
measured one take as long as it, larger ones than the largest continue the last segment.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), section on its performance model,
and the simulator of its repository (splitwise-sim), which has the factor of 1.1. The context of
decodes does not count there, nor here.
"""

from collections.abc import Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, TransferCost
from gllm.sim.costs.piecewise_linear import PiecewiseLinear
from gllm.sim.data_tables import read_table

Points = Sequence[tuple[float, float]]
"""(argument, value) pairs."""


def interpolate_medians(points: Points) -> PiecewiseLinear:
    """Return a piecewise linear function through the median of the values at each argument.

    Args:
        points: (argument, value) pairs; arguments may repeat.

    Raises:
        ValueError: There are fewer than two different arguments.
    """
    values: dict[float, list[float]] = {}
    for argument, value in points:
        values.setdefault(argument, []).append(value)
    knots = sorted(values)
    return PiecewiseLinear(knots, [median(values[knot]) for knot in knots])


PERF_MODEL_FILE = "splitwise_perf_model.csv.gz"
MIXED_FACTOR = 1.1
"""Time of a batch of both phases per prompt time of its tokens."""
MS = 1e-3
CONSISTENT_OUTPUT_TOKENS = 128
"""Rows with longer outputs repeat the prompts of this length."""


class SplitwiseProfile(NamedTuple):
    """Prefill and decode times of one model on one machine, as functions in seconds."""

    prompt_seconds: PiecewiseLinear
    """Time of a prefill batch in seconds, by its number of tokens."""
    token_seconds: PiecewiseLinear
    """Time of a decode step in seconds, by its number of requests."""

    def iteration_seconds(self, num_prompt_tokens: int, num_decodes: int) -> float:
        """Return the predicted time of one step in seconds.

        Args:
            num_prompt_tokens: Tokens of all prompts in the batch.
            num_decodes: Number of decoding requests in the batch.
        """
        if not num_prompt_tokens:
            return self.token_seconds(num_decodes) if num_decodes else 0.0
        if not num_decodes:
            return self.prompt_seconds(num_prompt_tokens)
        return MIXED_FACTOR * self.prompt_seconds(num_prompt_tokens + num_decodes)


def read_points(model: str, device: str, tp: int) -> tuple[Points, Points]:
    """Return the prefill and decode times that Splitwise published for a model on a machine.

    Args:
        model: `llama2-70b` or `bloom-176b`.
        device: `a100-80gb`, `h100-80gb`, or `h100-80gb-pcap` with a power limit.
        tp: Tensor parallel size.

    Returns:
        (prompt tokens, seconds) of each prefill, and (batch size, seconds) of each decode step.

    Raises:
        ValueError: Nothing is published for these; the message lists what is.
    """
    rows = read_table(PERF_MODEL_FILE)
    key = model, device, str(tp)
    selected = [row for row in rows if (row["model"], row["device"], row["tp"]) == key]
    if not selected:
        known = sorted({f"{row['model']} {row['device']} tp {row['tp']}" for row in rows})
        raise ValueError(
            f"Splitwise published nothing for {model} {device} tp {tp}: choose from "
            f"{'; '.join(known)}"
        )
    prompts, tokens = [], []
    for row in selected:
        batch = int(row["batch_size"])
        prompts.append((float(batch * int(row["prompt_tokens"])), float(row["prefill_ms"]) * MS))
        if int(row["output_tokens"]) <= CONSISTENT_OUTPUT_TOKENS:
            tokens.append((float(batch), float(row["decode_step_ms"]) * MS))
    return prompts, tokens


@cache
def read_splitwise_profile(model: str, device: str, tp: int = 8) -> SplitwiseProfile:
    """Return prefill and decode times as functions, fitted to the data that Splitwise published.

    Args:
        model: `llama2-70b` or `bloom-176b`.
        device: `a100-80gb`, `h100-80gb`, or `h100-80gb-pcap` with a power limit.
        tp: Tensor parallel size.

    Raises:
        ValueError: Nothing is published for these; the message lists what is.
    """
    prompts, tokens = read_points(model, device, tp)
    return SplitwiseProfile(interpolate_medians(prompts), interpolate_medians(tokens))


class SplitwiseCostModel(CostModel):
    """Cost model that predicts step times from the measurements that Splitwise published.

    Args:
        profile: Prefill and decode times of the whole model on one machine.
        num_stages: Number of pipeline stages, one machine each. Each has an equal share of the
            layers, and takes that share of one machine's time.
        activation_seconds: Time for which one token's activations occupy the link between two
            stages.
    """

    def __init__(
        self,
        profile: SplitwiseProfile,
        num_stages: int = 1,
        activation_seconds: float = 0.0,
    ) -> None:
        self._profile = profile
        self._num_stages = num_stages
        self._activation_seconds = activation_seconds

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch, the same on all stages."""
        num_prompt_tokens = work.num_tokens - work.num_decodes
        seconds = self._profile.iteration_seconds(num_prompt_tokens, work.num_decodes)
        return seconds / self._num_stages

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time of the activations on the link."""
        return TransferCost(self._activation_seconds * work.num_tokens)
