"""Worker processes of an engine by place, standby workers, and their deadlines.

`Recovery` decides when something happens to them; the pool does the bookkeeping. A process holds
its place until it is reaped.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from random import Random

from gllm.recovery.actions import CloseInstances, KillWorker, SpawnWorker
from gllm.recovery.records import (
    Activity,
    RankRecord,
    RecoveryLimits,
    RetryRecord,
    WorkerRecord,
    restart_delay,
)


class WorkerPool:
    """Table of an engine's worker processes: stage and rank of each, standby workers, deadlines."""

    def __init__(self, places: Sequence[str], limits: RecoveryLimits, jitter: Random) -> None:
        """Create a pool without workers.

        Args:
            places: name of the node for each rank, by stage, then by rank.
            limits: limits of a recovery.
            jitter: source of the random part of restart delays.
        """
        self.workers: dict[int, WorkerRecord] = {}
        """Processes that have not exited, by sender."""
        self.places = [RankRecord(node=node) for node in places]
        self.standby_nodes: list[str] = list(dict.fromkeys(places))
        """Nodes that have standby workers."""
        self.num_preloading: dict[str, int] = {}
        """Standby workers that a spare has at least, because they hold layers, by its name."""
        self._limits = limits
        self._jitter = jitter
        self._senders = count(1)
        self._standbys = RetryRecord()
        """Deaths of standby workers since one was used."""
        self._leaving: set[int] = set()
        """Workers that were killed because their stages have been dropped."""
        self._has_deaths = False
        """True if a place has died since the last committed step."""

    @property
    def placed(self) -> list[WorkerRecord]:
        """Workers that have a stage, by stage, then by rank."""
        senders = (place.sender for place in self.places)
        return [self.workers[sender] for sender in senders if sender is not None]

    @property
    def is_formed(self) -> bool:
        """True if every rank has a worker without a KV cache, and no other worker has one."""
        if not self._leaving.isdisjoint(self.workers):
            return False
        num_idle = sum(worker.activity is Activity.IDLE for worker in self.placed)
        return num_idle == len(self.places)

    @property
    def is_connected(self) -> bool:
        """True if every worker with a stage has imported its modules and connected."""
        return all(worker.has_connected for worker in self.placed)

    @property
    def is_phase_finished(self) -> bool:
        """True if every worker with a stage has finished the current phase."""
        return all(worker.has_finished_phase for worker in self.placed)

    @property
    def most_deaths(self) -> int:
        """Most deaths of one rank since the last completed step."""
        return max((place.num_deaths for place in self.places), default=0)

    def running(self, sender: int) -> WorkerRecord | None:
        """Return a worker process; None if it has exited or was killed."""
        worker = self.workers.get(sender)
        return None if worker is None or worker.activity is Activity.EXITING else worker

    def remove(self, sender: int) -> WorkerRecord | None:
        """Remove a process that has exited; its rank becomes free."""
        worker = self.workers.pop(sender, None)
        self._leaving.discard(sender)
        if worker is not None and worker.place is not None:
            self.places[worker.place].sender = None
        return worker

    def finish_phase(self, sender: int) -> WorkerRecord | None:
        """Record that a worker has finished its phase; return None if it has no stage."""
        worker = self.workers.get(sender)
        if worker is None or worker.activity is not Activity.ASSIGNED:
            return None
        worker.has_finished_phase, worker.deadline = True, math.inf
        return worker

    def mark_idle(self) -> None:
        """Record that no worker with a stage has a KV cache and connections."""
        for worker in self.placed:
            worker.mark_idle()

    def close_instances(self, epoch: int, now: float) -> list[KillWorker | CloseInstances]:
        """Let the workers free their KV caches; kill those that would lose their weights."""
        actions: list[KillWorker | CloseInstances] = []
        closing: list[int] = []
        for worker in self.placed:
            if worker.activity is not Activity.ASSIGNED:
                continue
            if worker.keeps_weights:
                worker.begin_closing(now, self._limits)
                closing.append(worker.sender)
            else:
                actions.append(self.kill(worker, "its memory is freed for the next epoch"))
        if closing:
            actions.append(CloseInstances(epoch, closing))
        return actions

    def end_measuring(self) -> list[KillWorker]:
        """Record that all workers have measured; kill workers that still hold memory."""
        actions = []
        for worker in self.placed:
            worker.mark_idle()
            if not worker.keeps_weights:
                actions.append(self.kill(worker, "its memory is freed after the measurement"))
        return actions

    def kill(self, worker: WorkerRecord, cause: str) -> KillWorker:
        """Kill a worker; its rank stays occupied until the process has exited."""
        worker.activity, worker.deadline = Activity.EXITING, math.inf
        return KillWorker(worker.sender, cause)

    def fill_places(self, now: float) -> list[SpawnWorker]:
        """Give each rank without a worker a standby worker or a new one, after its delay."""
        actions: list[SpawnWorker] = []
        for index, place in enumerate(self.places):
            if place.sender is not None or place.is_vacant or place.respawn_at > now:
                continue
            standby = next(self._idle_standbys(place.node), None)
            if standby is None:
                actions.append(self._spawn(index, place.node))
                continue
            standby.place, place.sender = index, standby.sender
            self._standbys = RetryRecord()
        return actions

    def fill_standbys(self, now: float) -> list[SpawnWorker]:
        """Start the missing standby workers, once their backoff is over."""
        if self._standbys.retry_at > now:
            return []
        return [self._spawn(None, node) for node in self._missing_standbys()]

    def delay_standbys(self, until: float) -> None:
        """Start no standby workers before a time."""
        self._standbys.retry_at = max(self._standbys.retry_at, until)

    def on_standby_exit(self, now: float) -> None:
        """Count the death of a standby worker, which delays the next one."""
        self._standbys.on_failure(now, self._jitter)

    def count_death(self, place: int) -> bool:
        """Count a death of a rank's worker; return False if it has used up its restarts."""
        self._has_deaths = True
        self.places[place].num_deaths += 1
        return self.places[place].num_deaths <= self._limits.max_restarts

    def count_deaths(self, gone: Sequence[WorkerRecord], was_poisoned: bool, now: float) -> bool:
        """Count the death of each worker of a node; return False if it was one too many.

        Args:
            gone: the workers.
            was_poisoned: True if a request may have killed those that close their instances.
            now: time in seconds.
        """
        uncounted = {Activity.EXITING, *([Activity.CLOSING] if was_poisoned else [])}
        places = [
            worker.place
            for worker in gone
            if worker.place is not None and worker.activity not in uncounted
        ]
        is_permitted = True
        for place in places:
            is_permitted = self.count_death(place) and is_permitted
            self.delay_respawn(place, now)
        return is_permitted

    def describe_restarts(self, cause: str) -> str:
        """Return the cause of a death with the restarts that it follows."""
        if num_restarts := self._limits.max_restarts:
            cause += f"; restarts without a finished step before: {num_restarts}"
        return cause

    def delay_respawn(self, place: int, now: float) -> None:
        """Set the earliest time of a rank's next worker by the number of its deaths."""
        record = self.places[place]
        record.respawn_at = now + restart_delay(record.num_deaths, self._jitter)

    def forget_deaths(self) -> None:
        """Reset the numbers of deaths of all ranks, because a step was completed."""
        if self._has_deaths:
            self._has_deaths = False
            for place in self.places:
                place.num_deaths = 0

    @property
    def respawn_times(self) -> Iterator[float]:
        """Yield the earliest time of a new worker for each rank without one."""
        empty = (place for place in self.places if place.sender is None and not place.is_vacant)
        return (place.respawn_at for place in empty)

    @property
    def standby_time(self) -> float:
        """Time at which missing standby workers may be started; infinity if none is missing."""
        is_missing = any(True for _ in self._missing_standbys())
        return self._standbys.retry_at if is_missing else math.inf

    def remove_node(self, node: str) -> list[WorkerRecord]:
        """Remove and return the workers of a lost node; its ranks wait for another node."""
        gone = [worker for worker in self.workers.values() if worker.node == node]
        for worker in gone:
            self.remove(worker.sender)
        for place in self.places:
            if place.node == node:
                place.is_vacant = True
        return gone

    def move_place(self, place: int, node: str) -> None:
        """Assign a rank whose node was lost to a connected node."""
        self.places[place].node, self.places[place].is_vacant = node, False

    def restore(self, sender: int, place: int) -> None:
        """Add a surviving worker, without KV cache, that has returned with its node."""
        worker = WorkerRecord(sender, place, self.places[place].node, has_connected=True)
        self.workers[sender] = worker
        self.places[place].sender = sender

    def reshape(self, places: Sequence[str], moves: Mapping[int, int]) -> list[KillWorker]:
        """Replace the ranks after a change of the stages; kill the workers that have none any more.

        Args:
            places: name of the node of each new rank.
            moves: index of the new rank for the workers of old ranks, on the same node.
        """
        old, self.places = self.places, [RankRecord(node=node) for node in places]
        for before, after in moves.items():
            self.places[after] = old[before]
        actions = []
        for worker in [*self.workers.values()]:
            if worker.place is None or worker.place in moves:
                continue
            worker.place, worker.is_dropped = None, True
            self._leaving.add(worker.sender)
            if worker.activity is not Activity.EXITING:
                actions.append(self.kill(worker, "its stage has been dropped"))
        for worker in self.workers.values():
            if worker.place is not None:
                worker.place = moves[worker.place]
        return actions

    def reserve(self, node: str) -> tuple[WorkerRecord, list[SpawnWorker]]:
        """Return a worker of a node for a planned change: a standby worker, or a new one."""
        actions = []
        worker = next(self._idle_standbys(node), None)
        if worker is None:
            actions.append(self._spawn(None, node))
            worker = self.workers[actions[0].sender]
        worker.is_reserved = True
        return worker, actions

    def release_reserved(self) -> list[KillWorker]:
        """End the workers that were reserved for a planned change."""
        actions = []
        for worker in self.workers.values():
            if worker.is_reserved and worker.activity is not Activity.EXITING:
                worker.is_dropped = True
                actions.append(self.kill(worker, "a planned change has been disturbed"))
        return actions

    def assign_places(self, places: Mapping[int, int]) -> None:
        """Assign reserved workers to ranks of stages.

        Args:
            places: index of the rank, by id of the worker.
        """
        for sender, place in places.items():
            worker = self.workers[sender]
            worker.place, worker.is_reserved = place, False
            self.places[place].sender = sender

    def standbys_on(self, node: str) -> list[WorkerRecord]:
        """Return the standby workers of a node, in the order of their use."""
        return list(self._idle_standbys(node))

    def _missing_standbys(self) -> Iterator[str]:
        """Yield the node of each standby worker that has to be started."""
        nodes = [
            worker.node
            for worker in self.workers.values()
            if worker.place is None and not worker.is_reserved
        ]
        for node in self.standby_nodes:
            wanted = max(self._limits.num_standbys, self.num_preloading.get(node, 0))
            for _ in range(wanted - nodes.count(node)):
                yield node

    def _idle_standbys(self, node: str) -> Iterator[WorkerRecord]:
        standbys = (worker for worker in self.workers.values() if worker.place is None)
        return (
            worker
            for worker in standbys
            if worker.activity is Activity.IDLE and worker.node == node and not worker.is_reserved
        )

    def _spawn(self, place: int | None, node: str) -> SpawnWorker:
        sender = next(self._senders)
        self.workers[sender] = WorkerRecord(sender, place, node)
        if place is not None:
            self.places[place].sender = sender
        return SpawnWorker(sender, place, node)
