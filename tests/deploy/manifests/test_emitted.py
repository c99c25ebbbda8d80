"""Manifests of plans: they fit their schemas, and gllm's own parsers read their command lines."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import msgspec
import pytest
import yaml

from gllm import serve
from gllm.commands import router
from gllm.commands.up import main, make_parser
from gllm.config.node_environment import read_node_rank
from gllm.config.nodes import DEFAULT_HEAD_PORT, NodesConfig
from gllm.options.flags import config_from_flags
from gllm.plan.emit.registry import EMITTERS, PAUSE_SECONDS, EmitOptions, emit_manifests
from gllm.plan.serving_plan import (
    EnginePlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    read_plan,
    write_plan,
)
from gllm.runtime.head.node import STOP_SECONDS
from gllm.runtime.messaging.security import SecretFile, create_secret_file
from tests.deploy.manifests.test_manifests import (
    KUBERNETES,
    POD,
    check_schema,
    expand,
    mounted,
    pod_templates,
)
from tests.plan.test_processes import CPU_PHASES, GPUS, LOCAL
from tests.support.schemas.compose import COMPOSE
from tests.support.schemas.ray import RAY_JOB

OPTIONS = EmitOptions("example.com/gllm:1", "~/secrets/gllm")
ALONE = ServingPlan(
    model="demo",
    nodes={name: NodePlan(f"10.0.0.{number}") for number, name in enumerate("xyz", 1)},
    engines={"wide": EnginePlan([StagePlan(node, 2) for node in "xyz"])},
)
PLANS = {"local": LOCAL, "gpus": GPUS, "phases": CPU_PHASES, "alone": ALONE}
EACH_PLAN = [
    pytest.param(plan, id=name, marks=[pytest.mark.full] if name in ("local", "phases") else [])
    for name, plan in PLANS.items()
]


def documents(manager: str, plan: ServingPlan, name: str) -> list[Any]:
    return list(yaml.safe_load_all(emit_manifests(manager, plan, OPTIONS)[name]))


def parse(command: list[str]) -> Any:
    program, name, *arguments = command
    assert program == "gllm"
    return {"serve": serve, "router": router}[name].make_parser().parse_args(arguments)


def lws_objects(plan: ServingPlan) -> dict[tuple[str, str], Any]:
    return {
        (each["kind"], each["metadata"]["name"]): each
        for each in documents("lws", plan, "gllm.yaml")
    }


@pytest.mark.parametrize("plan", EACH_PLAN)
def test_objects_for_kubernetes_fit_their_schemas(plan: ServingPlan) -> None:
    objects = lws_objects(plan)
    for each in objects.values():
        check_schema(each)
    templates = [
        template
        for each in objects.values()
        if each["kind"] in ("LeaderWorkerSet", "Deployment")
        for template in pod_templates(each).values()
    ]
    assert len(templates) == 2 * len(plan.engines) + (plan.router is not None)
    for template in templates:
        check_pod(template, objects)


def check_pod(template: Any, objects: dict[tuple[str, str], Any]) -> None:
    """Check probes, ports, the time to end, the secret and the budget of a pod."""
    spec, labels = template["spec"], template["metadata"]["labels"]
    (container,) = spec["containers"]
    values = parse(expand(container, POD))
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert (values.host, values.port) == ("0.0.0.0", ports["http"])
    assert container["startupProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    needed = PAUSE_SECONDS + values.shutdown_timeout + STOP_SECONDS
    assert spec["terminationGracePeriodSeconds"] > needed
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", str(PAUSE_SECONDS)]
    mount, _ = mounted(spec, "node-secret")
    assert values.node_secret_file == f"{mount['mountPath']}/secret"
    budgets = [each for (kind, _), each in objects.items() if kind == "PodDisruptionBudget"]
    selectors = [each["spec"]["selector"]["matchLabels"] for each in budgets]
    assert sum(selector.items() <= labels.items() for selector in selectors) == 1
    assert all(each["spec"]["maxUnavailable"] == 1 for each in budgets)


def test_pods_of_an_engine_know_their_place() -> None:
    group = lws_objects(GPUS)["LeaderWorkerSet", "gllm-d0"]["spec"]["leaderWorkerTemplate"]
    assert (group["size"], group["restartPolicy"]) == (2, "None")
    limits = {}
    for rank, role in enumerate(("leader", "worker")):
        (container,) = group[f"{role}Template"]["spec"]["containers"]
        values = parse(expand(container, POD))
        variables = {
            "LWS_WORKER_INDEX": str(rank), "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "gllm-d0-0",
        }  # fmt: skip
        nodes = config_from_flags(NodesConfig, values)
        place = read_node_rank(nodes, variables, values.pipeline_parallel_size)
        assert (place.rank, place.num_nodes, place.port) == (rank, 2, DEFAULT_HEAD_PORT)
        assert (nodes.stages_per_node, nodes.node_listen) == ((1, 2), POD["POD_IP"])
        limits[role] = container["resources"]["limits"]["nvidia.com/gpu"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports["nodes"] == DEFAULT_HEAD_PORT
        assert ports["data"] == nodes.data_port
    assert limits == {"leader": 2, "worker": 2}


def test_engines_find_the_router_before_it_is_ready() -> None:
    objects = lws_objects(CPU_PHASES)
    records = objects["Service", "gllm-router-hub"]["spec"]
    assert (records["clusterIP"], records["publishNotReadyAddresses"]) == ("None", True)
    deployment = objects["Deployment", "gllm-router"]["spec"]["template"]
    assert records["selector"] == deployment["metadata"]["labels"]
    (container,) = deployment["spec"]["containers"]
    assert parse(container["args"]).hub == f"0.0.0.0:{records['ports'][0]['port']}"
    group = objects["LeaderWorkerSet", "gllm-p"]
    (engine,) = group["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["spec"]["containers"]
    values = parse(expand(engine, POD))
    assert values.router == (f"dns:gllm-router-hub:{records['ports'][0]['port']}",)
    # Pods fetch KV blocks from each other's own addresses.
    ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
    assert values.kv_transfer_address == f"{POD['POD_IP']}:{ports['kv']}"


def test_the_api_without_a_router_is_that_of_the_heads() -> None:
    objects = lws_objects(ALONE)
    selector = objects["Service", "gllm"]["spec"]["selector"]
    group = objects["LeaderWorkerSet", "gllm-wide"]["spec"]["leaderWorkerTemplate"]
    labels = {role: group[f"{role}Template"]["metadata"]["labels"] for role in ("leader", "worker")}
    assert selector.items() <= labels["leader"].items()
    assert not selector.items() <= labels["worker"].items()


def test_the_secret_of_pods_is_accepted(tmp_path: Path) -> None:
    pod = lws_objects(LOCAL)["Deployment", "gllm-router"]["spec"]["template"]["spec"]
    create_secret_file(tmp_path / "secret")
    (tmp_path / "secret").chmod(pod["volumes"][0]["secret"]["defaultMode"])
    SecretFile(tmp_path / "secret")
    assert pod["securityContext"]["fsGroup"] == 1000


def test_unlike_workers_and_bad_names_are_refused() -> None:
    engine = EnginePlan(
        [StagePlan("x", 2), StagePlan("y", 2), StagePlan("y", 1), StagePlan("z", 1)]
    )
    with pytest.raises(PlanError, match=r"engines.wide.stages: .* use --emit slurm"):
        emit_manifests("lws", msgspec.structs.replace(ALONE, engines={"wide": engine}), OPTIONS)
    with pytest.raises(PlanError, match=r"engines.A_1: Kubernetes needs a name"):
        emit_manifests(
            "lws", msgspec.structs.replace(ALONE, engines={"A_1": ALONE.engines["wide"]}), OPTIONS
        )
    with pytest.raises(PlanError, match="--emit nomad: choose one of compose"):
        emit_manifests("nomad", ALONE, OPTIONS)


@pytest.mark.parametrize("plan", EACH_PLAN)
def test_compose_files_fit_their_schema_and_keep_the_addresses(plan: ServingPlan) -> None:
    files = emit_manifests("compose", plan, OPTIONS)
    services = {}
    for name, text in files.items():
        document = yaml.safe_load(text)
        jsonschema.validate(document, COMPOSE)
        for service, body in document["services"].items():
            services[name, service] = body
            assert body["image"] == OPTIONS.image
            values = parse(body["command"])
            if secrets := body.get("secrets"):
                assert values.node_secret_file == f"/run/secrets/{secrets[0]}"
                assert secrets[0] in document["secrets"]
            assert float(body["stop_grace_period"][:-1]) > values.shutdown_timeout + STOP_SECONDS
            probe = body["healthcheck"]["test"][-1]
            compile(probe, "probe", "exec")
            assert f":{values.port}/ready" in probe
    num_processes = sum(len(engine.nodes) for engine in plan.engines.values())
    assert len(services) == num_processes + (plan.router is not None)


def test_compose_reserves_the_gpus_of_the_plan() -> None:
    (document,) = documents("compose", GPUS, "compose.y.yaml")
    (device,) = document["services"]["d0"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["device_ids"] == ["1", "0"]
    assert list(emit_manifests("compose", LOCAL, OPTIONS)) == ["compose.yaml"]


SRUN = """#!/bin/bash
# A step: notes its arguments, and ends with the status of its node. As the real one it kills its
# task at SIGTERM; the task ends well if it gets the signal itself.
for word in "$@"; do
    case "$word" in --job-name=*) name=${word#*=} ;; esac
done
own=STATUS_${name#gllm-}
echo "$*" >>"$STEPS"
(
    trap 'echo "ended $own" >>"$STEPS"; exit 0' TERM
    echo "$BASHPID" >"$STEPS.$name"
    [ "${!own}" = wait ] && { sleep 60 & wait; }
    exit "${!own}"
) &
task=$!
trap 'echo "killed $own" >>"$STEPS"; kill -KILL "$task"; exit 1' TERM
wait "$task"
"""
SQUEUE = """#!/bin/bash
# The steps of the job, with their names.
for word in "$@"; do
    case "$word" in --jobs=*) jobs=${word#*=} ;; esac
done
echo "${jobs%%,*}.batch batch"
for file in "$STEPS".gllm-*; do
    [ ! -e "$file" ] || echo "${jobs##*,}.$(<"$file") ${file#"$STEPS".}"
done
"""
SCANCEL = """#!/bin/bash
kill -TERM "${2##*.}"
"""
SCONTROL = """#!/bin/bash
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""


class SlurmJob:
    """The emitted script with stand-ins of SLURM's programs."""

    def __init__(self, tmp_path: Path, plan: ServingPlan) -> None:
        self.folder = tmp_path
        files = emit_manifests("slurm", plan, OPTIONS)
        programs = {"srun": SRUN, "scontrol": SCONTROL, "squeue": SQUEUE, "scancel": SCANCEL}
        for name, text in (files | programs).items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        self.script = tmp_path / "gllm.sbatch"

    def start(self, **variables: str) -> subprocess.Popen[str]:
        environment = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "HOME": "/home/me",
            "STEPS": str(self.folder / "steps"),
            "SLURM_SUBMIT_DIR": str(self.folder),
            "SLURM_JOB_ID": "7",
            **variables,
        }
        return subprocess.Popen([self.script], env=environment, text=True)

    @property
    def steps(self) -> list[str]:
        path = self.folder / "steps"
        return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("plan", EACH_PLAN)
def test_slurm_scripts_have_no_mistake_that_linters_find(plan: ServingPlan, tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, plan)
    # Installed beside Python; `make test` does not activate the environment.
    subprocess.run([Path(sys.executable).with_name("shellcheck"), job.script], check=True)
    directives = [
        line for line in job.script.read_text().splitlines() if line.startswith("#SBATCH")
    ]
    nodes = sum(int(line.partition("--nodes=")[2]) for line in directives if "--nodes=" in line)
    assert nodes == len(plan.nodes)
    kinds = {tuple(node.devices) for node in plan.nodes.values()}
    components = "\n".join(directives).split("#SBATCH hetjob")
    assert len(components) == len(kinds)
    # SLURM reads it in the first component only.
    assert ["--signal=B:TERM@" in component for component in components] == [
        index == 0 for index in range(len(kinds))
    ]


def test_a_slurm_job_runs_each_node_on_its_machine(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(GPUS, router=RouterPlan("z"))
    job = SlurmJob(tmp_path, plan)
    process = job.start(
        SLURM_JOB_NODELIST_HET_GROUP_0="big1",
        SLURM_JOB_NODELIST_HET_GROUP_1="small7",
        SLURM_JOB_NODELIST_HET_GROUP_2="login2",
        **{f"SLURM_JOB_ID_HET_GROUP_{group}": str(7 + group) for group in range(3)},
        **{f"STATUS_{node}": "0" for node in "xyz"},
    )
    assert process.wait(30) == 0
    rows = {}
    for line in job.steps:
        words = shlex.split(line)
        at = words.index("up")
        values = parse_elsewhere(words[at + 1 :])
        rows[values.node] = words[:at]
        assert values.node_secret_file == "/home/me/secrets/gllm"
        assert values.plan == tmp_path / "plan.7.yaml"
    assert {node: words[5] for node, words in rows.items()} == {
        "x": "--nodelist=big1", "y": "--nodelist=small7", "z": "--nodelist=login2",
    }  # fmt: skip
    assert {words[0] for words in rows.values()} == {f"--het-group={group}" for group in "012"}
    # The plan with the names of the machines is removed at the end.
    assert not (tmp_path / "plan.7.yaml").exists()


def parse_elsewhere(arguments: list[str]) -> Any:
    """Return the flags of `gllm up` on another machine: its secret file is not here."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--node-secret-file")
    own, others = parser.parse_known_args(arguments)
    return make_parser().parse_args(others, own)


def test_a_slurm_job_writes_the_names_of_the_machines_into_the_plan(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, ALONE)
    variables = {"SLURM_JOB_NODELIST": "n1,n2,n3", "STATUS_x": "wait"}
    process = job.start(**variables, STATUS_y="wait", STATUS_z="wait")
    try:
        while len(job.steps) < 3:
            assert process.poll() is None
        plan = read_plan(tmp_path / "plan.7.yaml")
        assert {name: node.host for name, node in plan.nodes.items()} == {
            "x": "n1", "y": "n2", "z": "n3",
        }  # fmt: skip
    finally:
        process.terminate()
    # SIGTERM reaches all steps, which end well, and first the head.
    assert process.wait(30) == 0
    ended = [line for line in job.steps if "STATUS" in line]
    assert ended[0] == "ended STATUS_x"
    assert sorted(ended) == [f"ended STATUS_{node}" for node in "xyz"]


def test_a_step_that_fails_ends_the_others(tmp_path: Path) -> None:
    job = SlurmJob(tmp_path, ALONE)
    variables = {"SLURM_JOB_NODELIST": "n1,n2,n3", "STATUS_x": "wait"}
    assert job.start(**variables, STATUS_y="wait", STATUS_z="3").wait(30) == 1
    ended = [line for line in job.steps if "STATUS" in line]
    assert ended == ["ended STATUS_x", "ended STATUS_y"]


def test_the_steps_of_a_heterogeneous_job_end_after_the_router(tmp_path: Path) -> None:
    plan = msgspec.structs.replace(GPUS, router=RouterPlan("z"))
    job = SlurmJob(tmp_path, plan)
    process = job.start(
        SLURM_JOB_NODELIST_HET_GROUP_0="big1",
        SLURM_JOB_NODELIST_HET_GROUP_1="small7",
        SLURM_JOB_NODELIST_HET_GROUP_2="login2",
        **{f"SLURM_JOB_ID_HET_GROUP_{group}": str(7 + group) for group in range(3)},
        **{f"STATUS_{node}": "wait" for node in "xyz"},
    )
    while len(job.steps) < 3:
        assert process.poll() is None
    # Also if the signal comes twice.
    process.terminate()
    process.terminate()
    assert process.wait(30) == 0
    ended = [line for line in job.steps if "STATUS" in line]
    assert ended[0] == "ended STATUS_z"
    assert sorted(ended) == [f"ended STATUS_{node}" for node in "xyz"]


def test_ray_jobs_fit_their_schema() -> None:
    config, job, service = documents("ray", GPUS, "rayjob.yaml")
    jsonschema.validate(job, RAY_JOB)
    for each in (config, service):
        kubernetes_validate.validate(each, KUBERNETES, strict=True)
    cluster = job["spec"]["rayClusterSpec"]
    workers = cluster["workerGroupSpecs"]
    groups = [cluster["headGroupSpec"], *workers]
    for group in groups:
        wrapped = {"apiVersion": "v1", "kind": "PodTemplate", "template": group["template"]}
        kubernetes_validate.validate(wrapped, KUBERNETES, strict=True)
    assert [(each["groupName"], each["replicas"]) for each in workers] == [
        ("devices-4", 1), ("devices-2", 1),
    ]  # fmt: skip
    program, name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert (program, name) == ("gllm", "up")
    values = parse_elsewhere(arguments)
    assert values.on == "ray"
    mounts = groups[0]["template"]["spec"]["containers"][0]["volumeMounts"]
    folders = {mount["mountPath"] for mount in mounts}
    files = {str(Path(values.plan).parent), str(Path(values.node_secret_file).parent)}
    assert folders == {*files, "/dev/shm"}
    assert (
        service["spec"]["selector"].items() <= groups[0]["template"]["metadata"]["labels"].items()
    )
    with pytest.raises(PlanError, match="router: missing"):
        emit_manifests("ray", ALONE, OPTIONS)


def test_the_plan_of_a_ray_job_is_the_plan(tmp_path: Path) -> None:
    config, *_ = documents("ray", GPUS, "rayjob.yaml")
    path = tmp_path / "plan.yaml"
    path.write_text(config["data"]["plan.yaml"])
    assert read_plan(path) == GPUS


@pytest.mark.parametrize("manager", EMITTERS)
def test_the_command_writes_the_files(
    manager: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_plan(CPU_PHASES, tmp_path / "plan.yaml")
    folder = tmp_path / "out"
    assert main([str(tmp_path / "plan.yaml"), "--emit", manager, str(folder)]) == 0
    written = sorted(folder.iterdir())
    assert sorted(capsys.readouterr().out.splitlines()) == [str(path) for path in written]
    assert written
    assert all(os.access(path, os.X_OK) == (path.suffix == ".sbatch") for path in written)
