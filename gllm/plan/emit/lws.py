"""Kubernetes: a LeaderWorkerSet for each engine, a Deployment for the router, and what they need.

The conventions are those of deploy/lws.yaml and deploy/kubernetes-router.yaml: pods find each other
before they are ready, a lost pod is replaced alone, one pod at a time is evicted, and running
requests end before a pod does.
"""

import re
from typing import Any

from gllm.config.nodes import DEFAULT_DATA_PORT, DEFAULT_HEAD_PORT
from gllm.plan.emit.registry import (
    PAUSE_SECONDS,
    SECRET_NAME,
    EmitOptions,
    add_shared_memory,
    kubernetes_object,
    kubernetes_service,
    pod_spec,
    replace_flags,
    request_gpus,
    stop_seconds,
    to_yaml,
)
from gllm.plan.processes import LaunchOptions, ProcessSpec, commands_for, engine_ports
from gllm.plan.serving_plan import ROUTER_HUB_PORT, EnginePlan, PlanError, ServingPlan

FILE = "gllm.yaml"
SECRET_FOLDER = "/etc/gllm"
SECRET_FILE = f"{SECRET_FOLDER}/secret"
NODE_LABEL = "gllm.io/node"
"""Label that binds pods to the machine of a node of the plan."""
HTTP_PORT = 8000
ROUTER = "gllm-router"
ROUTER_HUB = "gllm-router-hub"
API = "gllm"
COMMENT = """A plan for Kubernetes with LeaderWorkerSet (https://lws.sigs.k8s.io).
  gllm node --new-secret secret && kubectl create secret generic {secret} --from-file=secret
  {labels}
  kubectl apply -f {file}
The image is Dockerfile.cpu or Dockerfile.cuda of deploy/."""
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,40}[a-z0-9])?")
"""Names of objects; LeaderWorkerSet appends numbers to them."""


def emit(plan: ServingPlan, options: EmitOptions) -> dict[str, str]:
    """Convert a serving plan into Kubernetes manifests with LeaderWorkerSets, in one YAML file.

    Returns:
        Contents of the file by its name.

    Raises:
        PlanError: a name is not valid in Kubernetes, or the workers of an engine differ.
    """
    for kind, names in (("engines", plan.engines), ("nodes", plan.nodes)):
        for name in names:
            if not _NAME.fullmatch(name):
                raise PlanError(
                    f"{kind}.{name}: Kubernetes needs a name of at most 42 lower-case letters, "
                    "digits and dashes that begins with a letter"
                )
    launch = LaunchOptions(SECRET_FILE)
    documents: list[Any] = []
    for name, engine in plan.engines.items():
        specs = commands_for(plan, engine.nodes[0], launch)
        (spec,) = (spec for spec in specs if spec.name == name and not spec.is_router)
        documents += _engine_objects(plan, engine, spec, options)
    if plan.router:
        node = plan.router.node
        documents += _router_objects(node, commands_for(plan, node, launch)[0], options)
    else:
        documents.append(
            kubernetes_service(API, {"app": "gllm-engine", "role": "head"}, HTTP_PORT, "http")
        )
    _check_names(documents)
    labels = "\n  ".join(
        f"kubectl label node MACHINE {NODE_LABEL}={node}" for node in _used_nodes(plan)
    )
    comment = COMMENT.format(secret=SECRET_NAME, labels=labels, file=FILE)
    return {FILE: to_yaml(documents, comment)}


def _check_names(objects: list[Any]) -> None:
    """Raise PlanError if two objects of a kind would have one name.

    A LeaderWorkerSet creates a Service and a StatefulSet with its own name, and a StatefulSet of
    workers whose name also has the number of the group.
    """
    owners: dict[tuple[str, str], str] = {}
    for each in objects:
        kind, name = each["kind"], each["metadata"]["name"]
        created = [(kind, name)]
        if kind == "LeaderWorkerSet":
            created += [("Service", name), ("StatefulSet", name), ("StatefulSet", f"{name}-0")]
        for key in created:
            if key in owners:
                engine = max(name, owners[key], key=len).removeprefix("gllm-")
                raise PlanError(
                    f"engines.{engine}: {name} and {owners[key]} would both have a {key[0]} "
                    f"{key[1]}: give the engine another name"
                )
            owners[key] = name


def _used_nodes(plan: ServingPlan) -> list[str]:
    nodes = [node for engine in plan.engines.values() for node in engine.nodes]
    return list(dict.fromkeys([*nodes, *([plan.router.node] if plan.router else [])]))


def _engine_objects(
    plan: ServingPlan, engine: EnginePlan, spec: ProcessSpec, options: EmitOptions
) -> list[Any]:
    """Return the LeaderWorkerSet of an engine and its PodDisruptionBudget."""
    name, nodes = f"gllm-{spec.name}", engine.nodes
    shapes = {
        node: [stage.num_ranks for stage in engine.stages_of(node)] if node != nodes[0] else []
        for node in nodes[1:]
    }
    if len({str(shape) for shape in shapes.values()}) > 1:
        raise PlanError(
            f"engines.{spec.name}.stages: {shapes}: the workers of a LeaderWorkerSet are alike; "
            "give each node but the first one the same stages, or use --emit slurm"
        )
    arguments = replace_flags(spec.arguments, _pod_flags(plan, engine, spec))
    labels = {"app": "gllm-engine", "engine": spec.name}
    leader = _pod(spec, arguments, labels | {"role": "head"}, options)
    leader["spec"] |= _placement(nodes[:1], labels)
    _add_devices(leader, engine, nodes[0])
    worker = _pod(spec, arguments, labels | {"role": "agent"}, options)
    worker["spec"] |= _placement(nodes[1:] or nodes, labels)
    _add_devices(worker, engine, nodes[-1])
    # The machines of the plan have no place for a second engine.
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    group = {
        "replicas": 1,
        # The leader becomes ready by its workers.
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling},
        "leaderWorkerTemplate": {
            "size": len(nodes),
            # A lost pod is replaced alone; the others keep weights and requests.
            "restartPolicy": "None",
            "leaderTemplate": leader,
            "workerTemplate": worker,
        },
    }
    api_version = "leaderworkerset.x-k8s.io/v1"
    group = kubernetes_object(api_version, "LeaderWorkerSet", name, group)
    return [group, _budget(name, labels)]


def _pod_flags(plan: ServingPlan, engine: EnginePlan, spec: ProcessSpec) -> dict[str, str | None]:
    """Return the flags of a pod that differ from those of a machine of the plan."""
    flags: dict[str, str | None] = {
        "--host": "0.0.0.0",
        "--port": str(HTTP_PORT),
        "--log-format": "json",
        # Each process has a pod of its own, also those of one machine of the plan.
        "--node-secret-file": SECRET_FILE,
        "--router": f"dns:{ROUTER_HUB}:{ROUTER_HUB_PORT}" if plan.router else None,
    }
    if len(engine.nodes) > 1:
        # Rank, number of machines and the head's address are in the environment of the pods. The
        # head binds its IP address: its own name may not have a DNS record yet.
        flags |= dict.fromkeys(("--nnodes", "--node-rank", "--master-addr"))
        flags |= {
            "--node-name": "$(POD_NAME)",
            "--node-listen": "$(POD_IP)",
            "--data-port": str(DEFAULT_DATA_PORT),
        }
    if any(text.startswith("--kv-transfer=") for text in spec.arguments):
        port = engine_ports(plan, spec.name, engine.nodes[0]).kv
        flags["--kv-transfer-address"] = f"$(POD_IP):{port}"
    return flags


def _router_objects(node: str, spec: ProcessSpec, options: EmitOptions) -> list[Any]:
    """Return the Deployment of the router, its Services and its PodDisruptionBudget."""
    labels = {"app": ROUTER}
    hub = f"0.0.0.0:{ROUTER_HUB_PORT}"
    flags: dict[str, str | None] = {
        "--host": "0.0.0.0", "--port": str(HTTP_PORT), "--hub": hub, "--log-format": "json",
        "--node-secret-file": SECRET_FILE,
    }  # fmt: skip
    pod = _pod(spec, replace_flags(spec.arguments, flags), labels, options)
    pod["spec"] |= _placement([node], labels)
    # The machine has no place for a second router: its pods repel each other.
    rolling = {"maxSurge": 0, "maxUnavailable": 1}
    deployment = {
        "replicas": 1,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": rolling},
        "selector": {"matchLabels": labels},
        "template": pod,
    }
    records = kubernetes_service(ROUTER_HUB, labels, ROUTER_HUB_PORT, "hub")
    # A router without engines is not ready, and they have to find it.
    records["spec"] |= {"clusterIP": "None", "publishNotReadyAddresses": True}
    return [
        kubernetes_object("apps/v1", "Deployment", ROUTER, deployment),
        kubernetes_service(API, labels, HTTP_PORT, "http"),
        records,
        _budget(ROUTER, labels),
    ]


def _pod(
    spec: ProcessSpec, arguments: list[str], labels: dict[str, str], options: EmitOptions
) -> dict[str, Any]:
    """Return the template of a pod."""
    probe = {"httpGet": {"path": "/health", "port": "http"}, "timeoutSeconds": 5}
    ports = {"http": HTTP_PORT}
    if spec.is_router:
        ports["hub"] = ROUTER_HUB_PORT
    elif any(text.startswith("--node-listen=") for text in arguments):
        ports |= {"nodes": DEFAULT_HEAD_PORT, "data": DEFAULT_DATA_PORT}
    transfer = next((t for t in arguments if t.startswith("--kv-transfer-address=")), "")
    if transfer:
        ports["kv"] = int(transfer.rpartition(":")[2])
    container = {
        "name": "gllm",
        "image": options.image,
        "args": ["gllm", spec.command, *arguments],
        "env": [
            _field_variable("POD_NAME", "metadata.name"),
            _field_variable("POD_IP", "status.podIP"),
        ],
        "ports": [{"name": name, "containerPort": port} for name, port in ports.items()],
        "volumeMounts": [{"name": "node-secret", "mountPath": SECRET_FOLDER, "readOnly": True}],
        # /health is 503 while pods join and the model loads: ten minutes for that.
        "startupProbe": probe | {"periodSeconds": 5, "failureThreshold": 120},
        "livenessProbe": probe | {"periodSeconds": 10},
        "readinessProbe": {
            "httpGet": {"path": "/ready", "port": "http"}, "periodSeconds": 5, "timeoutSeconds": 5,
        },
        # Time for the cluster to send new connections elsewhere.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PAUSE_SECONDS)]}}},
    }  # fmt: skip
    return {
        "metadata": {
            "labels": labels,
            "annotations": {
                "prometheus.io/scrape": "true", "prometheus.io/port": str(HTTP_PORT),
            },
        },
        "spec": {
            "terminationGracePeriodSeconds": stop_seconds(spec.shutdown_seconds),
            **pod_spec(container),
        },
    }  # fmt: skip


def _placement(nodes: list[str], labels: dict[str, str]) -> dict[str, Any]:
    """Return where pods run: on the machines of some nodes, one pod of an engine on each."""
    term = {"matchExpressions": [{"key": NODE_LABEL, "operator": "In", "values": nodes}]}
    rule = "requiredDuringSchedulingIgnoredDuringExecution"
    apart = {"topologyKey": "kubernetes.io/hostname", "labelSelector": {"matchLabels": labels}}
    return {
        "affinity": {
            "nodeAffinity": {rule: {"nodeSelectorTerms": [term]}},
            "podAntiAffinity": {rule: [apart]},
        }
    }


def _add_devices(pod: dict[str, Any], engine: EnginePlan, node: str) -> None:
    """Request the GPUs of an engine's stages on a node, and shared memory for NCCL."""
    num_devices = sum(len(stage.devices) for stage in engine.stages_of(node))
    (container,) = pod["spec"]["containers"]
    add_shared_memory(pod["spec"])
    request_gpus(container, num_devices)


def _field_variable(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _budget(name: str, labels: dict[str, str]) -> dict[str, Any]:
    budget = {
        "maxUnavailable": 1,
        # A pod that is not ready serves nothing that its eviction could end.
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": labels},
    }
    return kubernetes_object("policy/v1", "PodDisruptionBudget", name, budget)
