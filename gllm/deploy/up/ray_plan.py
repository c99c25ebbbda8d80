"""Processes of a plan in a Ray cluster: a placement group for each engine and for the router.

Ray restarts actors; the router moves the requests of an engine that is lost. Control, activations
and requests never pass through Ray.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from gllm.deploy.ray.bundles import describe_wait, read_machines
from gllm.deploy.ray.manager import LOG_SECONDS, POLL_SECONDS, LaunchError, connect_ray, import_ray
from gllm.deploy.up.ray_actor import ProcessActor, ProcessStatus
from gllm.deploy.up.ray_groups import ProcessTask, RayGroup, make_groups, make_process
from gllm.plan.processes import ROUTER_NAME, LaunchOptions
from gllm.plan.serving_plan import ServingPlan

STATUS_SECONDS = 5.0
"""Time for an actor to answer; one that does not is starting, or lost."""
MIN_END_SECONDS = 15.0
"""Time beyond --shutdown-timeout for a process to end."""
log = logging.getLogger("gllm")


class _PlacedProcess(NamedTuple):
    """An actor and its process."""

    title: str
    actor: Any


@dataclass
class _PlacedGroup:
    """Resources of a group, and the actors that run in them."""

    group: RayGroup
    placement: Any
    processes: list[_PlacedProcess] = field(default_factory=list)
    is_starting: bool = False
    """True for an engine until it is ready for the first time; `start_engine` watches it."""
    is_draining: bool = False


class RayPlan:
    """Actors of a plan.

    Args:
        plan: with a router.
        options: files of every machine.
        address: of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine.
        should_stop: set to end the processes.
        is_scaled: begin with the router alone. Engines are started and ended by the caller, from
            any thread, and the failure of one ends no other process.
        ray: the package; None to import it.
        poll_seconds: interval of the checks of processes and resources.

    Raises:
        LaunchError: the package is not installed.
    """

    def __init__(
        self,
        plan: ServingPlan,
        options: LaunchOptions,
        address: str | None,
        should_stop: threading.Event,
        is_scaled: bool = False,
        ray: Any = None,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        self._plan = plan
        self._options = options
        self._address = address
        self._should_stop = should_stop
        self._ray = import_ray("--on ray") if ray is None else ray
        self._poll_seconds = poll_seconds
        self._is_scaled = is_scaled
        self._groups: dict[str, RayGroup] = {}
        self._tasks: dict[str, list[ProcessTask]] = {}
        self._placed: dict[str, _PlacedGroup] = {}
        """Groups that have resources or wait for them, by name, the router's first."""
        self._shutdown_seconds = 0.0

    def start(self) -> None:
        """Connect, reserve the resources and start all processes.

        Raises:
            LaunchError: Ray cannot be reached.
            PlanError: a flag of the plan is not valid, or the node secret is missing.
        """
        connect_ray(self._ray, self._address)
        host = self._ray.util.get_node_ip_address()
        self._groups = {each.name: each for each in make_groups(self._plan, host)}
        self._tasks = {name: self._make_tasks(each, host) for name, each in self._groups.items()}
        names = [ROUTER_NAME] if self._is_scaled else list(self._groups)
        placed = [self._reserve(self._groups[name]) for name in names]
        for each in placed:
            self._start_group(each)

    @property
    def running_engines(self) -> list[str]:
        """Names of the engines that run, or wait for resources, and shall not end."""
        return [
            name
            for name, each in list(self._placed.items())
            if name != ROUTER_NAME and not each.is_draining
        ]

    def start_engine(self, name: str) -> None:
        """Start an engine that does not run, and wait until it is ready, or all shall end.

        Raises:
            ValueError: there is no such engine, it runs already, or it has ended.
        """
        if name not in self._groups or name == ROUTER_NAME:
            raise ValueError(f"the plan has no engine {name!r}")
        if name in self._placed:
            raise ValueError(f"the engine {name!r} runs already")
        placed = self._reserve(self._groups[name], is_starting=True)
        try:
            self._start_group(placed)
            self._wait_for_engine(placed)
            placed.is_starting = False
        except LaunchError as error:
            if self._should_stop.is_set():
                # `drain` ends it in its turn.
                return
            self._remove(name)
            raise ValueError(f"engine {name} has ended before it was ready: {error}") from error

    def drain_engine(self, name: str) -> None:
        """Let an engine finish its requests, wait for its end, and return its resources to Ray.

        Raises:
            ValueError: no such engine runs.
        """
        placed = self._placed.get(name)
        if placed is None or name == ROUTER_NAME:
            raise ValueError(f"the engine {name!r} does not run")
        self._drain([placed])
        self._remove(name)

    def wait_until_ready(self, on_ready: Callable[[str], None]) -> None:
        """Wait until all processes are ready, and report the URL of the router.

        Returns early if the processes shall end. Raises LaunchError for a process that cannot run.
        """
        while not self._should_stop.is_set():
            statuses = self.poll()
            if all(each is not None and each.is_ready for each in statuses):
                router = statuses[0]
                assert router is not None
                on_ready(router.url)
                return
            self._should_stop.wait(self._poll_seconds)

    def watch(self) -> None:
        """Wait until the processes shall end. Raises LaunchError for one that cannot run."""
        while not self._should_stop.wait(self._poll_seconds):
            self.poll()

    def poll(self) -> list[ProcessStatus | None]:
        """Return the state of each process; None for an actor that starts or is lost.

        With scaling, engines that `start_engine` waits for are left out, and one that cannot run
        any longer is removed, so that it can be started again.

        Raises:
            LaunchError: a process ends whatever is done; the message is the cause.
        """
        statuses = []
        for placed in list(self._placed.values()):
            if placed.is_starting:
                continue
            states = self._read_statuses(placed)
            statuses += states
            if placed.is_draining or not (cause := _find_cause(placed, states)):
                continue
            if not self._is_scaled or placed.group.name == ROUTER_NAME:
                raise LaunchError(cause)
            log.warning("%s", cause)
            self._remove(placed.group.name)
        return statuses

    def drain(self) -> None:
        """End the router, which finishes its requests, then the engines."""
        for is_router in (True, False):
            self._drain(
                [
                    each
                    for each in self._placed.values()
                    if (each.group.name == ROUTER_NAME) is is_router
                ]
            )

    def close(self) -> None:
        """End the actors and return the resources to Ray."""
        if not self._ray.is_initialized():
            return
        for name in list(self._placed):
            self._remove(name)
        self._ray.shutdown()

    def _make_tasks(self, group: RayGroup, host: str) -> list[ProcessTask]:
        """Return the task of each node of a group, and check that it can be run."""
        tasks = [
            ProcessTask(
                self._plan,
                group.name,
                node,
                host,
                self._options.node_secret_file,
                self._options.step_log_folder,
            )
            for node in group.nodes
        ]
        for task in tasks:
            spec = make_process(task, host, host)
            self._shutdown_seconds = max(self._shutdown_seconds, spec.shutdown_seconds)
        return tasks

    def _reserve(self, group: RayGroup, is_starting: bool = False) -> _PlacedGroup:
        strategy = "STRICT_SPREAD" if len(group.bundles) > 1 else "PACK"
        placement = self._ray.util.placement_group(group.bundles, strategy=strategy)
        placed = _PlacedGroup(group, placement, is_starting=is_starting)
        self._placed[group.name] = placed
        return placed

    def _start_group(self, placed: _PlacedGroup) -> None:
        """Start the actors of a group once it has its resources."""
        self._wait_for(placed.placement, placed.group.bundles)
        for index, task in enumerate(self._tasks[placed.group.name]):
            placed.processes.append(self._start_actor(placed, index, task))

    def _wait_for_engine(self, placed: _PlacedGroup) -> None:
        """Wait until an engine is ready or all shall end. Raises LaunchError if it has ended."""
        while not self._should_stop.wait(self._poll_seconds):
            statuses = self._read_statuses(placed)
            if all(each is not None and each.is_ready for each in statuses):
                return
            ended = [each for each in statuses if each is not None and each.has_ended]
            if ended:
                raise LaunchError(ended[0].cause)

    def _drain(self, ending: Sequence[_PlacedGroup]) -> None:
        """Let groups end, and wait for it."""
        for placed in ending:
            placed.is_draining = True
            for process in placed.processes:
                process.actor.drain.remote()
        deadline = time.monotonic() + self._shutdown_seconds + MIN_END_SECONDS
        while time.monotonic() < deadline:
            statuses = [status for each in ending for status in self._read_statuses(each)]
            if all(status is None or status.has_ended for status in statuses):
                break
            time.sleep(self._poll_seconds / 5)

    def _remove(self, name: str) -> None:
        """End the actors of a group and return its resources to Ray."""
        placed = self._placed.pop(name, None)
        if placed is None:
            return
        for process in placed.processes:
            self._ray.kill(process.actor, no_restart=True)
        self._ray.util.remove_placement_group(placed.placement)

    def _wait_for(self, placed: Any, bundles: Sequence[dict[str, float]]) -> None:
        """Wait until Ray has reserved the bundles of a group."""
        next_log = time.monotonic() + LOG_SECONDS
        while not placed.wait(self._poll_seconds):
            if self._should_stop.is_set():
                raise LaunchError("interrupted while Ray was looking for machines")
            if time.monotonic() >= next_log:
                next_log += LOG_SECONDS
                log.warning("%s", describe_wait(bundles, read_machines(self._ray.nodes())))

    def _start_actor(self, placed: _PlacedGroup, index: int, task: ProcessTask) -> _PlacedProcess:
        name, bundle = placed.group.name, placed.group.bundles[index]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placed.placement, placement_group_bundle_index=index
        )
        options = self._ray.remote(ProcessActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=-1,
        )
        title = name if name == ROUTER_NAME else f"engine {name}"
        title += f" rank {index}" if index else ""
        actor = options.remote(msgspec.json.encode(task), placed.placement)
        return _PlacedProcess(title, actor)

    def _read_statuses(self, placed: _PlacedGroup) -> list[ProcessStatus | None]:
        return [self._read_status(each.actor) for each in list(placed.processes)]

    def _read_status(self, actor: Any) -> ProcessStatus | None:
        try:
            answer = self._ray.get(actor.status.remote(), timeout=STATUS_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return None
        return msgspec.json.decode(answer, type=ProcessStatus)


def _find_cause(placed: _PlacedGroup, statuses: Sequence[ProcessStatus | None]) -> str:
    """Return why a group cannot run; empty if it can."""
    for process, status in zip(placed.processes, statuses, strict=True):
        if status is not None and status.is_invalid:
            return f"{process.title}: {status.cause}"
    return ""
