"""Division of the layers among the stages: by weights, by measured speeds, and by step times.

The planner runs in the head process and proposes divisions; the supervisor starts the generations
that use them. This module imports no torch.
"""

import logging
import math
from collections.abc import Sequence

from gllm.cluster.balance import BalanceLimits, BetterCut, Rebalancer
from gllm.cluster.node_layout import NodeShape
from gllm.config.engine import EngineConfig
from gllm.messages.lifecycle import StageLoaded
from gllm.messages.measurement import StageMeasured
from gllm.models.partition import StageCosts, StageMemory, cut_layers, slowest_cost
from gllm.runtime.device import find_gpu_models
from gllm.runtime.probe_cache import ProbeCache

log = logging.getLogger(__name__)

Bounds = list[tuple[int, int]]
"""First layer of each stage and first layer after it."""


class LayerPlanner:
    """Layers of each stage of an engine."""

    def __init__(
        self,
        config: EngineConfig,
        layers: Sequence[range],
        costs: StageCosts,
        limits: BalanceLimits | None = None,
    ) -> None:
        """Create the planner of an engine that has not started.

        Args:
            config: of the engine.
            layers: of each stage, as configured or by weights.
            costs: of the model's layers, the same on every stage, until they are measured.
            limits: conditions under which another division is proposed; None for the defaults.
        """
        self._config = config
        self._layers = list(layers)
        self._costs = [costs] * len(self._layers)
        self._memory: list[StageMemory] | None = None
        self._limits = limits or BalanceLimits()
        self._measured: dict[tuple[int, int], StageMeasured] = {}
        """By stage and rank."""
        self._rebalancer = Rebalancer(self._costs, None, self._limits)
        self._cache = ProbeCache()

    @property
    def layers(self) -> list[range]:
        """Layers of each stage, from the next generation on."""
        return list(self._layers)

    @property
    def bounds(self) -> Bounds:
        """First layer of each stage and first layer after it, from the next generation on."""
        return [(part.start, part.stop) for part in self._layers]

    @property
    def should_measure(self) -> bool:
        """True if the layers are divided by measured speeds: the stages' speeds may differ."""
        config = self._config
        if config.layers != "auto" or len(self._layers) == 1:
            return False
        has_different_gpus = config.device != "cpu" and len(find_gpu_models()) > 1
        return (
            len(set(config.stage_degrees)) > 1
            or len(set(config.debug_slowdown)) > 1
            or has_different_gpus
        )

    def on_measured(self, message: StageMeasured) -> None:
        """Record a worker's measurement."""
        self._measured[message.stage, message.rank] = message

    def choose_layers(self) -> Bounds:
        """Divide the layers by the measurements of all workers."""
        stages = range(len(self._layers))
        costs, memory = [], []
        for stage in stages:
            ranks = [each for (own, _), each in self._measured.items() if own == stage]
            costs.append(_join_costs(ranks))
            memory.append(_join_memory(ranks))
        try:
            layers = cut_layers(costs, memory)
        except ValueError as error:
            log.warning("the layers are divided by their weights: %s", error)
            return self.bounds
        even, best = slowest_cost(costs, self._layers), slowest_cost(costs, layers)
        log.info(
            "layers by measured speeds: %s (by weights %s, whose slowest stage takes %.2f times as "
            "long)",
            format_layers(layers),
            format_layers(self._layers),
            even / best,
        )
        self._costs, self._memory, self._layers = costs, memory, layers
        self._rebalancer = Rebalancer(costs, memory, self._limits)
        return self.bounds

    def change_shape(self, shape: NodeShape) -> None:
        """Note other stages, or other nodes of the stages, from the next generation on."""
        raise NotImplementedError

    def begin_generation(self, loaded: Sequence[StageLoaded]) -> None:
        """Start to compare the step times of a generation, which has the current layers.

        loaded: reports of the generation's workers.
        """
        if self._memory is None:
            self._memory = self._estimate_memory(loaded)
            self._rebalancer = Rebalancer(self._costs, self._memory, self._limits)
        self._rebalancer.begin(self._layers)

    def _estimate_memory(self, loaded: Sequence[StageLoaded]) -> list[StageMemory] | None:
        """Estimate the memory of layers that were not measured; None for the host's memory.

        Weights, and keys and values of the longest sequence, are distributed by the costs.
        """
        limits = [math.inf] * len(self._layers)
        needed = [0] * len(self._layers)
        scheduler, max_model_len = self._config.scheduler, self._config.max_model_len or 0
        num_blocks = -(-max_model_len // scheduler.block_size)
        for worker in loaded:
            stage = worker.stage
            needed[stage] = max(
                needed[stage], worker.weight_bytes + num_blocks * worker.block_bytes
            )
            if worker.available_bytes is not None:
                limits[stage] = min(limits[stage], worker.weight_bytes + worker.available_bytes)
        if all(map(math.isinf, limits)):
            return None
        costs = self._costs[0]
        needs = costs.scale(sum(needed) / costs.cost_of(0, len(costs.layers)))
        return [StageMemory(needs, limit) for limit in limits]

    def on_totals(
        self, stage: int, num_steps: int, busy_seconds: float, now: float
    ) -> BetterCut | None:
        """Record a stage's totals; return a better division if it is to be used now.

        Without `rebalance` a better division is only logged. A device without a clock of its own
        reports the time of rank 0, which waits for the other ranks.
        """
        if len(self._layers) == 1:
            return None
        better = self._rebalancer.on_totals(stage, num_steps, busy_seconds, now)
        if better is None:
            return None
        action = "the layers are divided anew" if self._config.rebalance else "see --rebalance"
        log.warning(
            "layers %s instead of %s would be faster by %.0f %% (steps take %s ms): %s",
            format_layers(better.layers),
            format_layers(self._layers),
            100 * better.gain,
            ", ".join(f"{1e3 * seconds:.1f}" for seconds in better.stage_seconds),
            action,
        )
        # The step times contradict the measurements, so the next start measures again.
        for measured in self._measured.values():
            self._cache.forget(measured.cache_key)
        if not self._config.rebalance:
            return None
        self._layers = list(better.layers)
        return better


def format_layers(layers: Sequence[range]) -> str:
    """Return the number of layers per stage as in --layers."""
    return ",".join(str(len(part)) for part in layers)


def _join_costs(ranks: Sequence[StageMeasured]) -> StageCosts:
    """Return the costs of a stage: its ranks wait for the slowest one."""
    layers = zip(*(each.layer_seconds for each in ranks), strict=True)
    return StageCosts(
        tuple(map(max, layers)),
        0.0,
        max(each.head_seconds for each in ranks),
        max(each.step_seconds for each in ranks),
    )


def _join_memory(ranks: Sequence[StageMeasured]) -> StageMemory:
    """Return the memory of the rank with the least, which limits its stage."""
    limits = [math.inf if rank.available_bytes is None else rank.available_bytes for rank in ranks]
    least = ranks[limits.index(min(limits))]
    needs = StageCosts(
        tuple(map(float, least.layer_bytes)),
        float(least.embedding_bytes),
        float(least.head_bytes),
    )
    return StageMemory(needs, min(limits))
