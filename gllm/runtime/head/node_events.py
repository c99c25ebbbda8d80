"""Losses, joins and drains of nodes: reports to the recovery, with the requests to blame."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from gllm.recovery.actions import Action, GiveUp, KillWorker
from gllm.recovery.placement import Placement
from gllm.recovery.records import RecoveryState
from gllm.recovery.recovery import Recovery
from gllm.runtime.head.action_executor import ActionExecutor
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.death_handler import DeathHandler
from gllm.runtime.head.deaths import DeathLog
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.machine_speeds import Machine

log = logging.getLogger(__name__)


class NodeEventHandler:
    """Reports losses and joins of nodes to the recovery."""

    def __init__(
        self,
        recovery: Recovery,
        executor: ActionExecutor,
        client: EngineClient,
        deaths: DeathLog,
        death_handler: DeathHandler,
        planner: LayerPlanner,
        execute: Callable[[list[Action]], None],
    ) -> None:
        """Create the handler.

        Args:
            recovery: decides what follows.
            executor: has the connections to the workers.
            client: has the running requests.
            deaths: log of the deaths.
            death_handler: waits for exits of workers whose session has ended.
            planner: knows the machines.
            execute: executes the actions that follow.
        """
        self._planner = planner
        self._recovery = recovery
        self._executor = executor
        self._client = client
        self._deaths = deaths
        self._death_handler = death_handler
        self._execute = execute

    @property
    def node_stages(self) -> dict[str, list[int]]:
        """Stages of each node in the present generation, by its name."""
        placement = self._recovery.placement
        return {} if placement is None else placement.node_stages

    @property
    def draining(self) -> frozenset[str]:
        """Names of the nodes that drain."""
        return frozenset(self._recovery.draining)

    @property
    def drain_errors(self) -> Mapping[str, str]:
        """Reason for which the drain of a node was ended, by its name."""
        return self._recovery.drain_errors

    def drain(self, node: str) -> str:
        """Let the stages of a living node move to others, and dismiss it then.

        Returns:
            The reason for which it cannot be drained; empty if it can, or drains already.
        """
        if reason := self._recovery.refuse_drain(node):
            return reason
        self._execute(self._recovery.drain_node(node, time.monotonic()))
        return ""

    @property
    def ready_placement(self) -> Placement | None:
        """Placement of the present generation while it serves requests; otherwise None."""
        is_ready = self._recovery.state is RecoveryState.READY
        return self._recovery.placement if is_ready else None

    def on_lost(self, node: str, cause: str, is_death: bool) -> None:
        """Handle the loss of a node.

        Args:
            node: its name.
            cause: complete description, which names the node.
            is_death: True if its agent has died, so that a running request may be to blame.
        """
        if self._recovery.is_over:
            return
        was_ready = self._is_serving(node)
        suspects = self._executor.read_suspects() if was_ready and is_death else set()
        is_poison = bool(suspects) and self._client.on_death(suspects)
        self._forget_workers(node)
        now = time.monotonic()
        actions = self._recovery.on_node_lost(node, cause, now, is_death, is_poison)
        self._end_generation(actions, cause, was_ready)
        if node in self._recovery.vacant_nodes:
            seconds = self._recovery.return_until - now
            log.info("the stages of node %s wait for it, for at most %.1f s", node, seconds)
        if is_poison:
            log.warning("a request that was computed on node %s has caused this and ends", node)

    def on_left(self, node: str, cause: str) -> None:
        """Handle a node that has ended its membership by itself."""
        if self._recovery.is_over:
            return
        was_ready = self._is_serving(node)
        self._forget_workers(node)
        actions = self._recovery.on_node_left(node, cause, time.monotonic())
        self._end_generation(actions, cause, was_ready)

    def wanted_workers(self, node: str, capacity: int, workers: Sequence[int]) -> list[int]:
        """Return the workers that a node keeps when it joins; it kills the others by itself.

        Call it, answer the node and prepare the routes to these workers before `on_joined`, which
        may assign them stages at once.
        """
        return self._recovery.wanted_workers(node, capacity, workers)

    def on_joined(
        self,
        node: str,
        capacity: int,
        workers: Sequence[int],
        machine: Machine,
        is_spare: bool,
    ) -> None:
        """Handle a node that has joined or returned.

        Args:
            node: its name.
            capacity: workers that it can have.
            workers: living workers of an earlier session, whose instances are closed.
            machine: facts about it.
            is_spare: True if it shall get stages only when others are lost.
        """
        self._planner.add_machine(node, machine)
        now = time.monotonic()
        actions = self._recovery.on_node_joined(node, capacity, workers, now, is_spare)
        # The agent has been told which workers it keeps, and nothing awaits the others' exits.
        unwanted = set(workers).difference(self._recovery.workers_on(node))
        self._execute(
            [
                each
                for each in actions
                if not (isinstance(each, KillWorker) and each.sender in unwanted)
            ]
        )

    def is_preparing(self, generation: int) -> bool:
        """Return True if a generation is that of a planned change, which is being prepared."""
        return self._recovery.state is RecoveryState.READY and (
            generation == self._recovery.generation + 1
        )

    def on_preparation_failed(self, generation: int, cause: str) -> None:
        """Handle a node that cannot prepare a planned change; its workers load in the pause."""
        log.warning("the layers of generation %d are loaded later: %s", generation, cause)
        self._execute(self._recovery.on_preparation_failed(generation, time.monotonic()))

    def on_generation_failed(self, generation: int, cause: str) -> None:
        """Handle a generation whose workers on different nodes cannot reach each other."""
        if self._recovery.is_over or generation != self._recovery.generation:
            return
        was_ready = self._recovery.state is RecoveryState.READY
        actions = self._recovery.on_generation_failed(generation, cause, time.monotonic())
        self._end_generation(actions, cause, was_ready, "link")

    def on_memory_short(self, generation: int, cause: str) -> bool:
        """Handle memory that cannot hold one sequence after other nodes have got the stages.

        The engine waits for the lost nodes again, or for others.

        Returns:
            False if that cannot help, because the stages are where they were.
        """
        actions = self._recovery.on_memory_short(generation, cause, time.monotonic())
        if not actions:
            return False
        awaited = ", ".join(self._recovery.vacant_nodes) or "other nodes"
        self._deaths.cause = f"{cause}; waiting for {awaited} or for another machine"
        log.warning("%s; requests: %d", self._deaths.cause, self._client.num_requests)
        self._execute(actions)
        return True

    def _is_serving(self, node: str) -> bool:
        """Return True if the engine is ready, and a node has stages."""
        placement = self._recovery.placement
        if self._recovery.state is not RecoveryState.READY or placement is None:
            return False
        return bool(placement.workers_on(node))

    def _forget_workers(self, node: str) -> None:
        """Drop all that is under way with the workers of a node."""
        for sender in self._recovery.workers_on(node):
            self._executor.connections.channels.forget(sender)
            self._death_handler.forget(sender)
            self._deaths.heartbeats.pop(sender, None)

    def _end_generation(
        self, actions: list[Action], cause: str, was_ready: bool, kind: str = "node"
    ) -> None:
        """Log the end of a generation and execute what follows."""
        num_requests = self._client.num_requests
        if was_ready and not any(isinstance(action, GiveUp) for action in actions):
            self._deaths.begin_recovery(kind, cause)
        self._execute(actions)
        if not self._recovery.is_over:
            log.warning("%s; requests: %d", cause, num_requests)
