"""Processes of a plan in a Ray cluster: a placement group for each engine and for the router.

Ray restarts actors; the router moves the requests of an engine that is lost. Control, activations
and requests never pass through Ray. With a router that scales, the resources of an engine are
reserved only while the router wants the engine, so that Ray's autoscaler follows too.
"""

import asyncio
import signal
import time
from typing import Any, NamedTuple

import msgspec

from gllm.deploy.logged_process import python_command
from gllm.deploy.ray.actors import ChildActor
from gllm.deploy.ray.bundles import NODE_SHARE
from gllm.deploy.ray.ray_cluster import RayCluster
from gllm.deploy.server_client import ReadinessProbe, ServerClient
from gllm.options.addresses import format_host_port
from gllm.options.exit_status import INVALID_STATUS
from gllm.plan.emit.registry import replace_flags, with_hosts
from gllm.plan.processes import (
    LaunchOptions,
    ProcessSpec,
    commands_for,
    engine_ports,
    find_flag,
    scaling_router_url,
)
from gllm.plan.serving_plan import ROUTER_NAME, EnginePlan, PlanError, ServingPlan

STATUS_SECONDS = 5.0
"""Time for an actor to answer; one that does not is starting, or lost."""
MIN_END_SECONDS = 15.0
"""Time beyond --shutdown-timeout for a process to end."""
ACTOR_PROBE_SECONDS = 1.0


class RayGroup(NamedTuple):
    """Placement group in Ray for the router or for one engine, with its resources."""

    name: str
    """Name of the engine, or ROUTER_NAME."""
    nodes: list[str]
    """Names of its nodes in the plan; each has a bundle on a machine of its own."""
    bundles: list[dict[str, float]]
    """Resources of each node."""


class ProcessTask(msgspec.Struct, frozen=True):
    """Arguments of a Ray actor: a serving plan, and the router or engine node of it to run."""

    plan: ServingPlan
    name: str
    """Name of the engine, or ROUTER_NAME."""
    node: str
    """Name of the node in the plan."""
    router_host: str
    """Address of the router's machine."""
    node_secret_file: str | None = None
    step_log_folder: str | None = None


def make_groups(plan: ServingPlan, router_address: str) -> list[RayGroup]:
    """Return the placement groups of a plan's router and engines, that of the router first.

    A worker takes a GPU, or as many CPUs as it has threads; a process with GPUs takes a CPU.

    Args:
        plan: plan with a router.
        router_address: IP address in Ray of the machine for the router.

    Raises:
        PlanError: the plan has no router.
    """
    if plan.router is None:
        raise PlanError("router: missing: with --on ray engines are reached by a router: add one")
    place = {"CPU": 1.0, f"node:{router_address}": NODE_SHARE}
    groups = [RayGroup(ROUTER_NAME, [plan.router.node], [place])]
    for name, engine in plan.engines.items():
        bundles = [_bundle(engine, node) for node in engine.nodes]
        groups.append(RayGroup(name, engine.nodes, bundles))
    return groups


def make_process_spec(task: ProcessTask, own_host: str, head_host: str) -> ProcessSpec:
    """Return the command line of a router or engine process on the machines that Ray chose.

    Args:
        task: router or engine of the plan, and one of its nodes.
        own_host: address of this machine.
        head_host: address of the machine with the head (rank 0) of the engine.

    Raises:
        PlanError: a flag of the plan is not valid, or a node secret is missing.
    """
    plan = task.plan
    assert plan.router is not None
    hosts = dict.fromkeys(plan.nodes, task.router_host)
    if task.name != ROUTER_NAME:
        hosts |= {plan.engines[task.name].nodes[0]: head_host, task.node: own_host}
    # The router may be on the node of an engine in the plan, and elsewhere in Ray.
    plan = with_hosts(_with_own_router(plan, task.router_host), hosts)
    node = plan.router.node if task.name == ROUTER_NAME and plan.router else task.node
    options = LaunchOptions(task.node_secret_file, None, task.step_log_folder)
    specs = commands_for(plan, node, options)
    is_router = task.name == ROUTER_NAME
    spec = next(spec for spec in specs if spec.is_router == is_router and spec.name == task.name)
    if not any(text.startswith("--kv-transfer=") for text in spec.arguments):
        return spec
    # Engines of one node of the plan may be on several machines.
    address = format_host_port(own_host, engine_ports(plan, task.name, task.node).kv)
    arguments = replace_flags(spec.arguments, {"--kv-transfer-address": address})
    return msgspec.structs.replace(spec, arguments=arguments)


def _with_own_router(plan: ServingPlan, router_host: str) -> ServingPlan:
    """Return a plan whose router has a node of its own."""
    assert plan.router is not None
    own = "router-in-ray"
    node = msgspec.structs.replace(plan.nodes[plan.router.node], host=router_host)
    nodes = {**plan.nodes, own: node}
    router = msgspec.structs.replace(plan.router, node=own)
    return msgspec.structs.replace(plan, nodes=nodes, router=router)


def _bundle(engine: EnginePlan, node: str) -> dict[str, float]:
    stages = engine.stages_of(node)
    num_workers = float(sum(stage.num_ranks for stage in stages))
    if stages[0].devices:
        return {"CPU": 1.0, "GPU": num_workers}
    return {"CPU": num_workers * float(find_flag(engine.flags, "threads") or 1)}


class ProcessStatus(msgspec.Struct, frozen=True):
    """State of the process that a Ray actor runs: ready, ended, or impossible to run."""

    is_ready: bool
    has_ended: bool
    is_invalid: bool
    """True if a restart cannot help: the command line or the model is invalid."""
    cause: str = ""
    """Cause of its end."""


class ProcessActor(ChildActor):
    """Ray actor that runs a router, or one node of an engine, as a child process.

    Args:
        task: `ProcessTask` as JSON.
        group: placement group of the engine, whose first bundle has the head.
    """

    def __init__(self, task: bytes, group: Any) -> None:
        # Here and not in the launcher: Ray may have moved the actor to another machine.
        import ray

        own = ray.util.get_node_ip_address()
        spec = make_process_spec(
            msgspec.json.decode(task, type=ProcessTask), own, find_head(ray, group) or own
        )
        server = ServerClient(
            spec.url, None, ACTOR_PROBE_SECONDS, is_own=True, certificate=spec.certificate
        )
        self._probe = ReadinessProbe(server, spec.title)
        self.start(spec.name, python_command(spec))

    def status(self) -> bytes:
        """Return the `ProcessStatus` of the process as JSON."""
        has_ended = bool(self._cause)
        status = ProcessStatus(
            not has_ended and self._probe.is_ready(),
            has_ended,
            has_ended and self._child.status == INVALID_STATUS,
            self._cause,
        )
        return msgspec.json.encode(status)

    def drain(self) -> None:
        """Drain the process and let it exit; the actor stays to report the exit."""
        self._child.send(signal.SIGTERM)


def find_head(ray: Any, group: Any) -> str | None:
    """Return the address of the machine with a placement group's first bundle; None if unplaced."""
    identity = ray.util.placement_group_table(group)["bundles_to_node_id"].get(0)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return addresses.get(identity)


class RayProcess:
    """The router or an engine of a serving plan, run by Ray actors; implements `RunningProcess`.

    Args:
        cluster: connection to Ray.
        group: resources of the processes.
        tasks: arguments of each actor.
        shutdown_seconds: drain timeout, after which the processes are killed.
        is_scaled: True to treat the exit of a process before all are ready as a failure, which
            releases the resources; False to let Ray restart the process.
    """

    def __init__(
        self,
        cluster: RayCluster,
        group: RayGroup,
        tasks: list[ProcessTask],
        shutdown_seconds: float,
        is_scaled: bool = False,
    ) -> None:
        self.is_ending = False
        self.has_failed = False
        self._cluster = cluster
        self._group = group
        self._tasks = tasks
        self._shutdown_seconds = shutdown_seconds
        self._may_restart = not is_scaled
        self._deadline = 0.0
        """Time at which processes that do not end by themselves are killed."""
        self._placement: Any = None
        self._actors: list[Any] = []
        self._statuses: list[ProcessStatus | None] = []
        """State of each process; None for an actor that starts or is lost."""

    async def run(self) -> str:
        """Start the actors, wait until their processes have ended and return the cause.

        Ray restarts a process that exits, unless its command line or model is invalid: a failure.
        """
        try:
            return await self._run()
        finally:
            await asyncio.to_thread(self._cluster.release, self._actors, self._placement)

    async def is_ready(self) -> bool:
        """Return True if all processes are ready."""
        is_ready = bool(self._statuses) and all(
            status is not None and status.is_ready for status in self._statuses
        )
        self._may_restart = self._may_restart or is_ready
        return is_ready

    def end(self) -> None:
        """Drain the processes and end them; they are killed after a timeout."""
        if not self.is_ending:
            self.is_ending = True
            self._deadline = time.monotonic() + self._shutdown_seconds + MIN_END_SECONDS
            for actor in self._actors:
                actor.drain.remote()

    def kill(self) -> None:
        """Kill the processes."""
        self.is_ending, self._deadline = True, 0.0

    async def _run(self) -> str:
        bundles = self._group.bundles
        self._placement = await asyncio.to_thread(self._cluster.reserve, bundles)
        looks = self._cluster.wait(self._placement, bundles)
        while await asyncio.to_thread(next, looks, None) is not None:
            if self.is_ending:
                break
        if self.is_ending:
            return "it has ended before Ray had its resources"
        for index, task in enumerate(self._tasks):
            place = self._placement, index
            arguments = msgspec.json.encode(task), self._placement
            self._actors.append(
                self._cluster.start_actor(
                    ProcessActor, bundles[index], place, *arguments, max_restarts=-1
                )
            )
        while not (cause := await asyncio.to_thread(self._look)):
            await asyncio.sleep(self._cluster.poll_seconds / (5 if self.is_ending else 1))
        return cause

    def _look(self) -> str:
        """Read the states of the processes; return why they have ended, empty while they run."""
        self._statuses = [self._read_status(actor) for actor in self._actors]
        if self.is_ending:
            have_ended = all(status is None or status.has_ended for status in self._statuses)
            is_over = have_ended or time.monotonic() >= self._deadline
            return "it was drained" if is_over else ""
        for rank, status in enumerate(self._statuses):
            if status is None or not status.has_ended:
                continue
            if status.is_invalid or not self._may_restart:
                self.has_failed = True
                return (f"rank {rank}: " if rank else "") + status.cause
        return ""

    def _read_status(self, actor: Any) -> ProcessStatus | None:
        ray = self._cluster.ray
        try:
            answer = ray.get(actor.status.remote(), timeout=STATUS_SECONDS)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            return None
        return msgspec.json.decode(answer, type=ProcessStatus)


class RayPlan:
    """Serving plan in a Ray cluster: engines run where Ray places them, the router on this machine.

    Args:
        plan: plan with a router.
        options: paths of the node secret and the step logs on every machine.
        cluster: connection to Ray.

    Raises:
        PlanError: a flag of the plan is not valid, or the router or the node secret is missing.
    """

    def __init__(self, plan: ServingPlan, options: LaunchOptions, cluster: RayCluster) -> None:
        self._cluster = cluster
        self._is_scaled = bool(scaling_router_url(plan))
        host = cluster.own_address
        self._groups = {group.name: group for group in make_groups(plan, host)}
        self._tasks = {
            name: [
                ProcessTask(
                    plan, name, node, host, options.node_secret_file, options.step_log_folder
                )
                for node in group.nodes
            ]
            for name, group in self._groups.items()
        }
        self.specs: list[ProcessSpec] = []
        """The router and the head of each engine; URLs of engines are those on this machine."""
        for tasks in self._tasks.values():
            head, *_ = [make_process_spec(task, host, host) for task in tasks]
            self.specs.append(head)

    def launch(self, spec: ProcessSpec) -> RayProcess:
        """Return the router or an engine as Ray actors that have not started."""
        group, tasks = self._groups[spec.name], self._tasks[spec.name]
        is_scaled = self._is_scaled and not spec.is_router
        return RayProcess(self._cluster, group, tasks, spec.shutdown_seconds, is_scaled)
