"""Placement group and actors of an engine in a Ray cluster."""

import logging
import threading
import time
from typing import Any

import msgspec

from gllm.deploy.ray.actors import AgentActor
from gllm.deploy.ray.bundles import (
    RayMachine,
    choose_num_nodes,
    find_spare_machines,
    has_gpus_on,
    plan_bundles,
    spare_bundle,
)
from gllm.deploy.ray.ray_cluster import (
    LOG_SECONDS,
    POLL_SECONDS,
    LaunchError,
    RayCluster,
    RayUnavailableError,
    import_ray,
)
from gllm.options.addresses import format_host_port
from gllm.runtime.messaging.security import check_hub_address

AGENT_HTTP_PORT = 8000
"""Preferred port of an agent's /health, /ready and /metrics."""
log = logging.getLogger("gllm")


class LaunchSpec(msgspec.Struct, frozen=True):
    """Machines to reserve in a Ray cluster for an engine, and arguments of `gllm node` on them."""

    address: str | None
    """Address of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine."""
    degrees: list[int]
    """Workers of each pipeline stage."""
    num_nodes: int | None
    """Machines of the engine, the head included; None to use what the Ray cluster has."""
    has_gpus: bool | None
    """True if a worker needs a GPU; None if it does where the Ray cluster has GPUs."""
    num_spares: int
    """Further machines of the Ray cluster on which an agent waits as a spare."""
    host: str | None
    """Host by which the agents reach the head; None for this machine's address in Ray."""
    port: int
    """Port of the head's hub."""
    has_secret: bool
    """True if the machines have a node secret, which hosts off loopback need."""
    agent_arguments: list[str]
    """Arguments of `gllm node` on all machines, besides the head's address, name and ports. The
    secret is not among them: each machine reads its own file."""
    data_port: int
    """Preferred port of activations on each machine; 0 for none."""
    timeout_seconds: float | None
    """Time within which Ray has to find the machines; None for any time."""
    log_level: str
    log_format: str
    stages_per_node: list[int] = []
    """Stages of each machine; empty for about the same number of workers on each."""


class LaunchEvent(msgspec.Struct, frozen=True):
    """Message of the Ray launcher to the engine: machines are reserved, or the error."""

    num_nodes: int = 0
    """Machines of the engine, the head included."""
    host: str = ""
    """Host by which the agents reach the head."""
    gpu_ids: list[str] = []
    """GPUs of this machine that Ray has reserved for the head's workers."""
    error: str = ""
    """The launcher has ended for this reason; empty if Ray has found the machines."""
    may_pass: bool = False
    """True if another start may succeed without a change, because Ray or machines may come."""


class RayAgents:
    """The `gllm node` processes (agents) of one engine in a Ray cluster, and their placement group.

    Args:
        spec: machines that the engine needs, and arguments of `gllm node`.
        is_ended: set when the engine has ended, so that waiting for resources stops.
        ray: the module ray; None to import it.
        poll_seconds: interval of checks while Ray has not reserved the machines.
        log_seconds: interval of log lines during that time.

    Raises:
        LaunchError: ray is not installed.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        is_ended: threading.Event,
        ray: Any = None,
        poll_seconds: float = POLL_SECONDS,
        log_seconds: float = LOG_SECONDS,
    ) -> None:
        self._spec = spec
        self._is_ended = is_ended
        ray = import_ray() if ray is None else ray
        self._cluster = RayCluster(ray, poll_seconds, log_seconds)
        self._group: Any = None
        self._actors: list[Any] = []
        """Actors of the placement group: those of the machines, and that of the head's GPUs."""
        self._spares: dict[str, Any] = {}
        """Actors of spares by machine."""
        self._bundles: list[dict[str, float]] = []
        self._own_identity = ""
        self._host = ""
        self._watched: set[str] = set()
        """Machines with an agent at the last call of `poll`."""

    def start(self) -> LaunchEvent:
        """Connect to Ray, reserve machines and start their agents.

        Raises:
            LaunchError: Ray cannot be reached, or does not find the machines in time.
        """
        spec = self._spec
        self._cluster.connect(spec.address, spec.log_format == "text")
        self._own_identity = self._cluster.ray.get_runtime_context().get_node_id()
        own_address = self._cluster.own_address
        self._host = spec.host or own_address
        address = format_host_port(self._host, spec.port)
        try:
            check_hub_address(f"tcp://{address}", spec.has_secret)
        except ValueError as error:
            raise LaunchError(str(error)) from error
        machines = self._cluster.machines()
        has_gpus = spec.has_gpus
        if has_gpus is None:
            has_gpus = has_gpus_on(machines, self._own_identity)
        num_nodes = spec.num_nodes or choose_num_nodes(len(spec.degrees), machines, has_gpus)
        try:
            self._bundles = plan_bundles(
                spec.degrees, num_nodes, has_gpus, own_address, spec.stages_per_node
            )
        except ValueError as error:
            raise LaunchError(str(error)) from error
        self._reserve()
        gpu_ids = self._reserve_head_gpus() if has_gpus else []
        self._actors += [
            self._start_agent(self._bundles[index], (self._group, index))
            for index in range(1, num_nodes)
        ]
        return LaunchEvent(num_nodes, self._host, gpu_ids)

    def poll(self) -> None:
        """Log lost machines, and start spare agents on free machines up to the wanted number."""
        machines = self._cluster.machines()
        self._report_changes(machines)
        dead = {machine.identity for machine in machines if not machine.is_alive}
        for identity in self._spares.keys() & dead:
            # An actor that is bound to a machine cannot be restarted elsewhere.
            del self._spares[identity]
        num_missing = self._spec.num_spares - len(self._spares)
        if num_missing <= 0:
            return
        used = {*self._used_machines(), self._own_identity, *self._spares}
        bundle = spare_bundle(self._bundles)
        for machine in find_spare_machines(machines, used, bundle, num_missing):
            log.info("Ray has the machine %s, which becomes a spare", machine.address)
            self._spares[machine.identity] = self._start_agent(bundle, machine.identity)

    def close(self) -> None:
        """End the agents and release the machines."""
        if self._cluster.ray.is_initialized():
            self._cluster.release([*self._actors, *self._spares.values()], self._group)
            self._cluster.close()

    def _reserve(self) -> None:
        """Create the placement group and wait until Ray has reserved all bundles."""
        self._group = self._cluster.reserve(self._bundles)
        begin = time.monotonic()
        timeout = self._spec.timeout_seconds
        for text in self._cluster.wait(self._group, self._bundles):
            if self._is_ended.is_set():
                raise LaunchError("the head has ended while Ray was looking for machines")
            if timeout is not None and time.monotonic() - begin > timeout:
                raise RayUnavailableError(f"{text}; gave up after --join-timeout {timeout:g} s")

    def _start_agent(self, bundle: dict[str, float], place: tuple[Any, int] | str) -> Any:
        """Start the agent of a machine: one of the placement group, or a spare by its id."""
        address = format_host_port(self._host, self._spec.port)
        arguments = ["--join", address, *self._spec.agent_arguments]
        arguments += ["--spare"] if isinstance(place, str) else []
        ports = {"--data-port": self._spec.data_port, "--port": AGENT_HTTP_PORT}
        identity = self._own_identity
        return self._cluster.start_actor(
            AgentActor, bundle, place, arguments, ports, identity, max_restarts=-1
        )

    def _reserve_head_gpus(self) -> list[str]:
        """Hold the GPUs of the head's bundle and return their numbers."""
        actor = self._cluster.start_actor(GpuHolder, self._bundles[0], (self._group, 0))
        self._actors.append(actor)
        return list(self._cluster.ray.get(actor.gpu_ids.remote()))

    def _used_machines(self) -> set[str]:
        """Return the ids of the machines that have a bundle of the placement group."""
        table = self._cluster.ray.util.placement_group_table(self._group)
        return {identity for identity in table["bundles_to_node_id"].values() if identity}

    def _report_changes(self, machines: list[RayMachine]) -> None:
        """Log which machines with an agent Ray has lost since the last call."""
        alive = {machine.identity for machine in machines if machine.is_alive}
        addresses = {machine.identity: machine.address for machine in machines}
        for identity in self._watched - alive:
            log.warning(
                "Ray has lost the machine %s and looks for another one",
                addresses.get(identity, identity),
            )
        self._watched = alive & ({*self._used_machines(), *self._spares} - {self._own_identity})


class GpuHolder:
    """Ray actor that reserves the GPUs of the head's machine for the engine's own workers."""

    def gpu_ids(self) -> list[str]:
        """Return the numbers of the reserved GPUs."""
        return [str(number) for number in import_ray().get_gpu_ids()]
