"""Dockerfiles and start scripts fit this repository; they are not run here."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from gllm.commands.node import make_parser as make_node_parser
from gllm.config.node_environment import NodeRank, read_node_rank
from gllm.config.nodes import DEFAULT_DATA_PORT, DEFAULT_HEAD_PORT, NodesConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import config_from_flags
from gllm.serve import make_parser
from tests.support.sources import ROOT

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))
SCRIPTS = [DEPLOY / "slurm.sbatch", DEPLOY / "torchrun.sh", DEPLOY / "wsl" / "join.sh"]
INSTRUCTIONS = {"FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "CMD"}


class Instruction(NamedTuple):
    name: str
    text: str


def parse_dockerfile(path: Path) -> list[Instruction]:
    """Return the instructions; lines that end in a backslash continue, comments are dropped."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def texts(path: Path, name: str) -> list[str]:
    return [each.text for each in parse_dockerfile(path) if each.name == name]


@pytest.fixture(params=DOCKERFILES, ids=lambda path: path.name)
def dockerfile(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_there_is_a_dockerfile_per_device() -> None:
    assert [path.name for path in DOCKERFILES] == ["Dockerfile.cpu", "Dockerfile.cuda"]


def test_instructions_are_known_and_bases_are_pinned(dockerfile: Path) -> None:
    assert {each.name for each in parse_dockerfile(dockerfile)} <= INSTRUCTIONS
    for base in texts(dockerfile, "FROM"):
        assert re.match(r"python:3\.11\.\d+-slim-\w+( AS build)?$", base)


def test_everything_copied_is_in_the_repository_and_in_the_context(dockerfile: Path) -> None:
    copied = set()
    for text in texts(dockerfile, "COPY"):
        if "--from=build" not in text:
            copied |= set(text.split()[:-1])
    assert all((ROOT / name).exists() for name in copied)
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    ]
    assert {name for name in copied if not any(Path(name).match(each) for each in allowed)} == set()
    # What setup.py reads has to be there when gllm is built.
    read = set(
        re.findall(r'"(requirements[\w-]*\.txt|README\.md)"', (ROOT / "setup.py").read_text())
    )
    assert read <= copied


def test_versions_are_those_of_the_checks(dockerfile: Path) -> None:
    pins = dict(re.findall(r"([\w-]+)==([\d.]+)", " ".join(texts(dockerfile, "RUN"))))
    makefile = (ROOT / "Makefile").read_text()
    assert f"torch=={pins.pop('torch')}" in makefile
    development = (ROOT / "requirements-dev.txt").read_text().splitlines()
    for name, version in pins.items():
        assert f"{name}=={version}" in development
    assert any("-r requirements.txt" in text for text in texts(dockerfile, "RUN"))


def test_the_image_runs_gllm_without_root_and_exposes_its_ports(dockerfile: Path) -> None:
    assert texts(dockerfile, "USER") == ["1000"]
    ports = [ServerConfig().port, DEFAULT_HEAD_PORT, DEFAULT_DATA_PORT]
    assert texts(dockerfile, "EXPOSE") == [" ".join(map(str, ports))]
    (command,) = texts(dockerfile, "CMD")
    name, verb, *arguments = json.loads(command)
    assert (name, verb) == ("gllm", "serve")
    # Ports of a container are reached from outside of it only.
    assert make_parser().parse_args(arguments).host == "0.0.0.0"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_have_no_mistake_that_linters_find(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    # Installed beside Python; `make test` does not activate the environment.
    subprocess.run([Path(sys.executable).with_name("shellcheck"), script], check=True)
    assert os.access(script, os.X_OK)


def run_script(tmp_path: Path, script: Path, program: str, arguments: list[str], **env: str) -> Any:
    """Run a script with a stand-in of the program that it starts; return that one's arguments."""
    stand_in = tmp_path / program
    stand_in.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path), **env}
    result = subprocess.run(
        [script, *arguments], env=environment, capture_output=True, text=True, check=True
    )
    return result.stdout.splitlines()


def test_slurm_starts_gllm_on_each_machine_and_keeps_survivors(tmp_path: Path) -> None:
    script = DEPLOY / "slurm.sbatch"
    arguments = run_script(
        tmp_path, script, "srun", ["demo", "--seed", "7"], SLURM_NNODES="2", GLLM_PP="4"
    )
    at = arguments.index("gllm")
    assert {"--no-kill", "--kill-on-bad-exit=0", "--wait=0"} <= set(arguments[:at])
    values = make_parser().parse_args(arguments[at + 2 :])
    assert (values.positional, values.seed, values.pipeline_parallel_size) == ("demo", 7, 4)
    variables = {
        "SLURM_NODEID": "1",
        "SLURM_NNODES": "2",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "gpu[3-4]",
        "SLURM_STEP_NODELIST": "gpu[3-4]",
        "SLURM_LOCALID": "0",
    }
    nodes = config_from_flags(NodesConfig, values)
    assert read_node_rank(nodes, variables, 4) == NodeRank(1, 2, "gpu3", DEFAULT_HEAD_PORT)
    options = re.findall(r"^#SBATCH (\S+)", script.read_text(), re.MULTILINE)
    assert "--no-kill" in options
    # SIGTERM comes early enough for running requests to end.
    (seconds,) = (float(each.split("@")[1]) for each in options if each.startswith("--signal"))
    assert seconds > values.shutdown_timeout


def test_torchrun_starts_one_process_per_machine(tmp_path: Path) -> None:
    arguments = run_script(
        tmp_path, DEPLOY / "torchrun.sh", "torchrun", ["10.0.0.1", "3", "1", "demo", "--tp", "2"]
    )
    at = arguments.index("-m")
    flags = dict(zip(arguments[:at:2], arguments[1:at:2], strict=True))
    assert flags["--nnodes"] == "3"
    assert flags["--node-rank"] == "1"
    assert flags["--nproc-per-node"] == "1"
    assert flags["--master-addr"] == "10.0.0.1"
    assert int(flags["--master-port"]) not in (DEFAULT_HEAD_PORT, DEFAULT_DATA_PORT)
    values = make_parser().parse_args(arguments[at + 2 :])
    assert (values.positional, values.pipeline_parallel_size) == ("demo", 3)
    variables = {
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "3",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "10.0.0.1",
    }
    nodes = config_from_flags(NodesConfig, values)
    assert read_node_rank(nodes, variables, 3) == NodeRank(1, 3, "10.0.0.1", DEFAULT_HEAD_PORT)


def test_the_line_of_a_windows_pc_is_one_of_gllm_node_and_dials_only() -> None:
    text = (DEPLOY / "wsl" / "join.sh").read_text().replace("\\\n", " ")
    (line,) = (line for line in text.splitlines() if line.startswith("exec"))
    program, verb, *arguments = shlex.split(line)[1:]
    assert program.endswith("/bin/gllm")
    assert verb == "node"
    values = make_node_parser().parse_args(arguments[: arguments.index("$@")])
    assert values.join == "$head"
    # Others cannot reach a machine behind the address translation of WSL2.
    assert values.data_port == 0


def test_outside_of_wsl2_a_windows_pc_is_told_what_to_do(tmp_path: Path) -> None:
    result = subprocess.run(
        [DEPLOY / "wsl" / "join.sh", "10.0.0.1:29600", "/nowhere"],
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 1
    assert "wsl --set-version" in result.stderr
    assert list(tmp_path.iterdir()) == []
