"""Losses and joins of nodes, and memory that does not suffice on other ones.

`Recovery` adds the events of workers and of time.
"""

import math
from collections.abc import Callable, Sequence

from gllm.recovery.actions import Action, KillWorker
from gllm.recovery.placement import LOCAL_NODE
from gllm.recovery.planned_changes import PlannedChanges
from gllm.recovery.records import Activity, RecoveryState, WorkerRecord
from gllm.recovery.return_wait import choose_return_seconds, predict_reload_seconds


class NodeRecovery(PlannedChanges):
    """Decides what follows from the loss or the join of a node."""

    predict_recompute: Callable[[], float] | None = None
    """Returns the seconds in which the running requests would be computed again; None if nobody
    knows."""

    def on_node_lost(
        self, node: str, cause: str, now: float, is_death: bool, is_poison: bool = False
    ) -> list[Action]:
        """Handle the loss of a node: its workers are gone, whatever they do there.

        Args:
            node: its name.
            cause: description of the loss.
            now: time in seconds.
            is_death: True if the node's agent has died, which counts as a death of its places;
                False if the node is silent or its connection was lost.
            is_poison: True if a request is known to have caused the death.
        """
        return self._remove_node(node, cause, now, is_death, is_poison, may_return=True)

    def on_node_left(self, node: str, cause: str, now: float) -> list[Action]:
        """Handle a node that has ended its membership by itself, so that nothing waits for it."""
        return self._remove_node(
            node, cause, now, is_death=False, is_poison=False, may_return=False
        )

    def wanted_workers(self, node: str, capacity: int, workers: Sequence[int]) -> list[int]:
        """Return the workers that a node keeps when it joins; see `on_node_joined`."""
        return list(self._nodes.wanted_workers(node, capacity, workers))

    def on_node_joined(
        self,
        node: str,
        capacity: int,
        workers: Sequence[int],
        now: float,
        is_spare: bool = True,
    ) -> list[Action]:
        """Handle a node that has joined or returned.

        A node that returns gets its stages back if no other node has got them, with its workers.
        Any other node is a spare, until a planned change gives it stages.

        Args:
            node: its name.
            capacity: workers that it can have.
            workers: living workers of an earlier session, whose instances are closed.
            now: time in seconds.
            is_spare: True if it shall get stages only when others are lost.

        Returns:
            Actions, among them kills of the workers that are not wanted.
        """
        if self.is_over or self._nodes.is_alive(node):
            return []
        wanted = self._nodes.wanted_workers(node, capacity, workers)
        kills = [
            KillWorker(sender, "its stage has got another worker")
            for sender in workers
            if sender not in wanted
        ]
        if vacancy := self._nodes.add(node, capacity):
            for place, name in enumerate(self._names):
                if name.stage in vacancy.stages:
                    self._pool.move_place(place, node)
            for sender, place in wanted.items():
                self._pool.restore(sender, place)
        self._pool.standby_nodes = self._nodes.alive
        self._unused.clear()
        if not is_spare:
            self._eager.add(node)
        return [*kills, *self._advance(now)]

    def on_memory_short(self, generation: int, cause: str, now: float) -> list[Action]:
        """Handle a generation whose memory cannot hold one sequence of full length.

        Returns:
            Actions by which the engine waits for other nodes; none if that cannot help.
        """
        is_current = generation == self.generation and self.state is RecoveryState.INITIALIZING
        if not (is_current and self.has_been_ready and self._former_shape):
            return []
        self._before_change = None
        actions = self._restore_shape(cause, now)
        self._end_drains(cause)
        return [*actions, *self._advance(now)]

    def _remove_node(
        self,
        node: str,
        cause: str,
        now: float,
        is_death: bool,
        is_poison: bool,
        may_return: bool,
    ) -> list[Action]:
        """Forget a node and its workers, and leave the generation if it had stages."""
        if self.is_over or node == LOCAL_NODE or not self._nodes.is_alive(node):
            return []
        # Nothing waits for a node that was to be dismissed.
        may_return = may_return and node not in self.draining
        gone = self._pool.remove_node(node)
        returning = {
            worker.sender: worker.place
            for worker in gone
            if worker.place is not None
            and worker.activity is not Activity.EXITING
            and worker.keeps_weights
        }
        wait = self._return_seconds(self._nodes.stages_on(node), now) if may_return else 0.0
        stages = self._nodes.remove(node, returning, cause, now, wait)
        actions = self._on_node_gone(node)
        self._pool.standby_nodes = self._nodes.alive
        if not stages or self.state is RecoveryState.NEW:
            return [*actions, *self._advance(now)]
        if self._is_new(node) and self.state is not RecoveryState.READY:
            return [*actions, *self._revert_change(cause, now)]
        # What fits is known better than at an earlier loss, which may have been before the start.
        self._rejected_survivors = []
        if is_death and not is_poison and not self._count_deaths(gone, now):
            return self._give_up(self._describe_restarts(cause))
        if self.state is not RecoveryState.FORMING:
            self._was_poisoned = is_poison
            actions += self._leave(cause, now)
        return [*actions, *self._advance(now)]

    def _return_seconds(self, stages: Sequence[int], now: float) -> float:
        """Return the time for which stages wait for the node that they have lost."""
        if self._limits.node_return_seconds is not None or not stages:
            return self._limits.node_return_seconds or 0.0
        num_layers = sum(end - begin for begin, end in (self._layers[stage] for stage in stages))
        # The first stage is never lost.
        num_left = len(self._layers) - len(stages)
        seconds = predict_reload_seconds(self._seconds_per_layer, num_layers, num_left)
        if self.predict_recompute is not None:
            seconds += self.predict_recompute()
        left = math.inf
        if not self.is_overdue:
            since = now if self.recovering_since is None else self.recovering_since
            left = since + self._limits.recovery_timeout - now
        return choose_return_seconds(seconds, left)

    def _count_deaths(self, gone: Sequence[WorkerRecord], now: float) -> bool:
        """Count the death of each worker of a node; return False if it was one too many."""
        # A request may have killed those that close.
        uncounted = {Activity.EXITING, *([Activity.CLOSING] if self._was_poisoned else [])}
        places = [
            worker.place
            for worker in gone
            if worker.place is not None and worker.activity not in uncounted
        ]
        is_permitted = True
        for place in places:
            is_permitted = self._pool.count_death(place) and is_permitted
            self._pool.delay_respawn(place, now)
        return is_permitted
