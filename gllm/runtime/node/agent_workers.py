"""Workers of an agent: their processes, their sessions and the stages that they run.

They outlive a session with the head. What they report is passed on in frames; without a session it
is dropped.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import msgspec
import zmq

from gllm.config.engine import EngineConfig
from gllm.messages import nodes
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_head, encode
from gllm.messages.lifecycle import CloseEpoch, EpochClosed, Hello, Shutdown
from gllm.messages.reports import StageMeasured
from gllm.observability.logs import LogConfig
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.join_check import apply_own_fields
from gllm.recovery.placement import Placement
from gllm.runtime.driver.driver_relay import DriverRelay
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    WorkerIdentity,
    decode_node_assignment,
)
from gllm.runtime.head.kv_mover import MachineKvMover
from gllm.runtime.head.node import Node
from gllm.runtime.head.worker_channels import PROCESS_EPOCH, HeadSocket
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.session import ANY_EPOCH
from gllm.runtime.node.head_session import AgentConfig

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.05
"""Time after an exit in which the last messages of the process may still arrive."""
DUMP_SECONDS = 0.15
"""Time in which a worker writes its stacks; the head reads them 0.3 s after its command."""

_CLOSE_EPOCH = encode(CloseEpoch())


class AgentWorkers:
    """Worker processes of one machine of a multi-node engine: starts, ends and connects them.

    Their messages travel in the connection of this machine's agent to the head machine.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        node: Node,
        send: Callable[[WireMessage], None],
        clock: Callable[[], ClockOffset | None],
        config: AgentConfig,
    ) -> None:
        """Create the owner of a node without workers, on the running event loop.

        Args:
            context: ZeroMQ context of this process.
            node: runs the workers.
            send: sends a message to the head; drops it without a session.
            clock: returns the offset of the head's clock; None without a session.
            config: configuration of the agent.
        """
        self.run = 0
        """Number of the head's start that the workers belong to; 0 for none."""
        self.epoch = ANY_EPOCH
        """Epoch that was assigned last."""
        self.living: set[int] = set()
        """Workers that have not exited."""
        self._context = context
        self._node = node
        self._send = send
        self._clock = clock
        self._config = config
        self._hub: Hub | None = None
        self._socket: HeadSocket | None = None
        self._relay: DriverRelay | None = None
        self._kv: MachineKvMover | None = None
        """Transfers KV blocks of this machine's stages; None without --kv-transfer."""
        self._placement: Placement | None = None
        """Placement of the epoch that was assigned last; None before the first one."""
        self._busy: set[int] = set()
        """Workers that have a stage or measure their speed."""
        self._unwanted: set[int] = set()
        """Workers that were killed although the head knows nothing of them."""
        self._num_stale = 0
        self._has_changed = asyncio.Event()
        """Set when a worker has closed its stage, or has exited."""
        node.watch(self._on_exit)

    @property
    def idle(self) -> list[int]:
        """Workers without a stage that have not exited."""
        return sorted(self.living - self._busy - self._unwanted)

    @property
    def has_stages(self) -> bool:
        """True if a worker has a stage."""
        return bool(self._busy)

    @property
    def num_stale(self) -> int:
        """Messages of earlier epochs and runs, and for workers that are gone."""
        relay = None if self._relay is None else self._relay.hub
        hubs = (hub for hub in (self._hub, relay) if hub is not None)
        return self._num_stale + sum(hub.num_stale for hub in hubs)

    def sample(self) -> list[nodes.WorkerSample]:
        """Return the states of the workers' processes."""
        samples = ((sender, self._node.sample(sender)) for sender in sorted(self.living))
        return [
            nodes.WorkerSample(sender, sample.is_stopped, sample.cpu_seconds)
            for sender, sample in samples
            if sample is not None
        ]

    async def begin_session(self, run: int, wanted: Collection[int]) -> None:
        """Kill all workers but those that the head assigns again.

        Args:
            run: number of the head's start.
            wanted: workers of an earlier session that the head keeps.
        """
        if run != self.run:
            await self._begin_run(run)
        for sender in self.living.difference(wanted):
            self._kill_unwanted(sender)
        for sender in wanted:
            if sender not in self.living or sender in self._unwanted:
                self._send(nodes.WorkerExited(sender, "the process has exited", ""))
            elif self._socket is not None and sender not in self._socket.connecting:
                # It may have connected while there was no session.
                self._send(nodes.WorkerFrame(sender, PROCESS_EPOCH, encode(Hello(sender))))

    def start(self, command: nodes.StartWorker) -> None:
        """Start a worker; report its exit if that fails."""
        sender = command.sender
        assert self._socket is not None, "the session has begun"
        try:
            address = self._socket.expect(sender)
            logs = LogConfig(command.log_level, command.log_format)
            self._node.spawn(WorkerIdentity(self.run, sender, address, logs))
        except (OSError, zmq.ZMQError) as error:
            log.warning("a worker could not be started: %s", error)
            self._forget(sender)
            self._send(nodes.WorkerExited(sender, f"a process could not be started: {error}", ""))
        else:
            self.living.add(sender)

    def dump_stacks(self, sender: int) -> None:
        """Make a worker write its stacks, and report them soon afterwards."""
        self._node.dump_stacks(sender)
        asyncio.get_running_loop().call_later(DUMP_SECONDS, self._report_stacks, sender)

    def assign(self, command: nodes.AssignStages, folder: Path) -> None:
        """Begin a stage, measure the workers' speed or load layers in advance; report a failure.

        Args:
            command: assignment that the head has sent.
            folder: folder of the model on this machine.
        """
        try:
            assignment = decode_node_assignment(command.assignment)
            own_config = self._config.engine_config
            applied = apply_own_fields(msgspec.json.encode(assignment.config), own_config)
            assignment = msgspec.structs.replace(
                assignment, config=msgspec.json.decode(applied, type=EngineConfig)
            )
            if assignment.is_probe:
                self._busy.update(self._senders(assignment.placement))
            if assignment.is_probe or assignment.change:
                self._node.prepare(assignment, folder)
            else:
                self._assign(assignment, folder)
        except (OSError, ValueError, msgspec.DecodeError, zmq.ZMQError) as error:
            log.warning("the stages of epoch %d cannot begin: %s", command.epoch, error)
            self._send(nodes.AssignmentFailed(command.epoch, str(error)))

    def deliver(self, frame: nodes.WorkerFrame) -> None:
        """Send a message of the head to its worker, which checks and decodes it."""
        is_fenced = frame.epoch != PROCESS_EPOCH
        if self._hub is None or (is_fenced and frame.epoch != self.epoch):
            self._num_stale += 1
            return
        epoch = self.epoch if is_fenced else ANY_EPOCH
        self._hub.send_encoded((frame.sender,), frame.payload, epoch)
        if frame.payload == _CLOSE_EPOCH:
            self._close_connections()

    def deliver_to_stage(self, frame: nodes.StageFrame) -> None:
        """Send a message of the driver to a stage."""
        if self._relay is None or frame.epoch != self._relay.epoch:
            self._num_stale += 1
        else:
            self._relay.hub.send_encoded((frame.sender,), frame.payload)

    def open_kv(self, message: nodes.OpenKvMachine) -> None:
        """Serve the KV caches of this machine's workers; KvMachineOpened follows."""
        if self._kv is None or self._placement is None or message.epoch != self.epoch:
            self._num_stale += 1
            return
        here = self._placement.workers_on(self._node.node_name)
        memory = [self._node.kv_memory[worker.sender] for worker in here]
        self._kv.open(message.epoch, message.engine, message.machine, memory, message.scale)

    def restart_kv(self) -> None:
        """Replace the KV transfer process, which does not answer the driver."""
        if self._kv is not None:
            self._kv.restart()

    async def close_stages(self) -> None:
        """Close all stages because the session with the head has ended.

        Workers that do not close them in time are killed.
        """
        self._close_connections()
        self._node.on_epoch_ready()
        if self._hub is not None:
            for sender in self._busy:
                self._hub.send(sender, CloseEpoch())
        if not await self._wait_for(lambda: not self._busy):
            for sender in sorted(self._busy):
                log.warning("worker %d does not close its stage and is killed", sender)
                self._node.kill(sender)
            await self._wait_for(lambda: not self._busy)
        # The layers may be elsewhere when this machine returns.
        self._node.close_kv_files()

    async def stop(self) -> None:
        """End all workers and their sessions."""
        self._close_connections()
        for sender in self.living:
            # A process that has not connected yet has nothing to finish.
            if self._hub is None or self._socket is None or sender in self._socket.connecting:
                self._node.kill(sender)
            else:
                self._hub.send(sender, Shutdown())
        await self._node.stop()
        self._close_kv()
        self.living.clear()
        self._busy.clear()
        self._close_hub()

    async def _begin_run(self, run: int) -> None:
        """Kill the workers of another start of the head, whose senders come again."""
        self._close_connections()
        for sender in self.living:
            self._kill_unwanted(sender)
        while not await self._wait_for(lambda: not self.living):
            log.warning("workers of an earlier head cannot be killed: %s", sorted(self.living))
        self._close_hub()
        self._close_kv()
        self.run, self.epoch = run, ANY_EPOCH
        hub = self._hub = Hub(self._context, run, decode_for_head)
        hub.start(self._on_messages, self._on_session_lost)
        self._socket = HeadSocket(hub)

    def _close_kv(self) -> None:
        """End the KV transfer process of the present run."""
        if self._kv is not None:
            self._kv.close()
            self._kv = None

    def _begin_kv(self, assignment: NodeAssignment) -> None:
        """Create the owner of the KV transfer process, which starts once the workers are ready."""
        config = assignment.config
        self._placement = assignment.placement
        if self._kv is not None or not config.has_kv_mover:
            return
        self._kv = MachineKvMover(
            self._connect_kv_mover,
            config.kv_transfer,
            config.kv_transfer_encoding,
            config.kv_transfer_address,
            freeze_timeout=config.freeze_timeout,
            speed=config.emulation.emulated_speed,
            disk=config.kv_cache_disk or "",
        )
        self._kv.on_change = self._report_kv_machine
        self._kv.prepare()

    def _connect_kv_mover(self, epoch: int, descriptor: int) -> None:
        """Give this machine's first worker its end of a channel to the KV transfer process."""
        assert self._placement is not None, "the caches belong to an epoch"
        first = self._placement.workers_on(self._node.node_name)[0]
        self._node.connect_kv_mover(KvMoverConnection(first.sender, epoch, descriptor))

    def _report_kv_machine(self) -> None:
        assert self._kv is not None
        self._send(nodes.KvMachineOpened(self.epoch, self._kv.machine))

    def _close_hub(self) -> None:
        if self._hub is not None:
            self._num_stale += self._hub.num_stale
            self._hub.close()
            self._hub = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _kill_unwanted(self, sender: int) -> None:
        self._unwanted.add(sender)
        self._node.kill(sender)

    def _assign(self, assignment: NodeAssignment, folder: Path) -> None:
        """Send the stages to the workers and stand in for the driver. Raises as `Node.assign`."""
        assert self._hub is not None, "the session has begun"
        placement = assignment.placement
        if placement.epoch <= self.epoch:
            raise ValueError(f"epoch {self.epoch} has begun already")
        self._close_connections()
        self._node.assign(assignment, folder)
        self._begin_kv(assignment)
        senders = self._senders(placement)
        self._busy.update(senders)
        self.epoch = placement.epoch
        self._hub.advance(placement.epoch)
        self._relay = DriverRelay(
            self._context,
            self.run,
            placement.epoch,
            self._node.driver_address,
            senders,
            self._send,
            self._clock,
            self._report_session_lost,
            self._config.lost_seconds,
        )

    def _senders(self, placement: Placement) -> set[int]:
        """Return this machine's living workers in a placement."""
        here = {worker.sender for worker in placement.workers_on(self._node.node_name)}
        return here & self.living

    def _close_connections(self) -> None:
        """End the connections of the present epoch: with the driver and other machines."""
        if self._relay is not None:
            self._num_stale += self._relay.hub.num_stale
            self._relay.close()
            self._relay = None
        if self._kv is not None:
            self._kv.end_epoch()
        if self._node.remote_edges is not None:
            self._node.remote_edges.close_edges(self.epoch)

    async def _wait_for(self, condition: Callable[[], bool]) -> bool:
        """Wait until the workers have changed as needed; False after `close_seconds`."""
        try:
            async with asyncio.timeout(self._config.close_seconds):
                while not condition():
                    self._has_changed.clear()
                    await self._has_changed.wait()
        except TimeoutError:
            return False
        return True

    def _on_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        """Pass messages of workers on."""
        for sender, message in messages:
            match message:
                case Hello() if self._socket is not None:
                    self._socket.connecting.discard(sender)
                case EpochClosed() | StageMeasured():
                    self._busy.discard(sender)
                    self._has_changed.set()
            assert isinstance(message, WireMessage)
            epoch = self.epoch if message.is_fenced else PROCESS_EPOCH
            self._send(nodes.WorkerFrame(sender, epoch, encode(message)))

    def _on_session_lost(self, sender: int, cause: str) -> None:
        """Report the end of a worker's session with this process."""
        self._report_session_lost(sender, f"the session with its agent ended: {cause}")

    def _report_session_lost(self, sender: int, cause: str) -> None:
        if sender in self.living:
            self._send(nodes.WorkerSessionLost(sender, cause))

    def _report_stacks(self, sender: int) -> None:
        if sender in self.living:
            self._send(nodes.WorkerStacks(sender, self._node.read_stacks(sender)))

    def _on_exit(self, sender: int, description: str) -> None:
        """Handle the exit of a worker; report it after its last messages."""
        stacks = self._node.read_stacks(sender)
        self._busy.discard(sender)
        self.living.discard(sender)
        self._has_changed.set()
        if sender in self._unwanted:
            self._unwanted.discard(sender)
            self._forget(sender)
            return
        asyncio.get_running_loop().call_later(
            REPORT_SECONDS, partial(self._report_exit, self.run, sender, description, stacks)
        )

    def _report_exit(self, run: int, sender: int, description: str, stacks: str) -> None:
        if run == self.run:
            self._forget(sender)
            self._send(nodes.WorkerExited(sender, description, stacks))

    def _forget(self, sender: int) -> None:
        if self._hub is not None:
            self._hub.forget(sender)
        if self._socket is not None:
            self._socket.connecting.discard(sender)
