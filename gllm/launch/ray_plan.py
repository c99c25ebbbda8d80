"""Processes of a plan in a Ray cluster: a placement group for each engine and for the router.

Ray restarts actors; the router moves the requests of an engine that is lost. Control, activations
and requests never pass through Ray.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from gllm.launch.ray_actor import ProcessActor, ProcessStatus
from gllm.launch.ray_groups import ProcessTask, RayGroup, make_groups, make_process
from gllm.plan.processes import ROUTER_NAME, LaunchOptions
from gllm.plan.serving_plan import ServingPlan
from gllm.ray.bundles import describe_wait, read_machines
from gllm.ray.manager import LOG_SECONDS, POLL_SECONDS, LaunchError, connect_ray, import_ray

STATUS_SECONDS = 5.0
"""Time for an actor to answer; one that does not is starting, or lost."""
MIN_END_SECONDS = 15.0
"""Time beyond --shutdown-timeout for a process to end."""
log = logging.getLogger("gllm")


class _PlacedProcess(NamedTuple):
    """An actor and its process."""

    group: str
    title: str
    actor: Any


class RayPlan:
    """Actors of a plan.

    Args:
        plan: with a router.
        options: files of every machine.
        address: of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine.
        should_stop: set to end the processes.
    """

    def __init__(
        self,
        plan: ServingPlan,
        options: LaunchOptions,
        address: str | None,
        should_stop: threading.Event,
    ) -> None:
        self._plan = plan
        self._options = options
        self._address = address
        self._should_stop = should_stop
        self._ray = import_ray("--on ray")
        self._groups: list[Any] = []
        self._processes: list[_PlacedProcess] = []
        self._shutdown_seconds = 0.0

    def start(self) -> None:
        """Connect, reserve the resources and start all processes.

        Raises:
            LaunchError: Ray cannot be reached.
            PlanError: a flag of the plan is not valid, or the node secret is missing.
        """
        connect_ray(self._ray, self._address)
        host = self._ray.util.get_node_ip_address()
        groups = make_groups(self._plan, host)
        tasks = {group.name: self._make_tasks(group, host) for group in groups}
        for group in groups:
            self._reserve(group)
        for group, placed in zip(groups, self._groups, strict=True):
            self._wait_for(placed, group.bundles)
            for index, task in enumerate(tasks[group.name]):
                self._processes.append(self._start_actor(group, placed, index, task))

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
            self._should_stop.wait(POLL_SECONDS)

    def watch(self) -> None:
        """Wait until the processes shall end. Raises LaunchError for one that cannot run."""
        while not self._should_stop.wait(POLL_SECONDS):
            self.poll()

    def poll(self) -> list[ProcessStatus | None]:
        """Return the state of each process; None for an actor that starts or is lost.

        Raises:
            LaunchError: a process ends whatever is done; the message is the cause.
        """
        statuses = [self._read_status(each.actor) for each in self._processes]
        for process, status in zip(self._processes, statuses, strict=True):
            if status is not None and status.is_invalid:
                raise LaunchError(f"{process.title}: {status.cause}")
        return statuses

    def drain(self) -> None:
        """End the router, which finishes its requests, then the engines."""
        for is_router in (True, False):
            ending = [each for each in self._processes if (each.group == ROUTER_NAME) is is_router]
            for process in ending:
                process.actor.drain.remote()
            deadline = time.monotonic() + self._shutdown_seconds + MIN_END_SECONDS
            while time.monotonic() < deadline:
                statuses = [self._read_status(each.actor) for each in ending]
                if all(status is None or status.has_ended for status in statuses):
                    break
                time.sleep(POLL_SECONDS / 5)

    def close(self) -> None:
        """End the actors and return the resources to Ray."""
        if not self._ray.is_initialized():
            return
        for process in self._processes:
            self._ray.kill(process.actor, no_restart=True)
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
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

    def _reserve(self, group: RayGroup) -> None:
        strategy = "STRICT_SPREAD" if len(group.bundles) > 1 else "PACK"
        self._groups.append(self._ray.util.placement_group(group.bundles, strategy=strategy))

    def _wait_for(self, placed: Any, bundles: Sequence[dict[str, float]]) -> None:
        """Wait until Ray has reserved the bundles of a group."""
        next_log = time.monotonic() + LOG_SECONDS
        while not placed.wait(POLL_SECONDS):
            if self._should_stop.is_set():
                raise LaunchError("interrupted while Ray was looking for machines")
            if time.monotonic() >= next_log:
                next_log += LOG_SECONDS
                log.warning("%s", describe_wait(bundles, read_machines(self._ray.nodes())))

    def _start_actor(
        self, group: RayGroup, placed: Any, index: int, task: ProcessTask
    ) -> _PlacedProcess:
        bundle = group.bundles[index]
        strategy = self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            placed, placement_group_bundle_index=index
        )
        options = self._ray.remote(ProcessActor).options(
            num_cpus=bundle["CPU"],
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=strategy,
            max_restarts=-1,
        )
        title = group.name if group.name == ROUTER_NAME else f"engine {group.name}"
        title += f" rank {index}" if index else ""
        actor = options.remote(msgspec.json.encode(task), placed)
        return _PlacedProcess(group.name, title, actor)

    def _read_status(self, actor: Any) -> ProcessStatus | None:
        try:
            answer = self._ray.get(actor.status.remote(), timeout=STATUS_SECONDS)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError):
            return None
        return msgspec.json.decode(answer, type=ProcessStatus)


def run_plan(
    plan: ServingPlan,
    options: LaunchOptions,
    address: str | None,
    on_ready: Callable[[str], None],
) -> None:
    """Run a plan in a Ray cluster until SIGTERM or SIGINT.

    Args:
        plan: with a router.
        options: files of every machine.
        address: of the Ray cluster; None for RAY_ADDRESS or the cluster of this machine.
        on_ready: receives the URL of the router once all processes are ready.

    Raises:
        LaunchError: Ray cannot be used, or a process cannot run.
        PlanError: the plan cannot be run.
    """
    should_stop = threading.Event()
    ray_plan = RayPlan(plan, options, address, should_stop)
    try:
        _stop_on_signals(should_stop)
        ray_plan.start()
        # Ray has set handlers of its own.
        _stop_on_signals(should_stop)
        ray_plan.wait_until_ready(on_ready)
        ray_plan.watch()
        ray_plan.drain()
    finally:
        ray_plan.close()


def _stop_on_signals(should_stop: threading.Event) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: should_stop.set())
