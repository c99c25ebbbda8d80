"""Layout of prompt and token machines as a ServingPlan that `gllm up` starts."""

from gllm.plan.pools.clusters import WORKLOADS
from gllm.plan.pools.planner import PoolGoals, PoolPlan
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.sim.hardware.machines import MachineType
from gllm.sim.hardware.shapes import MODELS

PRESET = "splitwise"
"""Preset of the router, which its engines take as well."""
DEVICES = {"DGX-A100": "A100-80G", "DGX-H100": "H100", "DGX-H100-cap": "H100"}
"""Device in the simulator's table by machine type; a power limit is set on the machine."""


def lay_out_pools(plan: PoolPlan, goals: PoolGoals, checkpoint: str, command: str) -> ServingPlan:
    """Return the plan of a service: one engine of one stage on all devices of each machine.

    Args:
        plan: Cluster of prompt and token machines.
        goals: Its workload.
        checkpoint: Folder or hub name of the model.
        command: Command that made the plan.
    """
    nodes, engines = {}, {}
    layers = MODELS[goals.model].layers
    cluster = plan.cluster
    for role, machine, count in (
        ("prefill", cluster.prompt, cluster.num_prompt),
        ("decode", cluster.token, cluster.num_token),
    ):
        for index in range(count):
            name = f"{role}-{index}"
            nodes[name] = _make_node(name, machine)
            stage = StagePlan(name, layers, list(range(machine.num_gpus)))
            engines[name] = EnginePlan([stage], role)
    return ServingPlan(
        checkpoint,
        nodes,
        engines,
        router=RouterPlan(next(iter(nodes)), preset=PRESET),
        workload=WORKLOADS[goals.workload],
        expected=ExpectedFigures(command, plan.rate, capacity=plan.rate),
    )


def _make_node(name: str, machine: MachineType) -> NodePlan:
    devices = [DEVICES[machine.name]] * machine.num_gpus
    return NodePlan(name, devices, machine.dollars_per_hour)
