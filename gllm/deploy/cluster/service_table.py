"""Services of a cluster: their lifecycle, and the processes that run them on the nodes.

Pure: times are arguments, and commands to nodes are queued in `commands`, which the master sends.
A node runs processes of one service at a time.
"""

from collections.abc import Collection

from gllm.deploy.cluster.selection import NodeSelection
from gllm.deploy.cluster.service import (
    RUNNING_STATES,
    Service,
    ServiceMeter,
    ServiceProcess,
    ServiceRequest,
    ServiceState,
)
from gllm.deploy.lifecycle import next_to_end
from gllm.messages.base import WireMessage
from gllm.messages.services import (
    DrainServiceNode,
    EndServiceProcess,
    ServiceReading,
    StartServiceProcess,
)
from gllm.recovery.backoff import backoff_seconds

MAX_RESTARTS = 3
"""Restarts of a process that is not its engine's head, until the engine goes on without it."""
RESTART_SECONDS = 1.0
"""Time between the first exit of such a process and its restart; it doubles from then on."""


class ServiceTable:
    """State of all deployed engines (services) and their processes, without I/O."""

    def __init__(self, return_seconds: float, shutdown_seconds: float = 30.0) -> None:
        """Create a table without services.

        Args:
            return_seconds: time in seconds for which the processes of a lost node are awaited.
            shutdown_seconds: time for the running requests of a service that is ended.
        """
        self.services: dict[str, Service] = {}
        self.commands: list[tuple[str, WireMessage]] = []
        """Commands to nodes by name, in order; the owner of the table sends and removes them."""
        self.draining: set[str] = set()
        """Nodes that leave and get no further processes."""
        self._processes: dict[int, ServiceProcess] = {}
        self._drain_deadlines: dict[str, float] = {}
        """Time until which an engine may let a node leave while it serves, by node."""
        self._lost: dict[str, float] = {}
        """Time of the loss, by node."""
        self._next_number = 1
        self._return_seconds = return_seconds
        self._shutdown_seconds = shutdown_seconds

    @property
    def busy_nodes(self) -> dict[str, str]:
        """Name of the service of each node that has a process, running or ending."""
        return {process.node: process.service for process in self._processes.values()}

    def node_of(self, number: int) -> str | None:
        """Return the node of a process; None if the process has exited or is unknown."""
        process = self._processes.get(number)
        return None if process is None else process.node

    @property
    def processes(self) -> list[ServiceProcess]:
        """Processes that have not exited; the caller must not change them."""
        return list(self._processes.values())

    def deploy(self, request: ServiceRequest, selection: NodeSelection, api_key: str) -> Service:
        """Add a service and start its head. The name and the nodes must be free.

        Args:
            request: name, model and parameters of the service.
            selection: nodes of the service.
            api_key: key that its HTTP API requires.
        """
        service = self.services[request.name] = Service(request, api_key, selection)
        self._start(service)
        return service

    def resume(self, name: str, selection: NodeSelection) -> None:
        """Restart a service on other nodes, after its processes have exited."""
        service = self.services[name]
        service.selection, service.state, service.cause = selection, ServiceState.STARTING, ""
        service.meter, service.ready_at, service.left_nodes = ServiceMeter(), None, set()
        self._start(service)

    def fail(self, name: str, cause: str) -> None:
        """Mark a service as failed and end its processes."""
        service = self.services[name]
        service.state, service.cause = ServiceState.FAILED, cause
        self._end_processes(service)

    def delete(self, name: str) -> bool:
        """Drain and end a service; return False if there is none of that name.

        It is removed once its processes have exited, or at once without any.
        """
        service = self.services.get(name)
        if service is None:
            return False
        service.state, service.cause = ServiceState.STOPPING, ""
        self._end_processes(service)
        self._remove_if_ended(service)
        return True

    def drain_node(self, name: str, now: float) -> None:
        """Move the service of a node to other nodes, so that the node can leave the cluster.

        If possible, the engine moves the node's layers to its other nodes while it serves requests.
        Otherwise, as for the node of its head, the service starts again on other nodes.

        Args:
            name: name of the node.
            now: time in seconds.
        """
        self.draining.add(name)
        for process in self._processes_on(name):
            service = self.services[process.service]
            heads = [other for other in self._processes_of(service) if other.rank == 0]
            if process.rank and heads and service.state is ServiceState.READY:
                command = DrainServiceNode(heads[0].number, name)
                self.commands.append((heads[0].node, command))
                self._drain_deadlines.setdefault(name, now + self._return_seconds)
            else:
                self._move(service, name)

    def on_release_refused(self, number: int, node: str) -> None:
        """Handle an engine that refused to release a node: the whole service moves to other nodes.

        Args:
            number: number of the process with the engine's head.
            node: name of the node that was to leave.
        """
        process = self._processes.get(number)
        if process is not None and self._drain_deadlines.pop(node, None) is not None:
            self._move(self.services[process.service], node)

    def forget_node(self, name: str) -> None:
        """Remove the state of a node that has left."""
        self.draining.discard(name)
        self._drain_deadlines.pop(name, None)
        self._lost.pop(name, None)

    @property
    def movable(self) -> list[str]:
        """Return the services in state MOVING whose processes have all ended, by name."""
        return [
            name
            for name, service in self.services.items()
            if service.state is ServiceState.MOVING and not self._processes_of(service)
        ]

    def on_started(self, number: int, head: str, url: str) -> None:
        """Handle the start of an engine's head: start the processes on its other nodes.

        Args:
            number: number of the process.
            head: HOST:PORT at which other nodes join the engine.
            url: URL of the service's API.
        """
        process = self._processes.get(number)
        if process is None or process.rank or process.is_ending:
            return
        service = self.services[process.service]
        service.head, service.url = head, url
        for other in self._processes_of(service):
            if not other.is_started and other.restart_at is None:
                self._send_start(other)

    def on_reading(self, number: int, reading: ServiceReading, now: float) -> None:
        """Store new state and counters of a service's engine, and update the state of the service.

        Args:
            number: number of the process with the engine's head.
            reading: state and counters of the engine.
            now: time in seconds.
        """
        process = self._processes.get(number)
        if process is None:
            return
        service = self.services[process.service]
        service.reading = reading
        service.meter.add(reading, now)
        if service.state not in RUNNING_STATES:
            return
        if reading.state in ("ready", "sleeping"):
            service.state, service.cause = ServiceState.READY, ""
            service.ready_at = now if service.ready_at is None else service.ready_at
        elif service.ready_at is not None:
            service.state = ServiceState.RECOVERING
            service.cause = reading.cause or f"its engine is {reading.state}"

    def on_exited(self, number: int, cause: str, now: float, may_restart: bool = True) -> None:
        """Handle the exit of a process: restart it, fail its service, or complete a shutdown.

        Args:
            number: number of the process.
            cause: description of the exit.
            now: time in seconds.
            may_restart: False if its node cannot run it again.
        """
        process = self._processes.pop(number, None)
        if process is None:
            return
        service = self.services[process.service]
        if service.state in RUNNING_STATES:
            where = f"node {process.node}: {cause}"
            if process.rank == 0 or service.state is ServiceState.STARTING:
                self.fail(process.service, where)
            elif process.node in self.draining:
                service.left_nodes.add(process.node)
            elif may_restart and process.num_restarts < MAX_RESTARTS:
                again = self._add_process(service, process.node, process.rank)
                again.num_restarts = process.num_restarts + 1
                again.restart_at = now + backoff_seconds(process.num_restarts, RESTART_SECONDS)
            return
        self._end_processes(service)
        self._remove_if_ended(service)

    def on_node_joined(self, name: str, living: Collection[int], now: float) -> list[int]:
        """Handle a node that joins, or rejoins after its connection was lost.

        Args:
            name: name of the node.
            living: numbers of processes that the node still runs since an earlier session.
            now: time in seconds.

        Returns:
            The processes among `living` that are still needed; the node kills the others.
        """
        self._lost.pop(name, None)
        for process in self._processes_on(name):
            if process.is_started and process.number not in living:
                self.on_exited(process.number, "it ended while its node had no session", now)
        return [
            process.number
            for process in self._processes_on(name)
            if process.number in living and not process.is_ending
        ]

    def on_node_lost(self, name: str, cause: str, has_left: bool, now: float) -> None:
        """Handle a node whose connection was lost, or that has left.

        Args:
            name: name of the node.
            cause: description of the loss.
            has_left: True if the node has left the cluster and ended its processes.
            now: time in seconds.
        """
        if has_left:
            self._drop_processes(name, f"the node has left: {cause}", now)
            return
        self._lost[name] = now
        for process in self._processes_on(name):
            service = self.services[process.service]
            if process.rank == 0 and service.state in RUNNING_STATES and process.is_started:
                service.state = ServiceState.RECOVERING
                service.cause = f"node {name}, which runs the head, is lost: {cause}"

    def tick(self, now: float) -> None:
        """Restart processes whose delay is over, and give up those of nodes lost for too long."""
        for node, deadline in list(self._drain_deadlines.items()):
            if now >= deadline:
                del self._drain_deadlines[node]
                for process in self._processes_on(node):
                    self._move(self.services[process.service], node)
        for node, lost_at in list(self._lost.items()):
            if now - lost_at >= self._return_seconds:
                del self._lost[node]
                self._drop_processes(node, f"lost for {self._return_seconds:g} seconds", now)
        for process in self._processes.values():
            if process.restart_at is not None and process.restart_at <= now:
                process.restart_at = None
                self._send_start(process)

    def _move(self, service: Service, node: str) -> None:
        """End the processes of a service, which starts again without a node, unless it ends."""
        if service.state in RUNNING_STATES:
            service.state = ServiceState.MOVING
            service.cause = f"node {node} leaves the cluster"
            self._end_processes(service)

    def _drop_processes(self, node: str, cause: str, now: float) -> None:
        """Handle the end of all processes of a node that cannot report it."""
        for process in self._processes_on(node):
            self.on_exited(process.number, cause, now, may_restart=False)

    def _start(self, service: Service) -> None:
        service.head = service.url = ""
        for rank, node in enumerate(service.selection.nodes):
            process = self._add_process(service, node, rank)
            if rank == 0:
                self._send_start(process)

    def _add_process(self, service: Service, node: str, rank: int) -> ServiceProcess:
        process = ServiceProcess(self._next_number, service.request.name, node, rank)
        self._processes[process.number] = process
        self._next_number += 1
        return process

    def _send_start(self, process: ServiceProcess) -> None:
        service = self.services[process.service]
        selection, request = service.selection, service.request
        process.is_started = True
        command = StartServiceProcess(
            process.number,
            request.name,
            request.model,
            process.rank,
            list(selection.degrees),
            selection.layers,
            dict(request.parameters),
            service.head if process.rank else "",
            "" if process.rank else service.api_key,
            self._shutdown_seconds,
        )
        self.commands.append((process.node, command))

    def _end_processes(self, service: Service) -> None:
        """End the head of a service, and without a head the other processes.

        The head first lets its running requests finish, which needs the other processes.
        """
        for process in self._processes_of(service):
            if not process.is_started:
                del self._processes[process.number]
        for process in next_to_end(self._processes_of(service)):
            process.is_ending = True
            self.commands.append((process.node, EndServiceProcess(process.number)))

    def _remove_if_ended(self, service: Service) -> None:
        if service.state is ServiceState.STOPPING and not self._processes_of(service):
            del self.services[service.request.name]

    def _processes_of(self, service: Service) -> list[ServiceProcess]:
        name = service.request.name
        return [process for process in self._processes.values() if process.service == name]

    def _processes_on(self, node: str) -> list[ServiceProcess]:
        return [process for process in self._processes.values() if process.node == node]
