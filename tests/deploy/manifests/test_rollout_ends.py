"""Pods of all manifests find machines, and an update of the pods ends, in a model of Kubernetes."""

from pathlib import Path
from typing import Any

import pytest

from gllm.plan.emit.lws import NODE_LABEL
from gllm.plan.serving_plan import ServingPlan
from tests.deploy.manifests.test_emitted import PLANS, documents
from tests.deploy.manifests.test_manifests import MANIFESTS, read_objects
from tests.support.schemas.rollouts import (
    KubernetesCluster,
    KubernetesNode,
    controllers,
    is_pending,
    unit_templates,
    update_limits,
)


def never_ending(cluster: KubernetesCluster, objects: list[Any]) -> list[str]:
    """Return the names of controllers whose update does not end once all pods have a machine."""
    applied = [(each, cluster.apply(each)) for each in controllers(objects)]
    assert applied
    assert not any(is_pending(unit) for _, units in applied for unit in units)
    return [
        each["metadata"]["name"] for each, units in applied if not cluster.roll_out(each, units)
    ]


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_updates_of_emitted_objects_end_on_the_machines_of_the_plan(plan: ServingPlan) -> None:
    nodes = [
        KubernetesNode({NODE_LABEL: name}, len(node.devices)) for name, node in plan.nodes.items()
    ]
    assert never_ending(KubernetesCluster(nodes), documents("lws", plan, "gllm.yaml")) == []


def changed(objects: list[Any], **strategy: Any) -> list[Any]:
    for each in objects:
        if each["kind"] == "Deployment":
            each["spec"]["strategy"] = strategy
    return objects


def test_the_model_notices_a_pod_that_repels_its_successor() -> None:
    """Required anti-affinity and one pod more than wanted need a second machine."""
    plan = PLANS["local"]
    objects = changed(documents("lws", plan, "gllm.yaml"), type="RollingUpdate")
    node = KubernetesNode({NODE_LABEL: "here"})
    assert never_ending(KubernetesCluster([node]), objects) == ["gllm-router"]
    twice = [KubernetesNode({NODE_LABEL: "here"}) for _ in range(2)]
    assert never_ending(KubernetesCluster(twice), objects) == []
    objects = changed(objects, type="Recreate")
    assert never_ending(KubernetesCluster([KubernetesNode({NODE_LABEL: "here"})]), objects) == []


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_updates_of_shipped_objects_end(path: Path) -> None:
    """They end on machines with place for the pods, and for those that a strategy adds."""
    objects = list(controllers(read_objects(path.name)))
    if not objects:
        return
    num_pods = sum(
        (each["spec"]["replicas"] + update_limits(each)[0]) * len(unit_templates(each))
        for each in objects
    )
    nodes = [KubernetesNode(num_cpus=4) for _ in range(num_pods)]
    assert never_ending(KubernetesCluster(nodes), objects) == []
