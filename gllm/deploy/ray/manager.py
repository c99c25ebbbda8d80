"""Placement group and actors of an engine in a Ray cluster."""

import logging
import threading
import time
from typing import Any

from gllm.deploy.ray.agent_actor import AgentActor
from gllm.deploy.ray.bundles import (
    RayMachine,
    choose_num_nodes,
    describe_wait,
    find_spare_machines,
    needs_gpus,
    plan_bundles,
    read_machines,
    spare_bundle,
)
from gllm.deploy.ray.launch_spec import LaunchEvent, LaunchSpec
from gllm.options.addresses import format_host_port
from gllm.runtime.messaging.security import check_hub_address

LOG_SECONDS = 5.0
"""Interval of the log lines while Ray looks for machines."""
POLL_SECONDS = 1.0
"""Interval at which the machines of the Ray cluster are compared with those in use."""
AGENT_HTTP_PORT = 8000
"""Preferred port of an agent's /health, /ready and /metrics."""
log = logging.getLogger("gllm")


class LaunchError(RuntimeError):
    """Ray cannot be used, or has no machines; the message says what to change."""


def import_ray(flag: str = "--distributed-executor-backend ray") -> Any:
    """Return the package ray. Raises LaunchError, which names the flag, if it is not installed."""
    try:
        import ray
        import ray.util
        import ray.util.scheduling_strategies
    except ImportError as error:
        raise LaunchError(
            f"{flag} needs the package ray ({error}): run `pip install 'gllm[ray]'` on all "
            "machines, or leave the flag out"
        ) from error
    return ray


def connect_ray(ray: Any, address: str | None, shows_logs: bool = True) -> None:
    """Connect this process to a Ray cluster.

    Args:
        ray: the package.
        address: of the cluster; None for RAY_ADDRESS or the cluster of this machine.
        shows_logs: write the logs of actors to this process's standard error.

    Raises:
        LaunchError: the cluster cannot be reached.
    """
    try:
        ray.init(address=address or "auto", log_to_driver=shows_logs, configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise LaunchError(
            f"Ray cannot be reached: {error}; start it on this machine with `ray start --head`, "
            "or `ray start --address HOST:6379` to join a cluster, or pass --ray-address"
        ) from error


class RayManager:
    """Connection to a Ray cluster that keeps the agents of one engine running.

    Args:
        spec: machines that the engine needs, and the command line of their agents.
        is_ended: set when the head wants no agents any more.
        ray: the package; None to import it.
        poll_seconds: interval of the checks for the bundles while Ray looks for machines.
        log_seconds: interval of the log lines meanwhile.

    Raises:
        LaunchError: the package is not installed.
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
        self._ray = import_ray() if ray is None else ray
        self._poll_seconds = poll_seconds
        self._log_seconds = log_seconds
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
        """Connect, reserve the machines and start their agents.

        Raises:
            LaunchError: Ray cannot be reached, or does not find the machines in time.
        """
        spec = self._spec
        self._connect()
        own_address = self._ray.util.get_node_ip_address()
        self._host = spec.host or own_address
        address = format_host_port(self._host, spec.port)
        try:
            check_hub_address(f"tcp://{address}", spec.has_secret)
        except ValueError as error:
            raise LaunchError(str(error)) from error
        machines = self._machines()
        has_gpus = spec.has_gpus
        if has_gpus is None:
            has_gpus = needs_gpus(machines, self._own_identity)
        num_nodes = spec.num_nodes or choose_num_nodes(len(spec.degrees), machines, has_gpus)
        try:
            self._bundles = plan_bundles(
                spec.degrees, num_nodes, has_gpus, own_address, spec.stages_per_node
            )
        except ValueError as error:
            raise LaunchError(str(error)) from error
        self._reserve()
        gpu_ids = self._reserve_head_gpus() if has_gpus else []
        self._actors += [self._start_agent(index) for index in range(1, num_nodes)]
        return LaunchEvent(num_nodes, self._host, gpu_ids)

    def poll(self) -> None:
        """Log machines that Ray has lost, and start spares on machines that have no agent."""
        machines = self._machines()
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
            self._spares[machine.identity] = self._start_spare(machine, bundle)

    def close(self) -> None:
        """End the agents and return the machines to Ray."""
        if not self._ray.is_initialized():
            return
        for actor in [*self._actors, *self._spares.values()]:
            self._ray.kill(actor, no_restart=True)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)
        self._ray.shutdown()

    def _connect(self) -> None:
        connect_ray(self._ray, self._spec.address, self._spec.log_format == "text")
        self._own_identity = self._ray.get_runtime_context().get_node_id()

    def _machines(self) -> list[RayMachine]:
        return read_machines(self._ray.nodes())

    def _reserve(self) -> None:
        """Create the placement group and wait until Ray has reserved all bundles."""
        self._group = self._ray.util.placement_group(self._bundles, strategy="STRICT_SPREAD")
        begin = time.monotonic()
        next_log = begin + self._log_seconds
        timeout = self._spec.timeout_seconds
        while not self._group.wait(self._poll_seconds):
            if self._is_ended.is_set():
                raise LaunchError("the head has ended while Ray was looking for machines")
            now = time.monotonic()
            text = describe_wait(self._bundles, self._machines())
            if timeout is not None and now - begin > timeout:
                raise LaunchError(f"{text}; gave up after --join-timeout {timeout:g} s")
            if now >= next_log:
                next_log += self._log_seconds
                log.warning("%s", text)

    def _start_agent(self, index: int) -> Any:
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=index
        )
        return self._create_actor(self._bundles[index], strategy, is_spare=False)

    def _start_spare(self, machine: RayMachine, bundle: dict[str, float]) -> Any:
        log.info("Ray has the machine %s, which becomes a spare", machine.address)
        strategy = self._ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            machine.identity, soft=False
        )
        return self._create_actor(bundle, strategy, is_spare=True)

    def _create_actor(self, bundle: dict[str, float], strategy: Any, is_spare: bool) -> Any:
        address = format_host_port(self._host, self._spec.port)
        arguments = ["--join", address, *self._spec.agent_arguments]
        options = self._ray.remote(AgentActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=-1,
        )
        ports = {"--data-port": self._spec.data_port, "--port": AGENT_HTTP_PORT}
        return options.remote(arguments + ["--spare"] * is_spare, ports, self._own_identity)

    def _reserve_head_gpus(self) -> list[str]:
        """Hold the GPUs of the head's bundle and return their numbers."""
        ray = self._ray
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=0
        )
        bundle = self._bundles[0]
        holder = ray.remote(GpuHolder).options(
            num_cpus=bundle["CPU"], num_gpus=bundle["GPU"], scheduling_strategy=strategy
        )
        actor = holder.remote()
        self._actors.append(actor)
        return list(ray.get(actor.gpu_ids.remote()))

    def _used_machines(self) -> set[str]:
        """Return the ids of the machines that have a bundle of the placement group."""
        table = self._ray.util.placement_group_table(self._group)
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
    """Actor that holds the GPUs of the head's machine, whose workers Ray does not start."""

    def gpu_ids(self) -> list[str]:
        """Return the numbers of the GPUs that Ray has reserved."""
        return [str(number) for number in import_ray().get_gpu_ids()]
