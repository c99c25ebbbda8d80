"""Sequences of the scheduler by id, from their creation to their release.

The choices of a request have one prompt. Only one sequence exists until the prompt is computed; the
others are forked from it then.
"""

from collections.abc import Iterator

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
        first.num_source_tokens = request.kv_source_tokens
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
        """Release a choice that waits for its fork; return False if the id is not that of one."""
        if self.pending_forks.pop(seq, None) is None:
            return False
        self._released_seqs.append(seq)
        return True

    def release(self, sequence: Sequence) -> None:
        """Remove a finished sequence after all of its steps have committed."""
        del self.sequences[sequence.seq]
        self._released_seqs.append(sequence.seq)

    def unfinished_requests(self, now: float) -> list[SchedulerRequest]:
        """Return the requests that have not ended, as another scheduler continues them.

        Each has the outputs of its unfinished sequences so far and its age. Its id is that of the
        first of them; with several sequences the others may have had any ids behind it. Nothing is
        fetched for them again.
        """
        living: dict[int, list[tuple[int, list[int]]]] = {}
        requests: dict[int, tuple[SchedulerRequest, float]] = {}
        for seq, sequence in self._living_sequences():
            request = sequence.request
            known = sequence.token_ids if seq == sequence.seq else request.initial_token_ids(seq)
            requests[request.seq] = request, now - sequence.arrival_time
            living.setdefault(request.seq, []).append((seq, known[sequence.prompt_len :].tolist()))
        resumed = []
        for first_seq, (request, age_seconds) in sorted(requests.items()):
            seqs, outputs = zip(*sorted(living[first_seq]), strict=True)
            resumed.append(
                request._replace(
                    seq=seqs[0],
                    n=len(seqs),
                    outputs=outputs if any(outputs) else (),
                    age_seconds=age_seconds,
                    kv_source_tokens=0,
                )
            )
        return resumed

    def _living_sequences(self) -> Iterator[tuple[int, Sequence]]:
        """Yield the id of each unfinished sequence with it, or with its parent before the fork."""
        for seq, sequence in self.sequences.items():
            if not sequence.is_finished:
                yield seq, sequence
        yield from self.pending_forks.items()

    def pop_released(self) -> list[int]:
        """Return the sequences released since the last call."""
        released, self._released_seqs = self._released_seqs, []
        return released

    def _create(self, seq: int, request: SchedulerRequest, arrival_time: float) -> Sequence:
        token_ids = request.initial_token_ids(seq)
        sequence = Sequence(seq, request, token_ids, len(token_ids), arrival_time=arrival_time)
        self.sequences[seq] = sequence
        return sequence
