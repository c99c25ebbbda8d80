"""KubeRay: a RayJob whose cluster has the machines of a plan and runs `gllm up --on ray`."""

from typing import Any

import msgspec

from gllm.plan.emit.registry import (
    SECRET_NAME,
    EmitOptions,
    add_shared_memory,
    kubernetes_object,
    kubernetes_service,
    pod_spec,
    request_gpus,
    to_yaml,
)
from gllm.plan.processes import LaunchOptions, commands_for
from gllm.plan.serving_plan import PlanError, ServingPlan

FILE = "rayjob.yaml"
NAME = "gllm"
PLAN_FOLDER, SECRET_FOLDER = "/etc/gllm-plan", "/etc/gllm"
PLAN_FILE = "plan.yaml"
RAY_VERSION = "2.60.0"
"""Version of requirements-ray.txt."""
COMMENT = """A plan in a Ray cluster of its own, by KubeRay (https://docs.ray.io, RayJob).
  gllm node --new-secret secret && kubectl create secret generic {secret} --from-file=secret
  kubectl apply -f {file}
The image is Dockerfile.cpu or Dockerfile.cuda of deploy/, with `pip install 'ray[default]=={ray}'`:
RayJobs are submitted to the server that `default` installs."""


def emit(plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Convert a serving plan into a KubeRay manifest with a ConfigMap, a RayJob and a Service.

    Returns:
        Contents of the YAML file by its name.

    Raises:
        PlanError: the plan has no router, whose address is that of the Service.
    """
    if plan.router is None:
        raise PlanError("router: missing: with Ray, engines are reached by a router: add one")
    for node in plan.nodes:
        commands_for(plan, node, LaunchOptions(f"{SECRET_FOLDER}/secret"))
    config = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{NAME}-plan"},
        "data": {PLAN_FILE: msgspec.yaml.encode(plan).decode()},
    }
    secret = f"--node-secret-file {SECRET_FOLDER}/secret"
    job = {
        "entrypoint": f"gllm up {PLAN_FOLDER}/{PLAN_FILE} --on ray {secret}",
        "shutdownAfterJobFinishes": True,
        "rayClusterSpec": {
            "rayVersion": RAY_VERSION,
            "headGroupSpec": {
                "rayStartParams": {},
                "template": _pod("head", 0, plan.router.port, options),
            },
            "workerGroupSpecs": [
                {
                    "groupName": f"devices-{num_devices}",
                    "replicas": count,
                    "minReplicas": count,
                    "maxReplicas": count,
                    "rayStartParams": {},
                    "template": _pod("worker", num_devices, None, options),
                }
                for num_devices, count in count_workers(plan).items()
            ],
        },
    }
    job = kubernetes_object("ray.io/v1", "RayJob", NAME, job)
    service = kubernetes_service(NAME, {"app": NAME, "role": "head"}, plan.router.port, "http")
    comment = COMMENT.format(secret=SECRET_NAME, file=FILE, ray=RAY_VERSION)
    return {FILE: to_yaml([config, job, service], comment)}


def count_workers(plan: ServingPlan) -> dict[int, int]:
    """Return how many machines with engines there are for each number of devices per machine.

    Machines without engines are not counted.
    """
    used = {node for engine in plan.engines.values() for node in engine.nodes}
    counts: dict[int, int] = {}
    for name, node in plan.nodes.items():
        if name in used:
            counts[len(node.devices)] = counts.get(len(node.devices), 0) + 1
    return counts


def _pod(role: str, num_devices: int, port: int | None, options: EmitOptions) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": f"ray-{role}",
        "image": options.image,
        "volumeMounts": [
            {"name": "plan", "mountPath": PLAN_FOLDER, "readOnly": True},
            {"name": "node-secret", "mountPath": SECRET_FOLDER, "readOnly": True},
        ],
    }
    if port is not None:
        container["ports"] = [{"name": "http", "containerPort": port}]
    request_gpus(container, num_devices)
    spec = pod_spec(container, plan={"configMap": {"name": f"{NAME}-plan"}})
    add_shared_memory(spec)
    return {"metadata": {"labels": {"app": NAME, "role": role}}, "spec": spec}
