"""The head's end of the launcher process, which talks to Ray.

The launcher is a process of its own because Ray ends a process that has lost its cluster, has many
threads and handles signals. When it ends, Ray ends the agents; it is then started again.
"""

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from gllm.config.engine import EngineConfig
from gllm.config.join import JoinConfig
from gllm.config.node_environment import parse_head_address
from gllm.config.nodes import DEFAULT_HEAD_PORT, NodesConfig
from gllm.deploy.ray.agents import LaunchEvent, LaunchSpec
from gllm.observability.child_process import ChildProcess, module_command
from gllm.observability.logs import DEFAULT_LOG_CONFIG, LogConfig
from gllm.options.addresses import format_host_port
from gllm.options.degrees import expand_degrees
from gllm.options.exit_status import UnavailableError
from gllm.plan.processes import render_flags
from gllm.recovery.backoff import Backoff

STOP_SECONDS = 15.0
"""Time for the launcher to return the machines to Ray; then it is killed."""
MIN_RESTART_SECONDS = 1.0
MAX_RESTART_SECONDS = 30.0
"""Shortest and longest time between the end of a launcher and the start of the next one."""
LAUNCHER = "gllm.deploy.ray"
"""Module of the launcher process."""
log = logging.getLogger("gllm")


class RayLauncher:
    """Starts the other machines of an engine through Ray, by a child process that connects to Ray.

    Args:
        engine: configuration of the engine.
        nodes: flags about machines.
        node_secret_file: path of the node secret on every machine; None without one.
        logs: log configuration.
        command: command line of the child process; None for the launcher of this package.
        min_restart_seconds: shortest time between the end of the child process and its restart.

    Raises:
        ValueError: this machine has a rank other than 0.
    """

    def __init__(
        self,
        engine: EngineConfig,
        nodes: NodesConfig,
        node_secret_file: str | None = None,
        logs: LogConfig = DEFAULT_LOG_CONFIG,
        command: Sequence[str] | None = None,
        min_restart_seconds: float = MIN_RESTART_SECONDS,
    ) -> None:
        if nodes.node_rank:
            raise ValueError(
                f"node_rank {nodes.node_rank}: with distributed_executor_backend ray, Ray starts "
                "the other machines; start gllm on one machine, without --node-rank"
            )
        self._nodes = nodes
        self._command = command or module_command(LAUNCHER)
        self._min_restart_seconds = min_restart_seconds
        self._spec = make_launch_spec(engine, nodes, node_secret_file, logs)
        self._process: ChildProcess | None = None
        self._is_closed = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="gllm-ray", daemon=True)

    def __enter__(self) -> NodesConfig:
        return self.place()

    def __exit__(self, *_: object) -> None:
        self.close()

    def place(self) -> NodesConfig:
        """Wait until Ray has reserved the machines and started agents; then watch the launcher.

        On GPUs, restrict this process and its workers to those that Ray has reserved.

        Returns:
            The configuration of this machine, the head.

        Raises:
            ValueError: Ray is not installed or not running, or has no such machines; the message
                has the fix. An UnavailableError if that may pass.
        """
        try:
            event = self._start()
        except BaseException:
            self.close()
            raise
        if event.error:
            self.close()
            raise (UnavailableError if event.may_pass else ValueError)(event.error)
        if event.gpu_ids:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(event.gpu_ids)
        self._spec = msgspec.structs.replace(
            self._spec, num_nodes=event.num_nodes, host=event.host, timeout_seconds=None
        )
        self._watcher.start()
        address = format_host_port(event.host, self._spec.port)
        return replace(self._nodes, nnodes=event.num_nodes, node_rank=0, master_addr=address)

    def close(self) -> None:
        """End the agents and release the machines."""
        self._is_closed.set()
        self._end_process()
        if self._watcher.is_alive():
            self._watcher.join()
            # The watcher may have been starting another one.
            self._end_process()

    def _end_process(self) -> None:
        """End the launcher process, if there is one, and close its pipes."""
        process = self._process
        if process is None:
            return
        _close_input(process)
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def _start(self) -> LaunchEvent:
        """Start a launcher and return its first event, which says whether Ray has the machines."""
        process = ChildProcess(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(msgspec.json.encode(self._spec) + b"\n")
        process.stdin.flush()
        if self._is_closed.is_set():
            # `close` may have missed the new process.
            _close_input(process)
        line = process.stdout.readline()
        if not line:
            return LaunchEvent(error=process.describe_exit("the Ray launcher"))
        return msgspec.json.decode(line, type=LaunchEvent)

    def _watch(self) -> None:
        """Start a new launcher whenever one has ended; runs on a thread."""
        backoff = Backoff(first_seconds=self._min_restart_seconds, max_seconds=MAX_RESTART_SECONDS)
        delay, cause = backoff.next_delay(), ""
        while True:
            assert self._process is not None
            exit_cause = self._process.describe_exit()
            if self._is_closed.is_set():
                return
            log.error(
                "The Ray launcher has ended: %s; agents of other machines end with it. It starts "
                "again in %g s",
                cause or exit_cause,
                delay,
            )
            if self._is_closed.wait(delay):
                return
            self._end_process()
            try:
                cause = self._start().error
            except OSError as error:
                cause = str(error)
            if not cause:
                backoff.reset()
            delay = backoff.next_delay()


def make_launch_spec(
    engine: EngineConfig, nodes: NodesConfig, node_secret_file: str | None, logs: LogConfig
) -> LaunchSpec:
    """Return the machines that an engine needs from Ray, and arguments of `gllm node` on them."""
    host, port = None, DEFAULT_HEAD_PORT
    if nodes.master_addr is not None:
        host, port = parse_head_address(nodes.master_addr)
    return LaunchSpec(
        address=nodes.ray_address,
        degrees=expand_degrees(engine.tensor_parallel_size, engine.pipeline_parallel_size),
        num_nodes=len(nodes.stages_per_node) or (nodes.nnodes if nodes.nnodes > 1 else None),
        has_gpus=None if engine.device == "auto" else engine.device == "cuda",
        num_spares=nodes.ray_spares,
        host=host,
        port=port,
        has_secret=node_secret_file is not None,
        agent_arguments=agent_arguments(engine, nodes, node_secret_file, logs),
        data_port=nodes.data_port,
        timeout_seconds=nodes.join_timeout,
        log_level=logs.level,
        log_format=logs.format,
        stages_per_node=list(nodes.stages_per_node),
    )


def agent_arguments(
    engine: EngineConfig, nodes: NodesConfig, node_secret_file: str | None, logs: LogConfig
) -> list[str]:
    """Return the arguments of `gllm node` that are equal on all machines of an engine.

    The model and most of the configuration come from the head when a machine joins; arguments are
    options that may differ between machines.
    """
    values: dict[str, Any] = {
        "node_secret_file": node_secret_file,
        "log_level": logs.level,
        "log_format": logs.format,
    }
    for config, names in (
        (
            nodes,
            (
                "join_timeout",
                "link_congestion",
                "link_policy",
                "link_encoding",
                "link_min_mbit_per_second",
            ),
        ),
        (engine, ("device", "threads", "gpu_memory_utilization")),
    ):
        values |= {name: getattr(config, name) for name in names}
    return render_flags([JoinConfig], values, "node")


def _close_input(process: ChildProcess) -> None:
    """End a launcher's standard input, which tells it to end."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
