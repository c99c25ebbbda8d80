"""Processes of a plan in a Ray cluster: a placement group for each engine and for the router.

Ray restarts actors; the router moves the requests of an engine that is lost. Control, activations
and requests never pass through Ray. With a router that scales, the resources of an engine are
reserved only while the router wants the engine, so that Ray's autoscaler follows too.
"""

import asyncio
import time
from typing import Any

import msgspec

from gllm.deploy.ray.plan_groups import ProcessTask, RayGroup, make_groups, make_process
from gllm.deploy.ray.process_actor import ProcessActor, ProcessStatus
from gllm.deploy.ray.ray_cluster import RayCluster
from gllm.plan.processes import LaunchOptions, ProcessSpec
from gllm.plan.serving_plan import ServingPlan

STATUS_SECONDS = 5.0
"""Time for an actor to answer; one that does not is starting, or lost."""
MIN_END_SECONDS = 15.0
"""Time beyond --shutdown-timeout for a process to end."""


class RayProcess:
    """The router, or all processes of an engine, as actors. Implements `PlanProcess`.

    Args:
        cluster: the connection.
        group: resources of the processes.
        tasks: of each actor.
        shutdown_seconds: time for running requests.
    """

    def __init__(
        self,
        cluster: RayCluster,
        group: RayGroup,
        tasks: list[ProcessTask],
        shutdown_seconds: float,
    ) -> None:
        self.is_ending = False
        self.has_failed = False
        self._cluster = cluster
        self._group = group
        self._tasks = tasks
        self._shutdown_seconds = shutdown_seconds
        self._deadline = 0.0
        """Time at which processes that shall end are killed."""
        self._placement: Any = None
        self._actors: list[Any] = []
        self._statuses: list[ProcessStatus | None] = []
        """State of each process; None for an actor that starts or is lost."""

    async def run(self) -> str:
        """Start the processes, wait for their end and return the cause.

        A process that cannot run whatever is done is a failure; Ray restarts all others.
        """
        try:
            return await self._run()
        finally:
            await asyncio.to_thread(self._cluster.release, self._actors, self._placement)

    async def is_ready(self) -> bool:
        """Return True if all processes are ready."""
        return bool(self._statuses) and all(
            status is not None and status.is_ready for status in self._statuses
        )

    def end(self) -> None:
        """Let the processes finish their requests and end; they are killed if they do not."""
        if not self.is_ending:
            self.is_ending = True
            self._deadline = time.monotonic() + self._shutdown_seconds + MIN_END_SECONDS
            for actor in self._actors:
                actor.drain.remote()

    def kill(self) -> None:
        """End the processes at once."""
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
            if status is not None and status.is_invalid:
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
    """A plan whose router is on this machine, and whose engines are where Ray places them.

    Args:
        plan: with a router.
        options: files of every machine.
        cluster: connected.

    Raises:
        PlanError: a flag of the plan is not valid, or the router or the node secret is missing.
    """

    def __init__(self, plan: ServingPlan, options: LaunchOptions, cluster: RayCluster) -> None:
        self._cluster = cluster
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
            head, *_ = [make_process(task, host, host) for task in tasks]
            self.specs.append(head)

    def launch(self, spec: ProcessSpec) -> RayProcess:
        """Return the processes of an engine, or the router, which have not started."""
        group, tasks = self._groups[spec.name], self._tasks[spec.name]
        return RayProcess(self._cluster, group, tasks, spec.shutdown_seconds)
