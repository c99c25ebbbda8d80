"""Plan of replicas as a `ServingPlan`: which devices each engine gets, and the routes."""

from gllm.plan.hetero.evaluation import EvaluatedPlan
from gllm.plan.hetero.planner import HeteroPlan
from gllm.plan.hetero.replicas import Phase, Replica
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
)
from gllm.routing.disaggregation.flow import format_routes

GBIT_BYTES = 1e9 / 8
"""Bytes per gigabit."""


def engine_names(plan: EvaluatedPlan) -> dict[tuple[Phase, int], str]:
    """Return the name of each replica by its phase and position: p0, p1, d0, ..."""
    return {
        (phase, index): f"{phase[0]}{index}"
        for phase, replicas in ((Phase.PREFILL, plan.prefill), (Phase.DECODE, plan.decode))
        for index in range(len(replicas))
    }


def named_routes(plan: EvaluatedPlan) -> dict[str, dict[str, float]]:
    """Return the flow from each prefill engine to each decode engine, requests per second."""
    routes: dict[str, dict[str, float]] = {}
    for (p, d), flow in sorted(plan.flow.routes.items()):
        routes.setdefault(f"p{p}", {})[f"d{d}"] = flow
    return routes


def make_serving_plan(plan: HeteroPlan, command: str, checkpoint: str = "") -> ServingPlan:
    """Return the plan that `gllm up` starts.

    Args:
        plan: The replicas. Those that get no flow are left out.
        command: Command line that repeats the plan.
        checkpoint: Folder or hub name of the model; empty: the name of its shape.

    Raises:
        PlanError: The plan cannot be served.
    """
    cluster, best = plan.problem.cluster, plan.best
    used = [0] * len(cluster.machines)
    engines = {}
    for (phase, index), name in engine_names(best).items():
        replicas, flows = (
            (best.prefill, best.flow.prefill)
            if phase is Phase.PREFILL
            else (best.decode, best.flow.decode)
        )
        if flows[index] > 0:
            engines[name] = _engine(plan, replicas[index], used)
    routes = named_routes(best)
    serving = ServingPlan(
        checkpoint or plan.problem.model,
        _nodes(plan),
        engines,
        links=_links(plan),
        router=RouterPlan(
            cluster.machines[0].name, preset="flow", flags={"routes": format_routes(routes)}
        ),
        routes={
            source: {target: flow / sum(targets.values()) for target, flow in targets.items()}
            for source, targets in routes.items()
        },
        workload=plan.problem.workload,
        expected=ExpectedFigures(command, best.score.flow, capacity=best.score.flow),
    )
    check_plan(serving)
    return serving


def _engine(plan: HeteroPlan, replica: Replica, used: list[int]) -> EnginePlan:
    """Return an engine on the next devices of its machines."""
    stages = []
    for stage in replica.stages:
        machine = stage.devices[0]
        devices = list(range(used[machine], used[machine] + len(stage.devices)))
        used[machine] += len(stage.devices)
        stages.append(StagePlan(plan.problem.cluster.machines[machine].name, stage.layers, devices))
    scheduler: dict[str, object] = {"preset": "flow"}
    if replica.phase is Phase.DECODE:
        scheduler["max_num_seqs"] = replica.batch
    return EnginePlan(stages, str(replica.phase), scheduler, {"kv-transfer": True})


def _nodes(plan: HeteroPlan) -> dict[str, NodePlan]:
    prices = PRICE_TABLES["hexgen-2"]
    nodes = {}
    for machine in plan.problem.cluster.machines:
        price = prices.get(machine.device)
        nodes[machine.name] = NodePlan(
            machine.host or machine.name,
            [machine.device] * machine.num_devices,
            None if price is None else round(price * machine.num_devices, 2),
        )
    return nodes


def _links(plan: HeteroPlan) -> dict[str, LinkPlan]:
    cluster = plan.problem.cluster
    links = {}
    for a, first in enumerate(cluster.machines):
        for b in range(a + 1, len(cluster.machines)):
            link = cluster.link(a, b)
            name = f"{first.name}-{cluster.machines[b].name}"
            links[name] = LinkPlan(link.bandwidth / GBIT_BYTES, round(link.latency * 1e3, 6))
    return links
