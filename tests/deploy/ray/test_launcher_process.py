"""`python -m gllm.deploy.ray` as a process, with a stand-in of the package ray."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.ray.agents import LaunchSpec
from gllm.deploy.ray.launcher import make_launch_spec
from gllm.observability.logs import LogConfig
from tests.support.sources import ROOT

STAND_IN = {
    "ray/__init__.py": """
from tests.support.nodes.fake_ray import FakeRay
from tests.deploy.ray.test_agents import cluster

print("ray writes to standard output")
fake = cluster(2)
for name in dir(fake):
    if not name.startswith("_") and name != "util":
        globals()[name] = getattr(fake, name)


def shutdown():
    with open(__file__ + ".ended", "w") as file:
        file.write(str(len(fake.killed)))
    fake.shutdown()
""",
    "ray/util/__init__.py": "from ray import fake\nglobals().update(vars(fake.util))\n",
    "ray/util/scheduling_strategies.py": (
        "from ray import fake\nglobals().update(vars(fake.util.scheduling_strategies))\n"
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the stand-in."""
    for name, text in STAND_IN.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


def spec(**changes: Any) -> LaunchSpec:
    engine = EngineConfig("demo", pipeline_parallel_size=2)
    found = make_launch_spec(engine, NodesConfig(), None, LogConfig("info", "text"))
    return msgspec.structs.replace(found, **changes)


def start(folder: Path, launch_spec: LaunchSpec) -> Any:
    process = subprocess.Popen(
        [sys.executable, "-m", "gllm.deploy.ray"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(launch_spec) + b"\n")
    process.stdin.flush()
    return process


@pytest.fixture
def processes() -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Processes to be killed at the end."""
    found: list[subprocess.Popen[bytes]] = []
    yield found
    for process in found:
        process.kill()
        process.communicate()


def test_it_reports_the_machines_and_returns_them_when_its_input_ends(
    folder: Path, processes: list[Any]
) -> None:
    process = start(folder, spec())
    processes.append(process)
    assert json.loads(process.stdout.readline()) == {
        "num_nodes": 2, "host": "127.0.0.11", "gpu_ids": [], "error": "",
        "may_pass": False,
    }  # fmt: skip
    output, errors = process.communicate(timeout=90)
    assert process.returncode == 0
    # Standard output is for events only.
    assert output == b""
    assert b"ray writes to standard output" in errors
    assert (folder / "ray" / "__init__.py.ended").read_text() == "1"


def test_signals_are_left_to_the_head(folder: Path, processes: list[Any]) -> None:
    process = start(folder, spec())
    processes.append(process)
    assert process.stdout.readline()
    process.terminate()
    process.send_signal(2)
    process.communicate(timeout=90)
    assert process.returncode == 0


def test_an_error_is_an_event(folder: Path, processes: list[Any]) -> None:
    process = start(folder, spec(host="10.0.0.1"))
    processes.append(process)
    output, _ = process.communicate(timeout=90)
    event = json.loads(output)
    assert "needs a node secret" in event["error"]
    assert not event["may_pass"]
    assert process.returncode == 1
    # A launcher that fails reserves nothing.
    assert (folder / "ray" / "__init__.py.ended").read_text() == "0"


def test_serve_reports_what_keeps_ray_from_starting(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "__init__.py").write_text("raise ImportError('not for this Python')")
    result = subprocess.run(
        [sys.executable, "-m", "gllm.serve", "--distributed-executor-backend", "ray"],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert result.returncode == 2
    assert "pip install -r requirements-ray.txt" in result.stderr
    assert "not for this Python" in result.stderr
