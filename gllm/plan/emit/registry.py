"""Registry of emitters of manifests by name, and the parts that they share."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gllm.plan.serving_plan import PlanError, ServingPlan

PAUSE_SECONDS = 5
"""Time before SIGTERM for a cluster to send new connections elsewhere."""
STOP_SECONDS = 10
"""Time beyond --shutdown-timeout and the pause until a process is killed."""
IMAGE = "registry.example.com/gllm:0.1.0"
"""Default image; deploy/ has Dockerfiles for it."""
SHARED_MEMORY = "1Gi"
"""Size of /dev/shm in the containers of engines; several GPUs need half of it (gllm doctor)."""
SECRET_NAME = "gllm-node"
"""Name of the secret object that has the node secret."""


@dataclass(frozen=True)
class EmitOptions:
    """Options common to all generators of cluster manifests: container image and node secret."""

    image: str = IMAGE
    """Container image with gllm."""
    node_secret_file: str = "~/gllm-secret"
    """Path of the node secret on machines without a secret store, such as those of SLURM."""


def replace_flags(arguments: Sequence[str], values: Mapping[str, str | None]) -> list[str]:
    """Return command-line arguments with some flags replaced, removed or appended.

    Args:
        arguments: flags of the form `--name=value`.
        values: new value by flag; None removes the flag. Flags that are not among the arguments are
            appended.
    """
    kept = [text for text in arguments if text.partition("=")[0] not in values]
    return kept + [f"{flag}={value}" for flag, value in values.items() if value is not None]


def with_hosts(plan: ServingPlan, hosts: Mapping[str, str]) -> ServingPlan:
    """Return a copy of a plan with other host addresses for some nodes.

    Args:
        plan: plan to copy.
        hosts: new host address by name of the node; other nodes keep their address.
    """
    nodes = {
        name: msgspec.structs.replace(node, host=hosts.get(name, node.host))
        for name, node in plan.nodes.items()
    }
    return msgspec.structs.replace(plan, nodes=nodes)


def stop_seconds(shutdown_seconds: float) -> int:
    """Return the seconds from a stop request until SIGKILL that a process needs to end.

    The sum of a pause before SIGTERM, the process's `--shutdown-timeout` and a margin.
    """
    return PAUSE_SECONDS + int(shutdown_seconds) + STOP_SECONDS


def kubernetes_object(
    api_version: str, kind: str, name: str, spec: dict[str, Any]
) -> dict[str, Any]:
    """Return a Kubernetes manifest object with API version, kind, name and spec."""
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, "spec": spec}


def kubernetes_service(
    name: str, labels: Mapping[str, str], port: int, target: str
) -> dict[str, Any]:
    """Return a Kubernetes Service that forwards a port to the pods with some labels.

    Args:
        name: name of the Service.
        labels: labels that select the pods.
        port: port of the Service.
        target: name of the port of the pods.
    """
    ports = [{"name": target, "port": port, "targetPort": target}]
    return kubernetes_object("v1", "Service", name, {"selector": labels, "ports": ports})


def pod_spec(container: dict[str, Any], **volumes: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of a pod with one container and a volume that has the node secret.

    Args:
        container: spec of the container.
        volumes: further volumes of the pod by name.
    """
    secret = {"secretName": SECRET_NAME, "defaultMode": 0o440}  # The group may read it.
    volumes["node-secret"] = {"secret": secret}
    return {
        "securityContext": {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000},
        "containers": [container],
        "volumes": [{"name": name, **volume} for name, volume in volumes.items()],
    }


def add_shared_memory(pod: dict[str, Any]) -> None:
    """Mount a memory volume at /dev/shm in all containers of a pod spec.

    Container runtimes give 64 MiB, too little for NCCL between the GPUs of a pod.

    Args:
        pod: spec of the pod (`pod_spec`).
    """
    pod["volumes"].append(
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}}
    )
    for container in pod["containers"]:
        container["volumeMounts"].append({"name": "shared-memory", "mountPath": "/dev/shm"})


def request_gpus(container: dict[str, Any], count: int) -> None:
    """Add a resource limit of a number of NVIDIA GPUs to a container spec; none for 0."""
    if count:
        container["resources"] = {"limits": {"nvidia.com/gpu": count}}


def to_yaml(documents: Sequence[Any], comment: str) -> str:
    """Return the text of a YAML file with several documents below a comment.

    Args:
        documents: dicts, lists or scalars to encode.
        comment: lines of text without a comment sign.
    """
    head = "".join(f"# {line}\n" for line in comment.splitlines())
    return head + "---\n".join(msgspec.yaml.encode(document).decode() for document in documents)


EMITTERS = {
    "compose": "docker compose: a file for each machine",
    "lws": "Kubernetes: LeaderWorkerSets, a router, Services and PodDisruptionBudgets",
    "ray": "KubeRay: a RayJob that runs `gllm up --on ray`",
    "slurm": "SLURM: a batch script for all machines",
}
"""Descriptions by name; the name is also the module in gllm.plan.emit."""


def emit_manifests(name: str, plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Return the files that start a plan on a cluster manager: contents by file name.

    Args:
        name: name of the cluster manager in EMITTERS, such as `lws` for Kubernetes.
        plan: checked serving plan.
        options: container image and path of the node secret.

    Raises:
        PlanError: there is no such cluster manager, or its files cannot express the plan.
    """
    if name not in EMITTERS:
        raise PlanError(f"--emit {name}: choose one of {', '.join(EMITTERS)}")
    module = importlib.import_module(f"gllm.plan.emit.{name}")
    emit: Callable[[ServingPlan, EmitOptions], dict[str, str]] = module.emit
    return emit(plan, options)
