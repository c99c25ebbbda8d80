"""Sequences of the scheduler by id, from their creation to their release.

The choices of a request have one prompt. Only one sequence exists until the prompt is computed; the
others are forked from it then.
"""

from gllm.scheduler.sequence import SchedulerRequest, Sequence


class SequenceTable:
    """Sequences that have not been released, and choices that have not been forked."""

    def __init__(self) -> None:
        self.sequences: dict[int, Sequence] = {}
        """Sequences that the scheduler has created and not released."""
        self.pending_forks: dict[int, Sequence] = {}
        """Sequence that computes the prompt, by the id of a choice that waits for it."""
        self._released_seqs: list[int] = []

    def add(self, request: SchedulerRequest, now: float) -> Sequence:
        """Create the first sequence of a request; its other choices wait for `fork`."""
        first = self._create(request.seq, request, now - request.age_seconds)
        for seq in range(request.seq + 1, request.seq + request.n):
            self.pending_forks[seq] = first
        return first

    def fork(self, parent: Sequence) -> list[Sequence]:
        """Create the choices that wait for a sequence to compute the prompt.

        If it has ended before that, only the next choice is created: it computes the prompt for the
        others.
        """
        end = parent.request.seq + parent.request.n
        seqs = [seq for seq in range(parent.seq + 1, end) if self.pending_forks.get(seq) is parent]
        num_created = len(seqs) if parent.num_computed_tokens >= parent.prompt_len else 1
        choices = []
        for seq in seqs[:num_created]:
            del self.pending_forks[seq]
            choice = self._create(seq, parent.request, parent.arrival_time)
            choice.fork_parent = parent
            choices.append(choice)
        for seq in seqs[num_created:]:
            self.pending_forks[seq] = choices[0]
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
        token_ids = request.initial_token_ids(seq)
        sequence = Sequence(seq, request, token_ids, len(token_ids), arrival_time=arrival_time)
        self.sequences[seq] = sequence
        return sequence
