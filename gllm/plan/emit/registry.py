"""Registry of emitters by name."""

import importlib
from collections.abc import Callable

from gllm.plan.emit.base import EmitOptions
from gllm.plan.serving_plan import PlanError, ServingPlan

EMITTERS = {
    "compose": "docker compose: a file for each machine",
    "lws": "Kubernetes: LeaderWorkerSets, a router, Services and PodDisruptionBudgets",
    "ray": "KubeRay: a RayJob that runs `gllm up --on ray`",
    "slurm": "SLURM: a batch script for all machines",
}
"""Descriptions by name; the name is also the module in gllm.plan.emit."""


def emit_manifests(name: str, plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Return the manifests of a plan: contents by the names of files.

    Args:
        name: of EMITTERS.
        plan: checked.
        options: of the manifests.

    Raises:
        PlanError: there is no such emitter, or it cannot express the plan.
    """
    if name not in EMITTERS:
        raise PlanError(f"--emit {name}: choose one of {', '.join(EMITTERS)}")
    module = importlib.import_module(f"gllm.plan.emit.{name}")
    emit: Callable[[ServingPlan, EmitOptions], dict[str, str]] = module.emit
    return emit(plan, options)
