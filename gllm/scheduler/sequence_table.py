"""Sequences of the scheduler by id, from their creation to their release.

The choices of a request have one prompt. Only the first one exists until the prompt is computed;
the others are forked from it then.
"""

from gllm.scheduler.sequence import SchedulerRequest, Sequence


class SequenceTable:
    """Sequences that have not been released, and choices that have not been forked."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        """Sequences that the scheduler has created and not released."""
        self.pending_forks: dict[int, Sequence] = {}
        """First sequence of the request, by the id of a choice that has not been forked yet."""
        self._released_seqs: list[int] = []

    def add(self, request: SchedulerRequest, now: float) -> Sequence:
        """Create the first sequence of a request; its other choices wait for `fork`."""
        first = self._create(request.seq, request, now)
        for seq in range(request.seq + 1, request.seq + request.n):
            self.pending_forks[seq] = first
        return first

    def fork(self, first: Sequence) -> list[Sequence]:
        """Create the other choices of a request, with the prompt blocks of the first."""
        request = first.request
        choices = []
        for seq in range(request.seq + 1, request.seq + request.n):
            if self.pending_forks.pop(seq, None) is not None:
                choice = self._create(seq, request, first.arrival_time)
                choice.fork_parent = first
                choices.append(choice)
        return choices

    def cancel_fork(self, seq: int) -> bool:
        """Release a choice that has not been forked; return False if there is none of this id."""
        if self.pending_forks.pop(seq, None) is None:
            return False
        self._released_seqs.append(seq)
        return True

    def release(self, sequence: Sequence) -> None:
        """Remove a finished sequence whose steps have all committed."""
        del self.sequences[sequence.seq]
        self._released_seqs.append(sequence.seq)

    def pop_released(self) -> list[int]:
        """Return the sequences released since the last call."""
        released, self._released_seqs = self._released_seqs, []
        return released

    def _create(self, seq: int, request: SchedulerRequest, arrival_time: float) -> Sequence:
        token_ids = list(request.prompt_token_ids)
        sequence = Sequence(seq, request, token_ids, len(token_ids), arrival_time=arrival_time)
        self.sequences[seq] = sequence
        return sequence
