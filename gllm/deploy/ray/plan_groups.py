"""Decisions about a plan in a Ray cluster: resources of its processes, and their addresses."""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from gllm.options.addresses import format_host_port
from gllm.plan.emit.base import replace_flags
from gllm.plan.flags import find_flag
from gllm.plan.processes import (
    ROUTER_NAME,
    LaunchOptions,
    ProcessSpec,
    commands_for,
    engine_ports,
)
from gllm.plan.serving_plan import EnginePlan, PlanError, ServingPlan

NODE_SHARE = 0.001
"""Amount of Ray's resource `node:ADDRESS`, of which a machine has 1: it selects the machine."""


class RayGroup(NamedTuple):
    """Processes that Ray places together: those of an engine, one on each of its nodes."""

    name: str
    """Name of the engine, or ROUTER_NAME."""
    nodes: list[str]
    """Names of its nodes in the plan; each has a bundle on a machine of its own."""
    bundles: list[dict[str, float]]
    """Resources of each node."""


class ProcessTask(msgspec.Struct, frozen=True):
    """Everything that an actor knows about its process."""

    plan: ServingPlan
    name: str
    """Name of the engine, or ROUTER_NAME."""
    node: str
    """Name of the node in the plan."""
    router_host: str
    """Address of the router's machine."""
    node_secret_file: str | None = None
    step_log_folder: str | None = None


def make_groups(plan: ServingPlan, router_address: str) -> list[RayGroup]:
    """Return the groups of a plan, the router's first.

    A worker takes a GPU, or as many CPUs as it has threads; a process with GPUs takes a CPU.

    Args:
        plan: with a router.
        router_address: of the machine for the router, in Ray.

    Raises:
        PlanError: the plan has no router.
    """
    if plan.router is None:
        raise PlanError("router: missing: with --on ray engines are reached by a router: add one")
    place = {"CPU": 1.0, f"node:{router_address}": NODE_SHARE}
    groups = [RayGroup(ROUTER_NAME, [plan.router.node], [place])]
    for name, engine in plan.engines.items():
        bundles = [_bundle(engine, node) for node in engine.nodes]
        groups.append(RayGroup(name, engine.nodes, bundles))
    return groups


def make_process(task: ProcessTask, own_host: str, head_host: str) -> ProcessSpec:
    """Return what a Ray actor has to start: one process of the plan, with its addresses filled in.

    Args:
        task: Which router or engine of the plan, and on which of its nodes.
        own_host: Address of this machine.
        head_host: Address of the machine that has the head of the engine.

    Raises:
        PlanError: a flag of the plan is not valid, or a node secret is missing.
    """
    plan = task.plan
    assert plan.router is not None
    hosts = dict.fromkeys(plan.nodes, task.router_host)
    if task.name != ROUTER_NAME:
        hosts |= {plan.engines[task.name].nodes[0]: head_host, task.node: own_host}
    # The router may be on the node of an engine in the plan, and elsewhere in Ray.
    plan = _with_hosts(plan, hosts, task.router_host)
    node = plan.router.node if task.name == ROUTER_NAME and plan.router else task.node
    options = LaunchOptions(task.node_secret_file, None, task.step_log_folder)
    specs = commands_for(plan, node, options)
    is_router = task.name == ROUTER_NAME
    spec = next(each for each in specs if each.is_router == is_router and each.name == task.name)
    if not any(text.startswith("--kv-transfer=") for text in spec.arguments):
        return spec
    # Engines of one node of the plan may be on several machines.
    address = format_host_port(own_host, engine_ports(plan, task.name, task.node).kv)
    arguments = replace_flags(spec.arguments, {"--kv-transfer-address": address})
    return msgspec.structs.replace(spec, arguments=arguments)


def _with_hosts(plan: ServingPlan, hosts: Mapping[str, str], router_host: str) -> ServingPlan:
    """Return a plan with other hosts, whose router has a node of its own."""
    assert plan.router is not None
    own = "router-in-ray"
    nodes = {
        name: msgspec.structs.replace(node, host=hosts[name]) for name, node in plan.nodes.items()
    }
    nodes[own] = msgspec.structs.replace(nodes[plan.router.node], host=router_host)
    router = msgspec.structs.replace(plan.router, node=own)
    return msgspec.structs.replace(plan, nodes=nodes, router=router)


def _bundle(engine: EnginePlan, node: str) -> dict[str, float]:
    stages = engine.stages_of(node)
    num_workers = float(sum(stage.num_ranks for stage in stages))
    if stages[0].devices:
        return {"CPU": 1.0, "GPU": num_workers}
    return {"CPU": num_workers * float(find_flag(engine.flags, "threads") or 1)}
