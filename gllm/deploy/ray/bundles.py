"""Decisions of the launcher: bundles of resources, machines for spares, texts of its log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gllm.recovery.node_layout import distribute_stages

NODE_SHARE = 0.001
"""Amount of Ray's resource `node:ADDRESS`, of which a machine has 1: it selects the machine."""


@dataclass(frozen=True)
class RayMachine:
    """Node of a Ray cluster: id, address, host name, total resources, and whether it is alive."""

    identity: str
    """Id of its raylet."""
    address: str
    is_alive: bool
    resources: Mapping[str, float]
    """All resources of the machine, also those in use."""
    host_name: str = ""


def ray_node_name(address: str, identity: str) -> str:
    """Return the node name for `gllm node` on a Ray node; one host may have several Ray nodes."""
    return f"ray-{address}-{identity[:6]}"


def read_ray_machines(nodes: Sequence[Mapping[str, Any]]) -> list[RayMachine]:
    """Convert the result of `ray.nodes()` into RayMachine records."""
    return [
        RayMachine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Alive"],
            node.get("Resources", {}),
            node["NodeManagerHostname"],
        )
        for node in nodes
    ]


def port_offset(machines: Sequence[RayMachine], identity: str, head: str) -> int:
    """Return the number (0, 1, ...) that a Ray node adds to the preferred ports of its agent.

    An agent is the process `gllm node`. A host may have several Ray nodes, whose agents need
    different ports.

    Args:
        machines: nodes of the Ray cluster.
        identity: Ray's id of the node.
        head: Ray's id of the node with the engine's head, whose number is 0.
    """
    (host_name,) = {machine.host_name for machine in machines if machine.identity == identity}
    same_host = {m.identity for m in machines if m.is_alive and m.host_name == host_name}
    return sorted(same_host | {identity}, key=lambda other: (other != head, other)).index(identity)


def has_gpus_on(machines: Sequence[RayMachine], identity: str) -> bool:
    """Return True if a Ray node has GPUs.

    Args:
        machines: nodes of the Ray cluster.
        identity: Ray's id of the node.
    """
    return any(m.identity == identity and m.resources.get("GPU", 0) > 0 for m in machines)


def choose_num_nodes(num_stages: int, machines: Sequence[RayMachine], has_gpus: bool) -> int:
    """Return the number of machines for an engine: those with a GPU or CPU, at most one per stage.

    Args:
        num_stages: number of pipeline stages.
        machines: nodes of the Ray cluster.
        has_gpus: True if each machine needs a GPU.
    """
    resource = "GPU" if has_gpus else "CPU"
    num_fitting = sum(m.is_alive and m.resources.get(resource, 0) >= 1 for m in machines)
    return max(1, min(num_stages, num_fitting))


def plan_bundles(
    degrees: Sequence[int],
    num_nodes: int,
    has_gpus: bool,
    head_address: str,
    stages_per_node: Sequence[int] = (),
) -> list[dict[str, float]]:
    """Return the CPUs and GPUs to reserve on each machine (Ray's bundles), the head's first.

    A worker takes a GPU, or a CPU without GPUs; `gllm node` on a machine with GPUs takes a CPU.

    Args:
        degrees: tensor parallel size of each pipeline stage.
        num_nodes: number of machines.
        has_gpus: True if workers use GPUs.
        head_address: IP address of the head's machine.
        stages_per_node: number of stages on each machine; empty to distribute workers evenly.
    """
    counts = [0.0] * num_nodes
    owners = distribute_stages(degrees, num_nodes, stages_per_node)
    for degree, node in zip(degrees, owners, strict=True):
        counts[node] += degree
    bundles = [{"CPU": 1.0, "GPU": n} if has_gpus else {"CPU": n} for n in counts]
    bundles[0][f"node:{head_address}"] = NODE_SHARE
    return bundles


def spare_bundle(bundles: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the CPUs and GPUs of a spare machine that can replace any other except the head."""
    others = bundles[1:] or bundles
    return {
        name: max(bundle[name] for bundle in others) for name in ("CPU", "GPU") if name in others[0]
    }


def find_spare_machines(
    machines: Sequence[RayMachine],
    used: set[str],
    bundle: Mapping[str, float],
    num_wanted: int,
) -> list[RayMachine]:
    """Return machines without a process of the engine that have enough resources for a spare.

    Args:
        machines: nodes of the Ray cluster.
        used: Ray's ids of the machines in use, including the head's.
        bundle: CPUs and GPUs that a spare needs.
        num_wanted: maximum number of machines to return.
    """
    fitting = [
        machine
        for machine in machines
        if machine.is_alive
        and machine.identity not in used
        and all(machine.resources.get(name, 0) >= amount for name, amount in bundle.items())
    ]
    return fitting[: max(0, num_wanted)]


def describe_wait(bundles: Sequence[Mapping[str, float]], machines: Sequence[RayMachine]) -> str:
    """Return a log line with the resources that Ray has not reserved yet, and those that it has."""
    alive = [m for m in machines if m.is_alive]
    have = ", ".join(f"{m.address} ({describe_resources(m.resources)})" for m in alive)
    needs = "; ".join(describe_resources(bundle) for bundle in bundles)
    return (
        f"waiting for Ray to reserve {len(bundles)} bundles on as many machines ({needs}); its "
        f"cluster has {len(alive)}: {have or 'none'}"
    )


def describe_resources(resources: Mapping[str, float]) -> str:
    """Return the numbers of CPUs and GPUs as text, such as `1 CPU, 2 GPU`."""
    return ", ".join(f"{resources[name]:g} {name}" for name in ("CPU", "GPU") if name in resources)
