"""Checks of `gllm doctor` find no problem in the containers of emitted and shipped manifests."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from gllm.config.nodes import NodesConfig
from gllm.deploy.doctor import host_checks
from gllm.deploy.doctor.finding import Verdict
from gllm.options.flags import config_from_flags
from gllm.plan.emit.registry import EMITTERS, emit_manifests
from gllm.plan.serving_plan import EnginePlan, NodePlan, RouterPlan, ServingPlan, StagePlan
from gllm.runtime.messaging.security import create_secret_file
from gllm.serve import make_parser
from tests.deploy.manifests.test_emitted import OPTIONS, PLANS
from tests.deploy.manifests.test_manifests import MANIFESTS, POD, read_objects
from tests.support.schemas.rollouts import GPU, controllers, unit_templates

TENSOR_PARALLEL = ServingPlan(
    model="demo",
    nodes={"x": NodePlan("10.0.0.1", ["L20"] * 4)},
    engines={"wide": EnginePlan([StagePlan("x", 4, [0, 1, 2, 3])])},
    router=RouterPlan("x"),
)
ALL_PLANS = PLANS | {"ranks": TENSOR_PARALLEL}
UNITS = {"Gi": 2**30, "gb": 2**30}


class Container(NamedTuple):
    """Parts of a container that the checks read."""

    command: list[str]
    num_gpus: int
    shared_bytes: int
    secret_mode: int | None
    variables: dict[str, str]


def pod_containers(objects: list[Any]) -> list[Container]:
    """Return the containers of the pods of manifests; a pod of a group has its variables."""
    found = []
    for each in objects:
        if each["kind"] == "RayJob":
            cluster = each["spec"]["rayClusterSpec"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found += [pod_container(group["template"]["spec"], {}) for group in groups]
    for each in controllers(objects):
        templates = unit_templates(each)
        for rank, template in enumerate(templates):
            variables = {
                "LWS_WORKER_INDEX": str(rank),
                "LWS_GROUP_SIZE": str(len(templates)),
                "LWS_LEADER_ADDRESS": "gllm-0",
            }
            is_group = each["kind"] == "LeaderWorkerSet"
            found.append(pod_container(template["spec"], variables if is_group else {}))
    return found


def pod_container(pod: Any, variables: dict[str, str]) -> Container:
    (container,) = pod["containers"]
    mounts = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    shared = volumes.get(mounts.get("/dev/shm", ""), {}).get("emptyDir", {})
    secret = volumes.get(mounts.get("/etc/gllm", ""), {}).get("secret", {})
    size = parse_size(shared["sizeLimit"]) if shared.get("medium") == "Memory" else 64 * 2**20
    gpus = container.get("resources", {}).get("limits", {}).get(GPU, 0)
    command = container.get("args", [])
    return Container(command, gpus, size, secret.get("defaultMode"), variables)


def parse_size(text: str) -> int:
    return int(text[:-2]) * UNITS[text[-2:]]


def compose_containers(document: Any) -> list[Container]:
    found = []
    for service in document["services"].values():
        reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {})
        gpus = sum(len(each["device_ids"]) for each in reserved.get("devices", []))
        size = parse_size(service["shm_size"])
        found.append(Container(service["command"], gpus, size, None, {}))
    return found


def containers(manager: str, plan: ServingPlan) -> list[Container]:
    found = []
    for name, text in emit_manifests(manager, plan, OPTIONS).items():
        if name.startswith("compose"):
            found += compose_containers(yaml.safe_load(text))
        else:
            found += pod_containers(list(yaml.safe_load_all(text)))
    return found


def problems(each: Container, folder: Path) -> list[str]:
    """Return what `gllm doctor` would report as a problem in a container."""
    text = f"{each.shared_bytes} bytes"
    findings = [host_checks.judge_shared_memory(each.num_gpus, each.shared_bytes, text)]
    if each.secret_mode is not None:
        path = folder / f"secret-{each.secret_mode:o}"
        if not path.exists():
            create_secret_file(path)
            path.chmod(each.secret_mode)
        finding = host_checks.check_secret(str(path))
        assert finding is not None
        findings.append(finding)
    if each.command[:2] == ["gllm", "serve"]:
        variables = POD | {"NODE_RANK": "1"}
        arguments = [re.sub(r"\$\((\w+)\)", lambda m: variables[m[1]], t) for t in each.command]
        values = make_parser().parse_args(arguments[2:])
        nodes = config_from_flags(NodesConfig, values)
        stages = values.pipeline_parallel_size
        findings.append(host_checks.check_launcher(nodes, stages, each.variables))
    return [str(finding) for finding in findings if finding.verdict == Verdict.BAD]


@pytest.mark.parametrize("manager", sorted({*EMITTERS} - {"slurm"}))
@pytest.mark.parametrize("name", ALL_PLANS)
def test_emitted_containers_have_no_problem(manager: str, name: str, tmp_path: Path) -> None:
    plan = ALL_PLANS[name]
    if manager == "ray" and plan.router is None:
        return
    found = containers(manager, plan)
    assert found
    assert [problem for each in found for problem in problems(each, tmp_path)] == []
    assert sum(each.num_gpus for each in found) >= sum(
        len(stage.devices) for engine in plan.engines.values() for stage in engine.stages
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_shipped_engines_have_no_problem_with_several_gpus(path: Path, tmp_path: Path) -> None:
    """Their comments say how to request GPUs."""
    found = pod_containers(read_objects(path.name))
    for each in found:
        num_gpus = 8 if "serve" in each.command else 0
        assert problems(each._replace(num_gpus=num_gpus), tmp_path) == []
