"""Engines of a goodput search: published, measured or predicted costs by parallelism.

A file of measured batches has a line for each: `tp,phase,requests,tokens,milliseconds`. `phase` is
prefill or decode, `tokens` the length of each prompt, or the context of each request;
`milliseconds` the time of one step of an engine of one stage.
"""

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from gllm.plan.layout import Parallelism
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import (
    CostModel,
    DecodeOnlyCostModel,
    DelegatingCostModel,
    TransferCost,
)
from gllm.sim.costs.distserve import (
    DecodeSample,
    DistServeCoefficients,
    DistServeCostModel,
    PhaseCoefficients,
    PrefillSample,
    fit_decode,
    fit_prefill,
    interpolate_coefficients,
    read_kv_capacity,
)
from gllm.sim.deployment import USABLE_MEMORY_SHARE, Deployment, roofline_deployment
from gllm.sim.hardware.devices import LINKS, NetworkLink
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware, split_layers_evenly

COLUMNS = ("tp", "phase", "requests", "tokens", "milliseconds")
BATCH_THRESHOLD = 95
"""Requests from which decodes have coefficients of their own, as in DistServe's artifact."""
MIN_SAMPLES = 3
"""Batches that determine three coefficients."""


class MeasuredBatch(NamedTuple):
    """Measured time of one batch: a line of the CSV file of `--batches`.

    Has the tensor-parallel degree, the phase (prefill or decode), the number of requests, the
    tokens per request and the milliseconds of one step.
    """

    tp: int
    phase: str
    requests: int
    tokens: int
    milliseconds: float


def parse_batches(text: str, name: str) -> list[MeasuredBatch]:
    """Parse the text of a CSV file with measured step times of batches.

    Args:
        text: Contents of the file, with the columns COLUMNS.
        name: Name of the file for error messages.

    Raises:
        ValueError: A column is missing, or a value is invalid; the message names file and line.
    """
    reader = csv.DictReader(text.splitlines())
    if missing := set(COLUMNS) - set(reader.fieldnames or ()):
        raise ValueError(
            f"{name}: no column {', '.join(sorted(missing))}: the first line has to be "
            f"{','.join(COLUMNS)}"
        )
    batches = []
    for row in reader:
        try:
            batch = MeasuredBatch(
                int(row["tp"]),
                row["phase"],
                int(row["requests"]),
                int(row["tokens"]),
                float(row["milliseconds"]),
            )
        except (TypeError, ValueError):
            batch = MeasuredBatch(0, "", 0, 0, 0.0)
        is_positive = min(batch.tp, batch.requests, batch.tokens) > 0
        if not is_positive or batch.phase not in ("prefill", "decode"):
            raise ValueError(
                f"{name}, line {reader.line_num}: needs tp, requests and tokens of at least 1, "
                "prefill or decode, and milliseconds"
            )
        batches.append(batch)
    return batches


@cache
def read_batches(file: str) -> list[MeasuredBatch]:
    """Read a CSV file with measured step times of batches. Raises ValueError or OSError."""
    return parse_batches(Path(file).read_text(encoding="utf-8"), file)


@cache
def fit_batches(file: str, tp: int) -> DistServeCoefficients:
    """Fit DistServe's latency model to the batches measured with one tensor-parallel degree.

    Args:
        file: CSV file with measured batches.
        tp: Tensor-parallel degree.

    Raises:
        ValueError: The file has no batches with this degree, or too few to determine the
            coefficients.
        OSError: The file cannot be read.
    """
    batches = [batch for batch in read_batches(file) if batch.tp == tp]
    if not batches:
        known = sorted({batch.tp for batch in read_batches(file)})
        raise ValueError(f"{file} has no batches of tp {tp}, only of {', '.join(map(str, known))}")
    prefills = [
        PrefillSample([batch.tokens] * batch.requests, batch.milliseconds)
        for batch in batches
        if batch.phase == "prefill"
    ]
    decodes = [batch for batch in batches if batch.phase == "decode"]
    small = [batch for batch in decodes if batch.requests < BATCH_THRESHOLD]
    large = [batch for batch in decodes if batch.requests >= BATCH_THRESHOLD]
    if len(small) < MIN_SAMPLES or len(large) < MIN_SAMPLES:
        small = large = decodes
    try:
        return DistServeCoefficients(
            _at_least_zero(fit_prefill(prefills)),
            _at_least_zero(_fit_decodes(small)),
            _at_least_zero(_fit_decodes(large)),
            BATCH_THRESHOLD,
            {},
        )
    except ValueError as error:
        raise ValueError(f"{file}, tp {tp}: {error}") from None


def _fit_decodes(batches: list[MeasuredBatch]) -> PhaseCoefficients:
    return fit_decode(
        [DecodeSample([batch.tokens] * batch.requests, batch.milliseconds) for batch in batches]
    )


def _at_least_zero(phase: PhaseCoefficients) -> PhaseCoefficients:
    """Return coefficients without negative ones, which noise leaves where a term is near 0."""
    return PhaseCoefficients(*(max(0.0, value) for value in phase))


MAX_MODEL_LEN = 2048
"""Context of OPT in tokens."""
MAX_BATCHED_TOKENS = 2560
"""Prompt tokens per micro-batch of the colocated engines: vLLM's default at the time."""
MAX_SEQS = 192
"""Sequences per stage: the largest measured batch."""
CHUNK = 512
"""Tokens per micro-batch of policy `sarathi`."""
COST_KINDS = ("distserve", "vllm", "roofline", "batches")
"""Published coefficients of two engines with OPT models, data sheets, and measured batches."""
LOCAL_LINK = "nvlink"
"""Name of the link between the ranks of a stage and between stages on one node."""
PUBLISHED_DEVICE = "A100-80G"
"""Device on which the coefficients of kinds `distserve` and `vllm` were measured."""


@dataclass(frozen=True)
class EngineCosts:
    """Source of predicted step times: published coefficients, measured batches or a data sheet."""

    kind: str
    """A name of COST_KINDS."""
    device: str = PUBLISHED_DEVICE
    """Name of the GPU, whose memory limits weights and KV cache."""
    file: str = ""
    """CSV file of the measured batches; only for kind `batches`."""
    max_model_len: int = MAX_MODEL_LEN

    def __post_init__(self) -> None:
        """Refuse a device that the published coefficients say nothing about."""
        if self.kind in ("distserve", "vllm") and self.device != PUBLISHED_DEVICE:
            raise ValueError(
                f"--costs {self.kind} are coefficients measured on {PUBLISHED_DEVICE}, not on "
                f"--device {self.device}: choose --costs roofline, or batches measured on it"
            )

    def __str__(self) -> str:
        return self.kind


DISTSERVE_COSTS, VLLM_COSTS = EngineCosts("distserve"), EngineCosts("vllm")
"""Coefficients of DistServe's artifact."""


@cache
def make_engine(
    costs: EngineCosts,
    model: str,
    parallelism: Parallelism,
    policy: str,
    kv_admission: str = "auto",
    has_prefill: bool = True,
    crossings: frozenset[int] = frozenset(),
    network: str = LOCAL_LINK,
    async_scheduling: bool = False,
) -> Deployment:
    """Return an engine for the simulator: model, parallelism, step times and scheduler options.

    Args:
        costs: Source of its predicted step times.
        model: Name of the model in MODELS.
        parallelism: Tensor-parallel and pipeline-parallel degree.
        policy: Scheduling policy.
        kv_admission: Rule by which the scheduler decides whether a request's KV cache fits.
        has_prefill: False if prefills take no time, because another engine computes them.
        crossings: Stages whose next stage is on another node.
        network: Name of the link between nodes.
        async_scheduling: True to schedule a step before the tokens of the last one are known, as
            `gllm serve` does; DistServe's engines do not.

    Raises:
        ValueError: The model does not fit the devices, or there are no step times for this
            parallelism.
    """
    tp, pp = parallelism.tp, parallelism.pp
    config = SchedulerConfig(
        policy=policy,
        max_num_batched_tokens={"vllm": MAX_BATCHED_TOKENS, "sarathi": CHUNK}.get(policy),
        max_num_seqs=MAX_SEQS * pp,
        prefix_cache=False,
        kv_admission=kv_admission,
        async_scheduling=async_scheduling,
    )
    if costs.kind == "roofline":
        engine = roofline_deployment(
            model, costs.device, pp, costs.max_model_len, LOCAL_LINK, config, degrees=(tp,)
        )
    else:
        if costs.kind == "batches":
            coefficients = fit_batches(costs.file, tp)
        else:
            coefficients = interpolate_coefficients(costs.kind, model, tp)
        blocks = _num_blocks(costs, model, parallelism, config.block_size)
        engine = Deployment(
            model,
            split_layers_evenly(MODELS[model].layers, pp),
            DistServeCostModel(coefficients, pp, extrapolates_context=True),
            config.resolve(pp, blocks, costs.max_model_len),
        )
    cost = engine.cost
    if crossings:
        cost = NodeLinkCostModel(cost, MODELS[model].hidden, LINKS[network], crossings)
    return replace(engine, cost=cost if has_prefill else DecodeOnlyCostModel(cost))


class NodeLinkCostModel(DelegatingCostModel):
    """Cost model wrapper that sends activations between nodes over a network link.

    Args:
        cost: Cost model of the engine on one node.
        hidden: Elements of the activations of a token.
        link: Link between nodes.
        crossings: Stages whose next stage is on another node.
    """

    def __init__(
        self, cost: CostModel, hidden: int, link: NetworkLink, crossings: frozenset[int]
    ) -> None:
        super().__init__(cost)
        self._token_bytes, self._link, self._crossings = 2 * hidden, link, crossings

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the link between nodes where the next stage is on another one."""
        if stage not in self._crossings:
            return super().activation_transfer(stage, work)
        size = work.num_tokens * self._token_bytes
        return TransferCost(size / self._link.bandwidth, self._link.latency, size)


def _num_blocks(costs: EngineCosts, model: str, parallelism: Parallelism, block_size: int) -> int:
    """Return the KV blocks of an engine: as published, or by the memory of its devices."""
    tp, pp = parallelism.tp, parallelism.pp
    if costs.kind != "batches":
        return read_kv_capacity(model, tp, pp) // block_size
    hardware = build_hardware(model, costs.device, pp, LOCAL_LINK, (tp,))
    blocks = min(hardware.stage_kv_blocks(block_size, USABLE_MEMORY_SHARE))
    if blocks < 1:
        raise ValueError(
            f"model {model} does not fit {parallelism.num_gpus} x {costs.device}: raise the number "
            "of GPUs per node"
        )
    return blocks
