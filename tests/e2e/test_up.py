"""`gllm up`: a plan serves, ends in order, and names the first failure."""

import json
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gllm.commands.plan import diff
from gllm.plan.serving_plan import (
    NUM_ENGINE_PORTS,
    EnginePlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
    write_plan,
)
from tests.support.network.ports import free_port_row, free_ports
from tests.support.servers.plans import UpProcess, complete, running_up
from tests.support.servers.server import DEADLINE, alive, wait_until

FLAGS = {"threads": 1, "kv-cache-memory": "64MiB", "dtype": "float32"}


def free_block(num_nodes: int = 1) -> int:
    """The first of as many ports as an engine of some nodes has that nobody listens at."""
    return free_port_row(NUM_ENGINE_PORTS * num_nodes)[0]


def local_plan(*engines: str) -> ServingPlan:
    ports = free_ports("router", "hub")
    return ServingPlan(
        model="demo",
        nodes={"here": NodePlan("127.0.0.1")},
        engines={
            name: EnginePlan([StagePlan("here", 6)], flags=FLAGS, port=free_block())
            for name in engines
        },
        router=RouterPlan("here", ports["router"], flags={"hub": ports["hub"]}),
    )


def test_two_engines_and_a_router_serve_and_end_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = local_plan("a", "b")
    assert plan.router is not None
    url = f"http://127.0.0.1:{plan.router.port}"
    folder = tmp_path / "run" / "logs"
    with running_up(plan, tmp_path, "--step-logs", str(folder)) as up:
        up.wait_until_ready()
        assert up.output.read_text() == f"gllm up: router is ready at {url}\n"
        assert complete(url, "Once upon a time")["usage"]["completion_tokens"] == 12
        with urllib.request.urlopen(f"{url}/engines", timeout=DEADLINE) as answer:
            rows = json.load(answer)["engines"]
        assert {row["name"]: row["state"] for row in rows} == {"a": "ready", "b": "ready"}
        assert up.terminate() == 0
        drains = [line for line in up.log.splitlines() if "draining" in line]
        assert drains[0].startswith("router | ")
        assert {line.partition(" ")[0] for line in drains[1:]} == {"a", "b"}
    logs = [str(folder / f"{name}.jsonl") for name in "ab"]
    assert diff.main([str(tmp_path / "plan.yaml"), *logs, "--json"]) == 0
    figures = {row["name"]: row["measured"] for row in json.loads(capsys.readouterr().out)}
    assert figures["startup, s"] > 0
    assert figures["TTFT median, ms"] > 0


def test_no_process_outlives_the_command(tmp_path: Path) -> None:
    """All processes of a plan end when the one that supervises them is killed."""
    flags: dict[str, Any] = FLAGS | {"debug-step-seconds": 0.01}
    engine = EnginePlan([StagePlan("here", 6)], flags=flags, port=free_block())
    plan = ServingPlan("demo", {"here": NodePlan("127.0.0.1")}, {"a": engine})
    url = f"http://127.0.0.1:{plan.first_port('a', 'here')}"
    with running_up(plan, tmp_path) as up, ThreadPoolExecutor(1) as pool:
        up.wait_until_ready()
        request = pool.submit(complete, url, "Once upon a time", 900)
        pids = up.pids()
        assert len(pids) == 3, "the command, a frontend and a stage"
        up.process.kill()
        wait_until(lambda: not any(map(alive, pids)))
        assert isinstance(request.exception(), OSError)


@pytest.mark.full
def test_a_port_in_use_is_the_named_cause(tmp_path: Path) -> None:
    plan = local_plan("a")
    assert plan.router is not None
    with socket.socket() as other:
        other.bind(("127.0.0.1", plan.router.port))
        other.listen()
        with running_up(plan, tmp_path) as up:
            assert up.process.wait(DEADLINE) == 1
            last = up.log.splitlines()[-1]
    assert last.startswith("gllm up: router: it exited with ")
    assert f"--host 127.0.0.1 --port {plan.router.port}: cannot listen there" in last
    assert "in use" in last


@pytest.mark.long
def test_the_machines_of_an_engine_run_the_same_line(tmp_path: Path) -> None:
    """The second machine ends by itself when the first one has."""
    plan = ServingPlan(
        model="demo",
        nodes={"x": NodePlan("127.0.0.1"), "y": NodePlan("127.0.0.2")},
        engines={
            "wide": EnginePlan(
                [StagePlan("x", 1), StagePlan("y", 2), StagePlan("y", 3)],
                flags=FLAGS,
                port=free_block(2),
            )
        },
    )
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    ups = [UpProcess(path, tmp_path, "--node", node, name=node) for node in "xy"]
    try:
        for up in ups:
            up.wait_until_ready()
        assert ups[1].output.read_text() == "gllm up: this machine is ready\n"
        url = f"http://127.0.0.1:{plan.first_port('wide', 'x')}"
        with urllib.request.urlopen(f"{url}/nodes", timeout=DEADLINE) as answer:
            rows = {row["name"]: row["stages"] for row in json.load(answer)["nodes"]}
        assert rows == {"x": [0], "y": [1, 2]}
        assert complete(url, "Once upon a time")["usage"]["completion_tokens"] == 12
        pids = ups[1].pids()
        assert ups[0].terminate() == 0
        assert ups[1].process.wait(DEADLINE) == 0
        wait_until(lambda: not any(map(alive, pids)))
    finally:
        for up in ups:
            up.close()
