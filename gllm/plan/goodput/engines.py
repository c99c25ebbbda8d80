"""Engines of a goodput search: published, measured or predicted costs by parallelism."""

from dataclasses import dataclass, replace
from functools import cache

from gllm.plan.goodput.measured_batches import fit_batches
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.distserve import (
    DistServeCostModel,
    interpolate_coefficients,
    read_kv_capacity,
)
from gllm.sim.deployment import USABLE_MEMORY_SHARE, Deployment, roofline_deployment
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import build_hardware, split_layers_evenly

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
"""Name of the link between the ranks of a stage and between stages."""


@dataclass(frozen=True)
class Parallelism:
    """Devices of one engine."""

    tp: int
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        """Number of devices."""
        return self.tp * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp}"


@dataclass(frozen=True)
class EngineCosts:
    """Source of the step times of engines."""

    kind: str
    """A name of COST_KINDS."""
    device: str = "A100-80G"
    """Name of the device, whose memory holds weights and KV cache; published engines have A100s."""
    file: str = ""
    """File of the measured batches."""
    max_model_len: int = MAX_MODEL_LEN

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
) -> Deployment:
    """Return an engine.

    Args:
        costs: Source of its step times.
        model: Name of the model.
        parallelism: Devices.
        policy: Scheduling policy.
        kv_admission: Rule of admission to the KV cache.
        has_prefill: False if prompts cost nothing, because another engine computes them.

    Raises:
        ValueError: The model does not fit the devices, or nothing is known of this parallelism.
    """
    tp, pp = parallelism.tp, parallelism.pp
    config = SchedulerConfig(
        policy=policy,
        max_num_batched_tokens={"vllm": MAX_BATCHED_TOKENS, "sarathi": CHUNK}.get(policy),
        max_num_seqs=MAX_SEQS * pp,
        prefix_cache=False,
        kv_admission=kv_admission,
        async_scheduling=False,
    )
    if costs.kind == "roofline":
        engine = roofline_deployment(
            model, costs.device, pp, costs.max_model_len, LOCAL_LINK, config, degrees=(tp,)
        )
        if has_prefill:
            return engine
        return replace(engine, cost=DecodeOnlyCostModel(engine.cost))
    layers = split_layers_evenly(MODELS[model].layers, pp)
    cost = _coefficient_costs(costs, model, parallelism, has_prefill)
    blocks = _num_blocks(costs, model, parallelism, config.block_size)
    return Deployment(model, layers, cost, config.resolve(pp, blocks, costs.max_model_len))


def _coefficient_costs(
    costs: EngineCosts, model: str, parallelism: Parallelism, has_prefill: bool
) -> CostModel:
    if costs.kind == "batches":
        coefficients = fit_batches(costs.file, parallelism.tp)
    else:
        coefficients = interpolate_coefficients(costs.kind, model, parallelism.tp)
    return DistServeCostModel(coefficients, parallelism.pp, has_prefill, extrapolates_context=True)


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
