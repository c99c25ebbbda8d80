"""Kubernetes manifests fit the schemas of Kubernetes and LeaderWorkerSet, and gllm's flags."""

import copy
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from gllm.config.node_environment import NodeRank, read_node_rank
from gllm.config.nodes import DEFAULT_DATA_PORT, DEFAULT_HEAD_PORT, NodesConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import config_from_flags
from gllm.runtime.head.node import STOP_SECONDS
from gllm.runtime.head.node_hub import node_hub_address
from gllm.runtime.messaging.security import SecretFile, create_secret_file
from gllm.serve import make_parser
from tests.support.schemas.lws import LEADER_WORKER_SET
from tests.support.sources import ROOT

DEPLOY = ROOT / "deploy"
KUBERNETES = "1.37"
MANIFESTS = [*sorted(DEPLOY.glob("kubernetes*.yaml")), DEPLOY / "lws.yaml"]
POD = {"POD_NAME": "pod-1", "POD_IP": "127.0.0.7"}


def read_objects(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def check_schema(manifest: Any) -> None:
    """Check an object by its schema; templates of LeaderWorkerSet by that of Kubernetes."""
    if manifest["kind"] != "LeaderWorkerSet":
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
        return
    jsonschema.validate(manifest, LEADER_WORKER_SET)
    for template in pod_templates(manifest).values():
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)


def pod_templates(manifest: Any) -> dict[str, Any]:
    if manifest["kind"] == "LeaderWorkerSet":
        group = manifest["spec"]["leaderWorkerTemplate"]
        return {name: group[f"{name}Template"] for name in ("leader", "worker")}
    return {"pod": manifest["spec"]["template"]}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_all_objects_fit_their_schemas(path: Path) -> None:
    for manifest in read_objects(path.name):
        check_schema(manifest)


@pytest.mark.parametrize(
    ("name", "keys", "value"),
    [
        ("lws.yaml", ("leaderWorkerTemplate", "restartPolicy"), "NoneRestartPolicy"),
        ("lws.yaml", ("leaderWorkerTemplate", "replicas"), 2),
        ("lws.yaml", ("leaderWorkerTemplate", "size"), "2"),
        ("lws.yaml", ("startupPolicy",), "Parallel"),
        ("lws.yaml", ("leaderWorkerTemplate", "workerTemplate", "spec", "container"), []),
        ("kubernetes-nodes.yaml", ("podManagement",), "Parallel"),
        ("kubernetes-nodes.yaml", ("replicas",), "2"),
    ],
)
def test_the_schemas_notice_wrong_fields(name: str, keys: tuple[str, ...], value: Any) -> None:
    manifest = copy.deepcopy(read_objects(name)[0])
    *path, last = keys
    place = manifest["spec"]
    for key in path:
        place = place[key]
    place[last] = value
    with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
        check_schema(manifest)


def mounted(pod: Any, name: str) -> tuple[Any, Any]:
    """Return the only mount of a volume in the only container of a pod, and the volume."""
    (container,) = pod["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == name)
    (volume,) = (each for each in pod["volumes"] if each["name"] == name)
    return mount, volume


def expand(container: Any, environment: dict[str, str]) -> list[str]:
    """Return the arguments as Kubernetes passes them, with the values of variables."""
    assert {each["name"] for each in container["env"]} == set(environment)
    arguments = container["args"]
    for name, value in environment.items():
        arguments = [text.replace(f"$({name})", value) for text in arguments]
    assert not any("$(" in text for text in arguments)
    return arguments


def parse(arguments: list[str]) -> Any:
    assert arguments[:2] == ["gllm", "serve"]
    return make_parser().parse_args(arguments[2:])


def test_leader_worker_set_keeps_survivors_and_starts_workers_before_the_leader_is_ready() -> None:
    spec = read_objects("lws.yaml")[0]["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["startupPolicy"] == "LeaderCreated"


def test_pods_of_leader_worker_set_know_their_place_from_their_environment() -> None:
    group = read_objects("lws.yaml")[0]
    size = group["spec"]["leaderWorkerTemplate"]["size"]
    leader, worker = pod_templates(group).values()
    assert leader["spec"] == worker["spec"]
    for rank in range(size):
        (container,) = worker["spec"]["containers"]
        values = parse(expand(container, POD))
        variables = {
            "LWS_WORKER_INDEX": str(rank),
            "LWS_GROUP_SIZE": str(size),
            "LWS_LEADER_ADDRESS": "gllm-0.gllm.default",
        }
        nodes = config_from_flags(NodesConfig, values)
        place = read_node_rank(nodes, variables, values.pipeline_parallel_size)
        assert place == NodeRank(rank, size, "gllm-0.gllm.default", DEFAULT_HEAD_PORT)
        assert nodes.node_name == POD["POD_NAME"]
        # Also while the name of the pod has no DNS record.
        assert node_hub_address(nodes) == f"tcp://{POD['POD_IP']}:{DEFAULT_HEAD_PORT}"


def test_pods_of_the_stateful_set_know_their_place_and_find_the_head() -> None:
    stateful, headless, api, _ = read_objects("kubernetes-nodes.yaml")
    (container,) = pod_templates(stateful)["pod"]["spec"]["containers"]
    size = stateful["spec"]["replicas"]
    for rank in range(size):
        values = parse(expand(container, {**POD, "NODE_RANK": str(rank)}))
        nodes = config_from_flags(NodesConfig, values)
        place = read_node_rank(nodes, {}, values.pipeline_parallel_size)
        host = f"{stateful['metadata']['name']}-0.{headless['metadata']['name']}"
        assert place == NodeRank(rank, size, host, DEFAULT_HEAD_PORT)
        assert nodes.node_name == POD["POD_NAME"]
        assert node_hub_address(nodes) == f"tcp://{POD['POD_IP']}:{DEFAULT_HEAD_PORT}"
    assert stateful["spec"]["serviceName"] == headless["metadata"]["name"]
    # The head becomes ready by the others, which have to start and to find it before.
    assert stateful["spec"]["podManagementPolicy"] == "Parallel"
    assert headless["spec"]["publishNotReadyAddresses"] is True
    assert headless["spec"]["clusterIP"] == "None"
    # Pods of two versions refuse each other.
    assert stateful["spec"]["updateStrategy"] == {"type": "OnDelete"}
    labels = stateful["spec"]["template"]["metadata"]["labels"]
    assert api["spec"]["selector"] == {**labels, "apps.kubernetes.io/pod-index": "0"}
    assert headless["spec"]["selector"] == labels


NODE_PODS = [
    pytest.param(name, template, id=f"{name}-{role}")
    for name in ("lws.yaml", "kubernetes-nodes.yaml")
    for role, template in pod_templates(read_objects(name)[0]).items()
]


@pytest.mark.parametrize(("name", "template"), NODE_PODS)
def test_every_pod_is_probed_and_has_its_ports(name: str, template: Any) -> None:
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {
        "http": ServerConfig().port, "nodes": DEFAULT_HEAD_PORT, "data": DEFAULT_DATA_PORT,
    }  # fmt: skip
    assert [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness")] == [
        {"path": "/health", "port": "http"}
    ] * 2
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    # Probes come from outside of the pod.
    assert container["args"][container["args"].index("--host") + 1] == "0.0.0.0"


@pytest.mark.parametrize(("name", "template"), NODE_PODS)
def test_every_pod_has_time_to_end(name: str, template: Any) -> None:
    (container,) = template["spec"]["containers"]
    arguments = [text.replace("$(NODE_RANK)", "0") for text in container["args"]]
    (command, pause) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    needed = float(pause) + parse(arguments).shutdown_timeout + STOP_SECONDS
    assert template["spec"]["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize(("name", "template"), NODE_PODS)
def test_every_pod_reads_a_secret_that_gllm_accepts(
    name: str, template: Any, tmp_path: Path
) -> None:
    (container,) = template["spec"]["containers"]
    mount, volume = mounted(template["spec"], "node-secret")
    path = container["args"][container["args"].index("--node-secret-file") + 1]
    assert path == f"{mount['mountPath']}/secret"
    create_secret_file(tmp_path / "secret")
    (tmp_path / "secret").chmod(volume["secret"]["defaultMode"])
    SecretFile(tmp_path / "secret")
    # The group of the files is that of the process, which is not their owner.
    context = template["spec"]["securityContext"]
    assert context["fsGroup"] == 1000
    assert context["runAsNonRoot"] is True


@pytest.mark.parametrize("name", ["lws.yaml", "kubernetes-nodes.yaml"])
def test_pods_are_evicted_one_at_a_time(name: str) -> None:
    first, *others = read_objects(name)
    (budget,) = [each for each in others if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1
    for template in pod_templates(first).values():
        labels = template["metadata"]["labels"]
        assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_the_service_of_leader_worker_set_selects_leaders_only() -> None:
    group, service, _ = read_objects("lws.yaml")
    leader, worker = (each["metadata"]["labels"] for each in pod_templates(group).values())
    selector = service["spec"]["selector"]
    assert selector.items() <= leader.items()
    assert not selector.items() <= worker.items()
