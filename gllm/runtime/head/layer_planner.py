"""Division of the layers among the stages, and number of KV blocks by the memory of the nodes.

The layers are divided by weights, by measured speeds, and by step times. The planner runs in the
head process and proposes divisions; the supervisor starts the epochs that use them. This module
imports no torch.
"""

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gllm.config.engine import EngineConfig
from gllm.messages.lifecycle import StageLoaded
from gllm.messages.nodes import NodeFacts
from gllm.messages.reports import StageMeasured
from gllm.recovery.balance import BalanceLimits, BetterPartition, Rebalancer
from gllm.recovery.node_layout import (
    NodeMemory,
    NodeShape,
    extend_layers,
    fit_layers,
    match_stages,
    repartition_layers,
)
from gllm.recovery.partition import StageCosts, StageMemory, partition_layers, slowest_cost
from gllm.recovery.placement import LOCAL_NODE, Placement
from gllm.runtime.worker.device import KV_SHARE, find_gpu_models, list_kv_memories
from gllm.runtime.worker.probe_cache import ProbeCache
from gllm.scheduler.config import STATE_SLOTS_PER_SEQ
from gllm.scheduler.kv_memory import KvMemory

log = logging.getLogger(__name__)

HOST_MEMORY_SHARE = 0.9
"""Share of a machine's available memory that layers may take when they move to it."""

Bounds = list[tuple[int, int]]
"""First layer of each stage and first layer after it."""


@dataclass(frozen=True)
class Machine:
    """Hardware of a machine that runs workers, and its compute threads per worker."""

    facts: NodeFacts
    threads: int | None = None
    """Compute threads per worker; None for an equal share of the cores."""


def may_differ_in_speed(
    stage_nodes: Sequence[str],
    degrees: Sequence[int],
    machines: Mapping[str, Machine],
    uses_gpus: bool,
) -> bool:
    """Return True if the machines differ in GPU models, cores or threads per worker.

    Args:
        stage_nodes: name of the machine of each stage.
        degrees: number of ranks of each stage.
        machines: hardware by the name of the machine; a missing one is not compared.
        uses_gpus: False if all workers compute on the CPU.
    """
    num_workers: Counter[str] = Counter()
    for node, degree in zip(stage_nodes, degrees, strict=True):
        num_workers[node] += degree
    kinds = set()
    for node, number in num_workers.items():
        if (machine := machines.get(node)) is None:
            continue
        facts = machine.facts
        devices = sorted(set(facts.devices)) if uses_gpus else []
        # Workers on GPUs do not share the cores by their number.
        threads = 0 if devices else machine.threads or facts.num_cores // number
        kinds.add((tuple(devices), facts.num_cores, threads))
    return len(kinds) > 1


class LayerPlanner:
    """Divides the model's layers among the pipeline stages, by weights or measured speeds.

    It also proposes another division when step times differ, or when machines are lost or join.
    """

    def __init__(
        self,
        config: EngineConfig,
        layers: Sequence[range],
        costs: StageCosts,
        limits: BalanceLimits | None = None,
        find_gpu_models: Callable[[], set[str]] = find_gpu_models,
    ) -> None:
        """Create the planner of an engine that has not started.

        Args:
            config: configuration of the engine.
            layers: layers of each stage, as configured or by weights.
            costs: costs of the model's layers, the same on every stage, until they are measured.
            limits: conditions under which another division is proposed; None for the defaults.
            find_gpu_models: returns the models of this machine's GPUs.
        """
        self._config = config
        self._find_gpu_models = find_gpu_models
        self._layers = list(layers)
        self._costs = [costs] * len(self._layers)
        self._memory: list[StageMemory] | None = None
        self._limits = limits or BalanceLimits()
        self._measured: dict[tuple[int, int], StageMeasured] = {}
        """By stage and rank."""
        self._rebalancer = Rebalancer(self._costs, None, self._limits)
        self._cache = ProbeCache()
        self._weights = costs
        self._degrees = list(config.stage_degrees)
        self._nodes = [LOCAL_NODE] * len(self._layers)
        """Name of the node of each stage."""
        self._machines: dict[str, Machine] = {}
        """Machines at the start, by the name of the node; empty for this one alone."""
        self._served: tuple[list[StageLoaded], list[str], list[int]] | None = None
        """Reports, and node and degree of each stage, of the last epoch that was ready."""

    @property
    def layers(self) -> list[range]:
        """Layers of each stage, from the next epoch on."""
        return list(self._layers)

    @property
    def bounds(self) -> Bounds:
        """First layer of each stage and first layer after it, from the next epoch on."""
        return [(part.start, part.stop) for part in self._layers]

    @property
    def should_measure(self) -> bool:
        """True if the workers' speeds are measured before the layers are divided."""
        config = self._config
        if config.layers != "auto" or len(self._layers) == 1 or config.is_emulated:
            return False
        uses_gpus = config.device != "cpu"
        return (
            len(set(config.stage_degrees)) > 1
            or len(set(config.debug_slowdown)) > 1
            or (uses_gpus and len(self._find_gpu_models()) > 1)
            or may_differ_in_speed(self._nodes, self._degrees, self._machines, uses_gpus)
        )

    def on_measured(self, message: StageMeasured) -> None:
        """Record a worker's measurement."""
        self._measured[message.stage, message.rank] = message

    def choose_layers(self) -> Bounds:
        """Divide the layers by the measurements of all workers."""
        stages = range(len(self._layers))
        costs, memory = [], []
        for stage in stages:
            ranks = [measured for (own, _), measured in self._measured.items() if own == stage]
            weights = self._weights
            costs.append(
                replace(
                    _join_costs(ranks),
                    num_joint_layers=weights.num_joint_layers,
                    joined_layers=weights.joined_layers,
                )
            )
            memory.append(self._limit_by_machine(_join_memory(ranks), stage))
        try:
            layers = partition_layers(costs, memory)
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

    def _limit_by_machine(self, memory: StageMemory, stage: int) -> StageMemory:
        """Limit a stage's memory, if it is the host's, to its share of that of its machine."""
        machine = self._machines.get(self._nodes[stage])
        if machine is None or not math.isinf(memory.limit_bytes):
            return memory
        num_workers: Counter[str] = Counter()
        for node, degree in zip(self._nodes, self._degrees, strict=True):
            num_workers[node] += degree
        total = HOST_MEMORY_SHARE * machine.facts.memory_bytes
        return replace(memory, limit_bytes=total / num_workers[self._nodes[stage]])

    def change_shape(self, shape: NodeShape) -> None:
        """Store the number of stages and their machines for the next start of the pipeline."""
        unique_nodes = dict.fromkeys(shape.nodes)
        log.info(
            "layers per stage: %s, on these machines: %s",
            ",".join(str(end - begin) for begin, end in shape.layers),
            ", ".join("the head's" if node == LOCAL_NODE else node for node in unique_nodes),
        )
        has_moved = (shape.nodes, shape.degrees) != (self._nodes, self._degrees)
        self._layers = [range(begin, end) for begin, end in shape.layers]
        if has_moved and (reason := self._unkept_reason()):
            log.warning("%s", reason)
        if not has_moved:
            return
        if len(shape.nodes) != len(self._nodes):
            stages = match_stages(self._nodes, shape.nodes)
            old = {after: self._costs[before] for before, after in stages.items()}
            self._costs = [old.get(stage, self._costs[0]) for stage in range(len(shape.nodes))]
        self._degrees, self._nodes = list(shape.degrees), list(shape.nodes)
        self._measured.clear()
        # Other machines have another memory, which is known once they have loaded their layers.
        self._memory = None
        self._rebalancer = Rebalancer(self._costs, None, self._limits)

    def _unkept_reason(self) -> str:
        """Return the reason for which the layers are not those of --layers; empty if they are."""
        configured = self._config.layer_counts
        if configured is None or [len(part) for part in self._layers] == list(configured):
            return ""
        flag = f"--layers {','.join(map(str, configured))} is not kept"
        if len(configured) != len(self._layers):
            return f"{flag}: it is for {len(configured)} stages, and there are {len(self._layers)}"
        return f"{flag}: its layers do not fit into the memory of the machines"

    def set_nodes(self, nodes: Sequence[str], machines: Mapping[str, Machine]) -> None:
        """Set the name of the node of each stage, and the machines, before the start."""
        self._nodes, self._machines = list(nodes), dict(machines)

    def repartition(self, shape: NodeShape, survivors: Sequence[str]) -> NodeShape | None:
        """Divide all layers among stages on the remaining machines, after machines were lost.

        Args:
            shape: present stages.
            survivors: names of the remaining machines.

        Returns:
            The new stages; None if the layers do not fit into the memory of these machines, with
                keys and values of the longest sequence, or if it is not known yet what they need.
        """
        if (memory := self._measure_nodes()) is None:
            return None
        return repartition_layers(shape, survivors, self._costs, memory)

    def add_machine(self, node: str, machine: Machine) -> None:
        """Store the hardware of a machine that has joined after the start."""
        self._machines[node] = machine

    def find_costliest(self, stages: Sequence[int]) -> int:
        """Return the stage with the longest predicted step time, among the given stages."""

        def cost_of(stage: int) -> float:
            layers = self._layers[stage]
            return self._costs[stage].cost_of(layers.start, layers.stop)

        return max(stages, key=cost_of)

    def extend(
        self, shape: NodeShape, nodes: Sequence[str], degrees: Sequence[int], should_gain: bool
    ) -> NodeShape | None:
        """Divide all layers among the present and further stages, for machines that have joined.

        Further stages are assumed to be as fast as the first stage.

        Args:
            shape: present stages.
            nodes: machine of each further stage.
            degrees: ranks of each further stage.
            should_gain: return None unless the slowest stage gets faster by the least gain of a
                rebalancing.

        Returns:
            The new stages; None if the layers do not fit, or if it is not known yet what they need.
        """
        if (memory := self._measure_nodes()) is None:
            return None
        # The memory of emulated devices is not that of their hosts.
        for node in () if self._config.is_emulated else nodes:
            if (machine := self._machines.get(node)) is not None and not machine.facts.devices:
                memory.node_limits[node] = HOST_MEMORY_SHARE * machine.facts.memory_bytes
        memory.stage_limits.extend([math.inf] * len(nodes))
        costs = [*self._costs, *[self._costs[0]] * len(nodes)]
        extended = extend_layers(shape, nodes, degrees, costs, memory)
        configured = self._config.layer_counts
        if extended is not None and configured is not None:
            extended = fit_layers(extended, configured, memory) or extended
        if extended is None or not should_gain:
            return extended
        before, after = (
            slowest_cost(costs[: len(stages.layers)], [range(*bounds) for bounds in stages.layers])
            for stages in (shape, extended)
        )
        return extended if before / after - 1 > self._limits.min_gain else None

    def begin_epoch(self, loaded: Sequence[StageLoaded]) -> None:
        """Start to compare the step times of the stages with a new division of layers.

        Args:
            loaded: reports of the workers that have loaded their layers.
        """
        self._served = list(loaded), list(self._nodes), list(self._degrees)
        if self._memory is None:
            self._memory = self._estimate_memory(loaded)
            self._rebalancer = Rebalancer(self._costs, self._memory, self._limits)
        self._rebalancer.begin(self._layers)

    def _measure_nodes(self) -> NodeMemory | None:
        """Return what all layers need, and the memory of each node and stage.

        As of the last epoch that was ready; None before the first.
        """
        if self._served is None:
            return None
        loaded, nodes, degrees = self._served
        scheduler, max_model_len = self._config.scheduler, self._config.max_model_len or 0
        num_blocks = -(-max_model_len // scheduler.block_size)
        num_layers = len(self._weights.layers)
        scale = sum(report.weight_bytes for report in loaded) / self._weights.cost_of(0, num_layers)
        weights = self._weights.scale(scale)
        sequence = sum(_sequence_bytes(report, num_blocks) for report in loaded) / num_layers
        needs = replace(weights, layers=tuple(weight + sequence for weight in weights.layers))
        node_limits: dict[str, float] = {}
        for node in dict.fromkeys(nodes):
            own = [report for report in loaded if nodes[report.stage] == node]
            free = [x.host_available_bytes for x in own if x.host_available_bytes is not None]
            if free:
                used = sum(report.weight_bytes for report in own)
                node_limits[node] = HOST_MEMORY_SHARE * (min(free) + used)
        stage_limits = [math.inf] * len(degrees)
        for report in loaded:
            if report.available_bytes is not None:
                limit = (report.weight_bytes + report.available_bytes) * degrees[report.stage]
                stage_limits[report.stage] = min(stage_limits[report.stage], limit)
        return NodeMemory(needs, node_limits, stage_limits)

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
                needed[stage], worker.weight_bytes + _sequence_bytes(worker, num_blocks)
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
    ) -> BetterPartition | None:
        """Record a stage's number of steps and busy time; return a better division to use now.

        Without the option `rebalance` a better division is only logged. A device without a clock of
        its own reports the time of rank 0, which waits for the other ranks.
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
        return better if self._config.rebalance else None


def format_layers(layers: Sequence[range]) -> str:
    """Return the number of layers per stage in the format of the option --layers."""
    return ",".join(str(len(part)) for part in layers)


def _join_costs(ranks: Sequence[StageMeasured]) -> StageCosts:
    """Return the costs of a stage: its ranks wait for the slowest one."""
    layers = zip(*(rank.layer_seconds for rank in ranks), strict=True)
    return StageCosts(
        tuple(map(max, layers)),
        0.0,
        max(rank.head_seconds for rank in ranks),
        max(rank.step_seconds for rank in ranks),
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


def list_placement_memories(
    requested_bytes: int | None, placement: Placement, loaded: Mapping[int, StageLoaded]
) -> list[KvMemory]:
    """Return the memories for KV blocks and states: the requested bytes, or shares of what is free.

    Requested bytes are divided among all workers by the layers and heads that each has. Without a
    request, the machine with the least free memory relative to its share of a block decides.

    Args:
        requested_bytes: KV cache of all workers together; None for a share of each machine's free
            memory.
        placement: assignment of the stages' workers to machines.
        loaded: sizes and free memory in bytes that each worker has reported, by its number.
    """
    if requested_bytes is not None:
        return list_kv_memories(requested_bytes, _sizes(placement, loaded))
    memories: list[KvMemory] = []
    for node in {worker.node: None for worker in placement.workers}:
        available = _host_bytes(node, placement, loaded)
        sizes = _sizes(placement, loaded, node)
        has_own_memory = all(own is not None for _, _, own in sizes)
        if node == LOCAL_NODE or available is None or has_own_memory:
            # This machine is measured now, when all of its workers have loaded their weights.
            memories += list_kv_memories(None, sizes)
        else:
            memories += list_kv_memories(int(available * KV_SHARE), sizes)
    return memories


def list_free_memories(placement: Placement, loaded: Mapping[int, StageLoaded]) -> list[KvMemory]:
    """Return all free memory of the machines for KV blocks and states, as far as it is known.

    Other than `list_placement_memories` it leaves no reserve. It is used when layers have moved to
    other machines, where the cache has to hold at least one sequence of full length.

    Args:
        placement: assignment of the stages' workers to machines.
        loaded: sizes and free memory in bytes that each worker has reported, by its number.
    """
    memories: list[KvMemory] = []
    for node in {worker.node: None for worker in placement.workers}:
        sizes = _sizes(placement, loaded, node)
        memories += [KvMemory(own, block, state) for block, state, own in sizes if own is not None]
        available = _host_bytes(node, placement, loaded)
        hosted = [(block, state) for block, state, own in sizes if own is None]
        if available is not None and hosted:
            blocks, states = (sum(parts) for parts in zip(*hosted, strict=True))
            memories.append(KvMemory(available, blocks, states))
    return memories


def _sizes(
    placement: Placement, loaded: Mapping[int, StageLoaded], node: str | None = None
) -> list[tuple[int, int, int | None]]:
    """Return the bytes of a block, of a state slot and of own memory of each worker.

    See list_kv_memories.

    node: of the workers; None for all.
    """
    reports = [loaded[worker.sender] for worker in placement.workers if node in (None, worker.node)]
    return [(report.block_bytes, report.state_bytes, report.available_bytes) for report in reports]


def _host_bytes(node: str, placement: Placement, loaded: Mapping[int, StageLoaded]) -> int | None:
    """Return the available memory of a machine by the reports of its workers; None if unknown.

    Each report has the memory after the weights of its worker were loaded, so the least one is the
    latest.
    """
    reports = [loaded[worker.sender].host_available_bytes for worker in placement.workers_on(node)]
    return min((report for report in reports if report is not None), default=None)


def _sequence_bytes(report: StageLoaded, num_blocks: int) -> int:
    """Return the bytes of a worker's KV blocks and states for one sequence of `num_blocks`."""
    return num_blocks * report.block_bytes + STATE_SLOTS_PER_SEQ * report.state_bytes
