"""Engines of goodput plans on nodes: those that cross nodes, and the plan that `gllm up` runs."""

from collections.abc import Sequence
from itertools import pairwise

from gllm.plan.goodput.engines import LOCAL_LINK, MAX_SEQS, EngineCosts
from gllm.plan.goodput.placement import PHASES, PlacementUnit, place_units
from gllm.plan.goodput.systems import System
from gllm.plan.layout import Parallelism, PlannedEngine, Stages, lay_out, place_engines
from gllm.plan.nodes import with_inner_link
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.sim.hardware.devices import LINKS

PRESET = "distserve"
"""Preset of the router, which its engines take as well."""
ROUTED_PRESET = "flow"
"""Preset of a router that keeps the KV caches of several units within each; its engines batch as
those of PRESET."""


class SystemPlacer:
    """Places prefill and decode engines on the nodes of a problem.

    Args:
        problem: Model and equal nodes.
        costs: Source of the predicted step times of engines.
        network: Name of the link between nodes; without units it also transfers KV caches from
            prefill to decode engines.
    """

    def __init__(self, problem: ServiceProblem, costs: EngineCosts, network: str) -> None:
        self._problem, self._costs, self._network = problem, costs, network

    def max_units(self, unit: PlacementUnit) -> int:
        """Return how many copies of a unit the cluster holds."""
        cluster = self._problem.cluster
        groups = len(cluster.nodes) // unit.num_nodes
        return groups * (cluster.devices_per_node // unit.gpus_per_node)

    def unit_system(self, unit: PlacementUnit, count: int) -> System:
        """Return copies of a unit: KV caches stay within a node, activations may cross nodes."""

        def crossings(engine: Parallelism) -> frozenset[int]:
            nodes = [unit.stage_node(engine, stage) for stage in range(engine.pp)]
            return _crossings(nodes)

        return System(
            "plan",
            self._problem.model,
            self._costs,
            unit.prefill,
            unit.decode,
            count,
            count,
            network=LOCAL_LINK,
            node_link=self._network,
            prefill_crossings=crossings(unit.prefill),
            decode_crossings=crossings(unit.decode),
            async_scheduling=True,
            is_paired=count > 1,
        )

    def apart_system(
        self, prefill: Parallelism, decode: Parallelism, num_prefill: int, num_decode: int
    ) -> System:
        """Return prefill and decode engines as they are placed on the nodes.

        If engines of a phase cross nodes behind different stages, all of them do in the simulation.

        Raises:
            ValueError: The engines do not fit the nodes.
        """
        placed = self._place_apart(prefill, decode, num_prefill, num_decode)
        sides: dict[str, frozenset[int]] = dict.fromkeys(PHASES, frozenset())
        for phase, _, stages in placed:
            sides[phase] |= _crossings([stage.devices[0] for stage in stages])
        return System(
            "plan",
            self._problem.model,
            self._costs,
            prefill,
            decode,
            num_prefill,
            num_decode,
            network=self._network,
            node_link=self._network,
            prefill_crossings=sides["prefill"],
            decode_crossings=sides["decode"],
            async_scheduling=True,
        )

    def fits_apart(
        self, prefill: Parallelism, decode: Parallelism, num_prefill: int, num_decode: int
    ) -> bool:
        """Return True if the nodes hold so many prefill and decode engines."""
        try:
            self._place_apart(prefill, decode, num_prefill, num_decode)
        except ValueError:
            return False
        return True

    def _place_apart(
        self, prefill: Parallelism, decode: Parallelism, num_prefill: int, num_decode: int
    ) -> list[tuple[str, int, Stages]]:
        """Return phase, number and stages of each engine on the nodes. Raises ValueError."""
        layers = self._problem.shape.layers
        counted = [("prefill", index, prefill) for index in range(num_prefill)]
        counted += [("decode", index, decode) for index in range(num_decode)]
        counted.sort(key=lambda engine: -engine[2].tp)
        placed = place_engines(
            self._problem.cluster,
            [(engine, engine.split_layers(layers)) for _, _, engine in counted],
        )
        return [
            (phase, index, stages)
            for (phase, index, _), stages in zip(counted, placed, strict=True)
        ]

    def lay_out(
        self, system: System, unit: PlacementUnit | None, expected: ExpectedFigures
    ) -> ServingPlan:
        """Convert engines into a serving plan.

        Args:
            system: Numbers and parallelism of the engines.
            unit: Pair of engines of which the system has copies; None: each engine for itself.
            expected: Predicted figures.

        Raises:
            ValueError: The engines do not fit the nodes.
        """
        problem = self._problem
        assert system.decode is not None
        if unit is not None:
            pairs = place_units(problem.cluster, unit, system.num_prefill, problem.shape.layers)
            placed = [
                (phase, index, stages)
                for index, pair in enumerate(pairs)
                for phase, stages in zip(PHASES, pair, strict=True)
            ]
        else:
            counts = system.num_prefill, system.num_decode
            placed = self._place_apart(system.prefill, system.decode, *counts)
        engines = [
            PlannedEngine(
                f"{phase}-{index}",
                stages,
                phase,
                {"max-num-seqs": MAX_SEQS * len(stages), "prefix-cache": False},
                max_model_len=self._costs.max_model_len,
            )
            for phase, index, stages in placed
        ]
        # KV caches stay within the nodes of a unit.
        routes = {f"prefill-{i}": {f"decode-{i}": 1.0} for i in range(system.num_prefill)}
        return lay_out(
            problem,
            with_inner_link(problem.cluster, LINKS[LOCAL_LINK]),
            engines,
            RouterPlan("", preset=ROUTED_PRESET if system.is_paired else PRESET),
            expected,
            routes if unit is not None else {},
        )


def _crossings(nodes: Sequence[int]) -> frozenset[int]:
    """Return the stages whose next stage is on another node, by the node of each stage."""
    return frozenset(stage for stage, (a, b) in enumerate(pairwise(nodes)) if a != b)
