"""The head's end of the launcher process."""

import json
import logging
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.commands.node import make_parser
from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.ray.agents import LaunchEvent
from gllm.deploy.ray.launcher import RayLauncher, make_launch_spec
from gllm.observability.logs import LogConfig
from gllm.options.exit_status import INVALID_STATUS, UNAVAILABLE_STATUS, find_exit_status
from tests.support.sources import ROOT

FAKE = ROOT / "tests" / "support" / "nodes" / "fake_launcher.py"


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def start(
    folder: Path, lives: int = 9, min_restart_seconds: float = 1.0, **flags: Any
) -> RayLauncher:
    nodes = NodesConfig(distributed_executor_backend="ray", **flags)
    engine = EngineConfig("demo", pipeline_parallel_size=3)
    command = [sys.executable, str(FAKE), str(folder), str(lives)]
    return RayLauncher(engine, nodes, None, LogConfig(), command, min_restart_seconds)


def test_the_spec_has_what_the_flags_say() -> None:
    engine = EngineConfig(
        "demo", pipeline_parallel_size=2, tensor_parallel_size=(2, 1), device="cpu"
    )
    nodes = NodesConfig(
        nnodes=2,
        master_addr="10.0.0.1:7",
        ray_address="10.0.0.1:6379",
        ray_spares=3,
        join_timeout=9,
    )
    spec = make_launch_spec(engine, nodes, "/etc/secret", LogConfig("info", "json"))
    assert (spec.degrees, spec.num_nodes, spec.has_gpus) == ([2, 1], 2, False)
    assert (spec.host, spec.port, spec.address) == ("10.0.0.1", 7, "10.0.0.1:6379")
    assert (spec.num_spares, spec.timeout_seconds) == (3, 9)
    assert (spec.log_level, spec.log_format, spec.has_secret) == ("info", "json", True)


def test_agents_get_what_may_differ_between_machines_as_flags_and_never_the_secret() -> None:
    engine = EngineConfig("demo", device="cpu", threads=3)
    spec = make_launch_spec(
        engine, NodesConfig(join_timeout=9), "/etc/secret", LogConfig("info", "json")
    )
    values = make_parser().parse_args(["--join", "10.0.0.1:7", *spec.agent_arguments])
    assert (values.node_secret_file, values.join_timeout) == ("/etc/secret", 9)
    assert (values.device, values.threads, values.gpu_memory_utilization) == ("cpu", 3, 0.9)
    assert (values.log_level, values.log_format) == ("info", "json")
    assert values.link_congestion is None


def test_ray_starts_the_other_machines_by_itself() -> None:
    with pytest.raises(ValueError, match="without --node-rank"):
        start(Path("/"), node_rank=1)


def test_without_nnodes_and_device_ray_decides() -> None:
    spec = make_launch_spec(EngineConfig("demo"), NodesConfig(), None, LogConfig())
    assert (spec.num_nodes, spec.has_gpus, spec.host, spec.port) == (None, None, None, 29600)


def test_the_head_gets_the_machines_that_ray_has_found(tmp_path: Path) -> None:
    launcher = start(tmp_path, data_port=7)
    nodes = launcher.place()
    assert (nodes.nnodes, nodes.node_rank, nodes.master_addr) == (3, 0, "127.0.0.9:29600")
    assert nodes.data_port == 7
    launcher.close()
    assert (tmp_path / "ended").exists()
    launcher.close()


def test_an_error_of_ray_ends_the_start_with_its_fix(tmp_path: Path) -> None:
    launcher = start(tmp_path, lives=0)
    with pytest.raises(ValueError, match="no machines"):
        launcher.place()


@pytest.mark.parametrize("may_pass", [False, True])
def test_an_error_that_may_pass_is_worth_a_restart(may_pass: bool) -> None:
    event = msgspec.json.encode(LaunchEvent(error="Ray cannot be reached", may_pass=may_pass))
    command = [sys.executable, "-c", f"input(); print({event.decode()!r})"]
    launcher = RayLauncher(EngineConfig("demo"), NodesConfig(), None, LogConfig(), command)
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        launcher.place()
    assert find_exit_status(caught.value) == (UNAVAILABLE_STATUS if may_pass else INVALID_STATUS)


def test_a_launcher_that_ends_without_a_word_is_an_error() -> None:
    command = [sys.executable, "-c", "import sys; sys.stdin.readline(); sys.exit(3)"]
    launcher = RayLauncher(EngineConfig("demo"), NodesConfig(), None, LogConfig(), command)
    with pytest.raises(ValueError, match="the Ray launcher exited with 3"):
        launcher.place()


def test_a_dead_launcher_is_replaced_for_the_same_machines_with_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    launcher = start(tmp_path, lives=2, min_restart_seconds=0.01)
    try:
        launcher.place()
        first = json.loads((tmp_path / "spec0").read_text())
        assert (first["num_nodes"], first["host"], first["timeout_seconds"]) == (None, None, 300)
        (tmp_path / "kill0").touch()
        wait_for((tmp_path / "spec1").exists)
        second = json.loads((tmp_path / "spec1").read_text())
        # It has found these machines once: now it waits for them as long as the head runs.
        assert (second["num_nodes"], second["host"]) == (3, "127.0.0.9")
        assert second["timeout_seconds"] is None
        (tmp_path / "kill1").touch()
        wait_for((tmp_path / "spec4").exists)
    finally:
        launcher.close()
    texts = [record.getMessage() for record in caplog.records]
    assert "it exited with 9" in texts[0]
    assert "no machines" in texts[2]
    # Pauses double while Ray fails.
    assert "in 0.01 s" in texts[2].replace("in 0.02 s", "in 0.01 s")
    assert any("in 0.04 s" in text for text in texts)
