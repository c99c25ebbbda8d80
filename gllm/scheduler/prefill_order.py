"""Prefill order: the order in which waiting sequences are prefilled.

`fcfs` serves by rank: priority, then arrival. `sjf` and `ljf` collect up to `group_size` sequences
of one priority in the order of their arrival and sort each group by length. A group is prefilled
before the next one is formed, so no sequence is delayed beyond its group. Smaller priorities
precede every group of larger ones.

Source: "Inference without Interference: Disaggregate LLM Inference for Mixed Downstream Workloads"
(TetriInfer, arXiv 2401.11181), prefill scheduler with PrefillSchedBatch.
"""

from gllm.scheduler.sequence import UNGROUPED, Sequence

PREFILL_ORDERS = ("fcfs", "sjf", "ljf")
"""Orders of the prefill queue: first come, first served; shortest or longest job first."""

QueueKey = tuple[int, int, int, float, int]
"""Priority, number of the group, place within it, time of arrival, sequence id."""


class PrefillOrder:
    """Order of the prefill queue: by arrival, or the shortest or longest prompt first.

    Args:
        name: fcfs, sjf (shortest first) or ljf (longest first).
        group_size: number of consecutive arrivals that `sjf` and `ljf` sort together
            (PrefillSchedBatch in TetriInfer).
    """

    def __init__(self, name: str, group_size: int) -> None:
        self.forms_groups = name != "fcfs"
        """True if `form_group` has to be called before the first sequence of the queue is used."""
        self._sign = -1 if name == "ljf" else 1
        self._group_size = group_size
        self._num_groups = 0

    @staticmethod
    def key(sequence: Sequence) -> QueueKey:
        """Return the sort key of a sequence in the prefill queue."""
        priority, arrival_time, seq = sequence.rank
        return (priority, *sequence.prefill_group, arrival_time, seq)

    def form_group(self, waiting: list[Sequence]) -> None:
        """Sort the next group to the front of the queue, unless its first sequence is in a group.

        The length of a sequence is its number of tokens to prefill that are not cached. A preempted
        sequence keeps its group: it returns to the front of the queue.

        Args:
            waiting: the prefill queue, sorted by `key`; changed in place.
        """
        if not (waiting and waiting[0].prefill_group is UNGROUPED):
            return
        priority, size = waiting[0].rank[0], 0
        for sequence in waiting[: self._group_size]:
            # Groups of this priority would precede the first sequence, so none of them follows.
            if sequence.rank[0] != priority:
                break
            sequence.prefill_group = self._num_groups, self._sign * sequence.num_waiting_tokens
            size += 1
        waiting[:size] = sorted(waiting[:size], key=self.key)
        self._num_groups += 1

    def join(self, sequence: Sequence) -> None:
        """Put a choice of a request into the group of the choice that computed its prompt."""
        if self.forms_groups and sequence.fork_parent is not None and not sequence.num_preemptions:
            sequence.prefill_group = sequence.fork_parent.prefill_group
