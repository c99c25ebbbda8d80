"""Model of Kubernetes' scheduler and controllers: places the pods of manifests, and updates them.

Honours node affinity, required pod anti-affinity (in both directions), GPUs, CPUs and the limits of
a rolling update. Pods are ready once they have a node.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, floor
from typing import Any

GPU = "nvidia.com/gpu"
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@dataclass
class KubernetesNode:
    """Machine of the modelled cluster."""

    labels: dict[str, str] = field(default_factory=dict)
    num_gpus: int = 0
    num_cpus: int = 64
    pods: "list[PlacedPod]" = field(default_factory=list)


@dataclass(eq=False)
class PlacedPod:
    """Pod of a unit; without a node it is pending."""

    template: Any
    node: KubernetesNode | None = None

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pod."""
        labels: dict[str, str] = self.template["metadata"]["labels"]
        return labels

    def requested(self, resource: str) -> int:
        """Return the requested amount of a resource."""
        (container,) = self.template["spec"]["containers"]
        resources = container.get("resources", {})
        amounts = resources.get("requests", {}) | resources.get("limits", {})
        return int(amounts.get(resource, 0))

    def repels(self, other: "PlacedPod") -> bool:
        """Return True if required anti-affinity keeps the other pod from this one's machine."""
        rules = self.template["spec"].get("affinity", {}).get("podAntiAffinity", {})
        return any(
            rule["labelSelector"]["matchLabels"].items() <= other.labels.items()
            for rule in rules.get(REQUIRED, [])
        )

    def accepts(self, node: KubernetesNode) -> bool:
        """Return True if required node affinity permits a machine."""
        rules = self.template["spec"].get("affinity", {}).get("nodeAffinity", {})
        terms = rules.get(REQUIRED, {}).get("nodeSelectorTerms")
        return terms is None or any(
            all(node.labels.get(each["key"]) in each["values"] for each in term["matchExpressions"])
            for term in terms
        )


Unit = list[PlacedPod]
"""Pods that a controller replaces together: one pod, or a group of LeaderWorkerSet."""


class KubernetesCluster:
    """Machines with the pods of the controllers that were applied."""

    def __init__(self, nodes: list[KubernetesNode]) -> None:
        self.nodes = nodes

    def apply(self, manifest: Any) -> list[Unit]:
        """Create the pods of a controller and return them; some may be pending."""
        units = [self._create(manifest) for _ in range(manifest["spec"].get("replicas", 1))]
        self._schedule(units)
        return units

    def roll_out(self, manifest: Any, units: list[Unit]) -> bool:
        """Replace all pods of a controller as its strategy says; return False if that never ends.

        Args:
            manifest: the controller.
            units: its pods, of `apply`.
        """
        num_units = len(units)
        surge, unavailable = update_limits(manifest)
        old, new = list(units), list[Unit]()
        while old or any(map(is_pending, new)) or len(new) < num_units:
            before = len(old), len(new), sum(map(is_pending, new))
            while len(new) < num_units and len(old) + len(new) < num_units + surge:
                new.append(self._create(manifest))
            self._schedule(new)
            num_available = sum(not is_pending(unit) for unit in old + new)
            while old and (is_pending(old[-1]) or num_available > num_units - unavailable):
                num_available -= not is_pending(old[-1])
                self._delete(old.pop())
            if before == (len(old), len(new), sum(map(is_pending, new))):
                return False
        return True

    def _create(self, manifest: Any) -> Unit:
        return [PlacedPod(template) for template in unit_templates(manifest)]

    def _delete(self, unit: Unit) -> None:
        for pod in unit:
            if pod.node is not None:
                pod.node.pods.remove(pod)

    def _schedule(self, units: list[Unit]) -> None:
        for pod in itertools.chain.from_iterable(units):
            if pod.node is None:
                pod.node = next((node for node in self.nodes if has_place(node, pod)), None)
                if pod.node is not None:
                    pod.node.pods.append(pod)


def is_pending(unit: Unit) -> bool:
    """Return True if a pod of a unit has no machine."""
    return any(pod.node is None for pod in unit)


def has_place(node: KubernetesNode, pod: PlacedPod) -> bool:
    """Return True if the scheduler may place a pod on a machine."""
    return (
        pod.accepts(node)
        and not any(pod.repels(other) or other.repels(pod) for other in node.pods)
        and sum(each.requested(GPU) for each in [*node.pods, pod]) <= node.num_gpus
        and sum(each.requested("cpu") for each in [*node.pods, pod]) <= node.num_cpus
    )


def unit_templates(manifest: Any) -> list[Any]:
    """Return the templates of the pods that a controller replaces together."""
    spec = manifest["spec"]
    if manifest["kind"] == "LeaderWorkerSet":
        group = spec["leaderWorkerTemplate"]
        workers = [group["workerTemplate"]] * (group["size"] - 1)
        return [group["leaderTemplate"], *workers]
    return [spec["template"]]


def update_limits(manifest: Any) -> tuple[int, int]:
    """Return how many units more and fewer than wanted a controller has during an update."""
    spec = manifest["spec"]
    replicas = spec.get("replicas", 1)
    match manifest["kind"]:
        case "LeaderWorkerSet":
            rolling = spec["rolloutStrategy"]["rollingUpdateConfiguration"]
            surge, unavailable = rolling.get("maxSurge", 0), rolling.get("maxUnavailable", 1)
        case "StatefulSet":
            # With OnDelete, the operator deletes all pods.
            is_manual = spec.get("updateStrategy", {}).get("type") == "OnDelete"
            surge, unavailable = 0, replicas if is_manual else 1
        case _:
            strategy = spec.get("strategy", {})
            if strategy.get("type") == "Recreate":
                return 0, replicas
            rolling = strategy.get("rollingUpdate", {})
            surge = rolling.get("maxSurge", "25%")
            unavailable = rolling.get("maxUnavailable", "25%")
    return _count(surge, replicas, ceil), _count(unavailable, replicas, floor)


def _count(limit: int | str, replicas: int, rounding: Any) -> int:
    if isinstance(limit, int):
        return limit
    return int(rounding(int(limit.removesuffix("%")) * replicas / 100))


def controllers(objects: list[Any]) -> Iterator[Any]:
    """Yield the objects of manifests that create pods."""
    for each in objects:
        if each["kind"] in ("Deployment", "StatefulSet", "LeaderWorkerSet"):
            yield each
