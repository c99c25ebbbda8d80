"""Processes of services on a node: `gllm serve` with a node rank, its readings, its end."""

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

from gllm.config.join import JoinConfig
from gllm.deploy.cluster.service import check_parameters
from gllm.deploy.lifecycle import run_to_end
from gllm.deploy.logged_process import KILL_SECONDS, PROBE_TIMEOUT_SECONDS, LocalProcess
from gllm.deploy.metrics_scrape import parse_metrics
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.messages.base import WireMessage
from gllm.messages.services import (
    PeerLink,
    ServiceNodeKept,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReading,
    ServiceReport,
    StartServiceProcess,
)
from gllm.options.addresses import format_host_port
from gllm.options.ports import probe_port
from gllm.plan.processes import ENGINE_CONFIGS, ProcessSpec, render_flags

log = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
"""Interval of the readings of an engine."""
KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable from which `gllm serve` takes the service's key, so that process lists do
not show it."""
MakeCommand = Callable[[ProcessSpec], Sequence[str]]
"""Returns program and arguments of a process."""
GOOD_REASONS = ("stop", "length")
"""Finish reasons of requests that ended well."""


def read_engine(server: ServerClient) -> ServiceReading:
    """Read state and metrics of an engine over HTTP; the state is `unreachable` on an error."""
    try:
        state, cause = _read_state(server)
        if state in ("loading", "dead"):
            return ServiceReading(state, cause)
        return parse_reading(state, cause, server.get_text("/metrics"), _read_links(server))
    except (ServerError, ValueError, LookupError) as error:
        return ServiceReading("unreachable", str(error))


def request_drain(server: ServerClient, name: str) -> str:
    """Request over HTTP that an engine releases a node; return the error, empty on success."""
    try:
        server.post(f"/nodes/{quote(name, safe='')}/drain")
    except ServerError as error:
        return error.reason or str(error)
    return ""


def _read_state(server: ServerClient) -> tuple[str, str]:
    """Return the state of an engine and its cause. Raises ServerError without an answer."""
    try:
        return str(server.get("/health")["state"]), ""
    except ServerError as error:
        if not error.code:
            raise
        return error.code.removeprefix("engine_"), error.reason


def _read_links(server: ServerClient) -> list[PeerLink]:
    """Return the measured links between the nodes of an engine; none if it is on one node."""
    try:
        return parse_links(server.get("/nodes"))
    except ServerError:
        return []


def parse_reading(state: str, cause: str, metrics: str, links: list[PeerLink]) -> ServiceReading:
    """Return the state and counters of an engine, parsed from its Prometheus metrics.

    Args:
        state: state in the response of GET /health.
        cause: cause of the state; empty for none.
        metrics: response of GET /metrics.
        links: measured links between the engine's nodes.

    Raises:
        ValueError: the metrics cannot be parsed.
    """
    scrape = parse_metrics(metrics, 0.0)
    num_good = sum(scrape.finished.get(reason, 0.0) for reason in GOOD_REASONS)
    stages = scrape.stages.get("stage_busy_seconds_total", {})
    return ServiceReading(
        state,
        cause,
        int(scrape.value("num_requests_running")),
        int(scrape.value("num_requests_waiting")),
        int(num_good),
        int(sum(scrape.finished.values()) - num_good),
        int(scrape.value("prompt_tokens_total")),
        int(scrape.value("generation_tokens_total")),
        scrape.value("kv_cache_usage_perc"),
        [stages[stage] for stage in sorted(stages)],
        links,
    )


def parse_links(nodes: dict[str, Any]) -> list[PeerLink]:
    """Return the links between nodes with measured rates, from a response of GET /nodes."""
    links = [
        PeerLink(
            row["name"], link["peer"], link.get("bytes_per_second"), link.get("round_trip_seconds")
        )
        for row in nodes["nodes"]
        for link in row["links"]
    ]
    return [link for link in links if link.bytes_per_second or link.round_trip_seconds]


@dataclass(frozen=True)
class ServiceMachine:
    """Name, address and configuration of this node, shared by all engine processes on it."""

    name: str
    address: str
    """IP address at which other nodes reach it."""
    config: JoinConfig = field(default_factory=JoinConfig)
    """Its devices, links and ports."""


class ServicePorts(NamedTuple):
    """TCP ports of an engine's API server, for HTTP and for its other nodes; 0 for unused."""

    api: int = 0
    head: int = 0


def make_service_spec(
    machine: ServiceMachine, start: StartServiceProcess, ports: ServicePorts, head: str
) -> ProcessSpec:
    """Return the command line, environment and URL of a node's process of a deployed engine.

    Args:
        machine: address and configuration of this node.
        start: the master's command to start the process.
        ports: TCP ports of the process.
        head: HOST:PORT at which nodes join the engine.

    Raises:
        ValueError: a parameter is not one that deployed engines may set.
    """
    check_parameters(start.model, start.parameters)
    num_nodes, config = len(start.degrees), machine.config
    values: dict[str, Any] = {
        "model": start.model,
        "pipeline_parallel_size": num_nodes,
        "tensor_parallel_size": start.degrees,
        "layers": start.layers,
        "host": machine.address if start.node_rank == 0 else "127.0.0.1",
        "port": ports.api,
        "shutdown_timeout": start.shutdown_seconds,
        "device": config.device,
        "threads": config.threads,
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "node_secret_file": config.node_secret_file,
    }
    if num_nodes > 1:
        values |= {
            "nnodes": num_nodes,
            "node_rank": start.node_rank,
            "master_addr": head,
            "node_name": machine.name,
            "data_port": config.data_port,
            "advertise": config.advertise,
            "link_congestion": config.link_congestion,
            "link_policy": config.link_policy,
            "link_min_mbit_per_second": config.link_min_mbit_per_second,
        }
    return ProcessSpec(
        start.service,
        "gllm.serve",
        render_flags(ENGINE_CONFIGS, {**values, **start.parameters}, "inference_parameters"),
        f"http://{format_host_port(machine.address, ports.api)}",
        {KEY_VARIABLE: start.api_key} if start.api_key else {},
        start.shutdown_seconds,
        start.node_rank,
    )


@dataclass
class _RunningProcess:
    """A process of a service, from the command to start it until it was reaped."""

    number: int
    spec: ProcessSpec
    process: LocalProcess
    ports: ServicePorts
    head: str
    """HOST:PORT at which other nodes join the engine."""
    server: ServerClient
    """Client of the engine whose head this process is."""


class ServiceProcesses:
    """Starts, watches and ends processes of engines on this node; reports to the master."""

    def __init__(
        self,
        machine: ServiceMachine,
        send: Callable[[WireMessage], None],
        make_command: MakeCommand | None = None,
        kill_seconds: float = KILL_SECONDS,
    ) -> None:
        """Create a node without processes.

        Args:
            machine: properties that the processes share.
            send: queues a message to the master; it is dropped without a session.
            make_command: returns program and arguments of a process; None for this Python.
            kill_seconds: time beyond that for running requests after which a process is killed.
        """
        self._machine = machine
        self._send = send
        self._make_command = make_command
        self._kill_seconds = kill_seconds
        self._processes: dict[int, _RunningProcess] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def living(self) -> list[int]:
        """Numbers of the processes that run and are not ending."""
        processes = self._processes.items()
        return [number for number, running in processes if not running.process.is_ending]

    def start(self, command: StartServiceProcess) -> None:
        """Start a process as the master commands; its start and its exit are reported to it."""
        number, machine = command.process, self._machine
        try:
            has_members = len(command.degrees) > 1
            ports = ServicePorts() if command.node_rank else self._choose_ports(has_members)
            head = command.head or format_host_port(machine.address, ports.head or 1)
            spec = make_service_spec(machine, command, ports, head)
        except (OSError, ValueError) as error:
            self._send(ServiceProcessExited(number, f"it could not be started: {error}"))
            return
        environment = {key: text for key, text in os.environ.items() if key != KEY_VARIABLE}
        process = LocalProcess(spec, _log_line, self._make_command, environment, self._kill_seconds)
        server = ServerClient(spec.url, command.api_key, PROBE_TIMEOUT_SECONDS, is_own=True)
        running = _RunningProcess(number, spec, process, ports, head, server)
        self._processes[number] = running
        self._spawn(self._run(running))

    def end(self, number: int) -> None:
        """Drain a process and end it; it is killed after a timeout."""
        running = self._processes.get(number)
        if running is None:
            # It has exited, which the master may not know.
            self._send(ServiceProcessExited(number, "it does not run"))
            return
        running.process.end()

    def drain_node(self, number: int, node: str) -> None:
        """Have the engine of a head release a node; a refusal is reported to the master."""
        running = self._processes.get(number)
        if running is None:
            self._send(ServiceNodeKept(number, node, "its head does not run"))
        else:
            self._spawn(self._drain_node(running, node))

    def kill_all_except(self, wanted: list[int]) -> None:
        """Kill all processes that are not listed, and report the listed API servers again.

        Args:
            wanted: numbers of the processes that the master still needs.
        """
        for number, running in self._processes.items():
            if number not in wanted:
                running.process.kill()
            else:
                self._report_start(running)

    async def close(self) -> None:
        """Kill all processes and wait until they have exited."""
        self.kill_all_except([])
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, running: _RunningProcess) -> None:
        """Run a process until it exits."""
        self._report_start(running)
        is_head = running.spec.node_rank == 0
        probing = asyncio.create_task(self._probe(running)) if is_head else None
        cause, _ = await run_to_end(running.process)
        if probing is not None:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        del self._processes[running.number]
        level = logging.INFO if running.process.is_ending else logging.WARNING
        log.log(level, "a process of service %s has ended: %s", running.spec.name, cause)
        self._send(ServiceProcessExited(running.number, cause))

    def _report_start(self, running: _RunningProcess) -> None:
        if running.spec.node_rank == 0:
            self._send(ServiceProcessStarted(running.number, running.head, running.spec.url))

    async def _probe(self, running: _RunningProcess) -> None:
        """Report readings of an engine until cancelled."""
        while True:
            await asyncio.sleep(PROBE_SECONDS)
            reading = await asyncio.to_thread(read_engine, running.server)
            self._send(ServiceReport(running.number, reading))

    async def _drain_node(self, running: _RunningProcess, node: str) -> None:
        if cause := await asyncio.to_thread(request_drain, running.server, node):
            self._send(ServiceNodeKept(running.number, node, cause))

    def _spawn(self, action: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(action)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _choose_ports(self, needs_head: bool) -> ServicePorts:
        """Return free ports of the range for a head. Raises OSError if there are too few."""
        used = {port for running in self._processes.values() for port in running.ports}
        first, last = self._machine.config.service_ports
        free: list[int] = []
        for port in range(first, last + 1):
            if port not in used:
                with suppress(OSError):
                    free.append(probe_port(self._machine.address, port))
            if len(free) == (2 if needs_head else 1):
                return ServicePorts(*free)
        raise OSError(f"too few ports of --service-ports {first}-{last} are free")


def _log_line(service: str, line: str) -> None:
    log.info("%s: %s", service, line)
