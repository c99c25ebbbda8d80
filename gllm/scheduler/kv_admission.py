"""Rules of admission to the KV cache that are chosen by name (`--kv-admission`).

They replace the rule of the policy. All admit a sequence to an empty cache. In their formulas C is
the capacity of the cache, u the tokens of a running sequence, r its predicted remaining output
tokens (at least 1) and p the prefill of the waiting sequence; gllm counts all of them in blocks. A
request can carry a predicted output length (`SchedulerRequest.predicted_output_tokens`); otherwise
it is predicted from finished outputs.

Sources: "Inference without Interference" (TetriInfer, arXiv 2401.11181), decode scheduler: greedy,
reserve-static, reserve-dynamic. "DistServe" (OSDI'24, arXiv 2401.09670), artifact: distserve.
"Splitwise" (ISCA'24, arXiv 2311.18677), its simulator: reserve-max.
"""

from collections.abc import Container, Iterable

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.sequence import Sequence

WAITING_SHARE = 0.05
"""Share of the KV blocks below which accepted prompts wait, in DistServe's artifact."""


class GreedyAdmission(AdmissionController):
    """Admits a waiting sequence as soon as its prompt fits into the free KV blocks.

    The output is not considered: p <= C - sum(u), with prompt p, cache capacity C and used tokens
    u.
    """

    def is_admissible(self, sequence: Sequence, victims: Container[int] = ()) -> bool:
        """Return True if a waiting sequence may allocate KV blocks.

        Args:
            sequence: a sequence without blocks.
            victims: sequence ids that would be preempted for it.
        """
        owners = [s for s in self._kv_cache.remaining_sequences() if s.seq not in victims]
        return not owners or self._has_space(sequence, owners, victims)

    def _has_space(
        self, sequence: Sequence, owners: list[Sequence], victims: Container[int]
    ) -> bool:
        """Return True if the cache has space for a sequence beside the owners of blocks."""
        return self._fits_with_growth(sequence, 0, owners, 0, victims)

    def _fits_with_growth(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        owners: Iterable[Sequence],
        num_owner_tokens: int,
        victims: Container[int],
    ) -> bool:
        """Return True if the free blocks suffice for more tokens of all sequences.

        Args:
            sequence: a sequence without blocks.
            num_new_tokens: tokens that it generates.
            owners: sequences that hold blocks.
            num_owner_tokens: tokens that each of them generates; their prompts count whole.
            victims: sequence ids whose blocks count as free.
        """
        missing = sum(
            owner.num_missing_blocks(owner.num_tokens + num_owner_tokens, self._block_size)
            for owner in owners
        )
        missing += self._kv_cache.num_admission_blocks(sequence, num_new_tokens)
        return missing <= self._num_free(victims)

    def _predict_remaining(self, sequence: Sequence) -> int:
        """Return the predicted number of tokens that a sequence still generates; at least 1."""
        request, num_generated = sequence.request, sequence.num_output_tokens
        predicted = request.predicted_output_tokens
        if not predicted:
            predicted = self.output_lengths.predict(request.max_tokens, num_generated)
        return max(1, min(predicted, request.max_tokens) - num_generated)


class StaticReservation(GreedyAdmission):
    """Admits a waiting sequence if its prompt and its predicted output fit into the free KV blocks.

    Growth of the running sequences is not considered: p + r <= C - sum(u), with prompt p, predicted
    output r, cache capacity C and used tokens u.
    """

    def _has_space(
        self, sequence: Sequence, owners: list[Sequence], victims: Container[int]
    ) -> bool:
        remaining = self._predict_remaining(sequence)
        return self._fits_with_growth(sequence, remaining, owners, 0, victims)


class DynamicReservation(GreedyAdmission):
    """Admits a sequence if all sequences fit until the first of them is predicted to finish.

    With prompt p, cache capacity C, used tokens u and the least predicted remaining output r* of a
    sequence: sum(u + r*) + p + r* <= C. TetriInfer takes r* from the running sequences; here the
    waiting one is included, because its blocks are freed as well when it finishes.
    """

    def _has_space(
        self, sequence: Sequence, owners: list[Sequence], victims: Container[int]
    ) -> bool:
        growth = min(map(self._predict_remaining, (sequence, *owners)))
        return self._fits_with_growth(sequence, growth, owners, growth, victims)


class LongestReservation(GreedyAdmission):
    """Admits a sequence only if it and all running ones fit even if each generates `max_tokens`.

    For a request with n > 1, the choices that are created once the prompt is computed are counted
    too: they are scheduled before later prompts.
    """

    def _has_space(
        self, sequence: Sequence, owners: list[Sequence], victims: Container[int]
    ) -> bool:
        missing = sum(
            owner.num_missing_blocks(owner.num_tokens + _most_new(owner), self._block_size)
            for owner in owners
        )
        missing += self._kv_cache.num_admission_blocks(sequence, _most_new(sequence))
        missing += sum(map(self._count_unborn, (sequence, *owners)))
        return missing <= self._num_free(victims)

    def _count_unborn(self, sequence: Sequence) -> int:
        """Return the blocks of the choices that wait for a first choice to compute the prompt.

        Beside the blocks of the prompt that they share: all full ones before its last token.
        """
        request, prompt_len = sequence.request, sequence.prompt_len
        num_computed = max(sequence.num_computed_tokens, sequence.num_scored_tokens)
        if sequence.seq != request.seq or num_computed >= prompt_len:
            return 0
        num_blocks = -(-(prompt_len + request.max_tokens) // self._block_size)
        return (request.n - 1) * (num_blocks - (prompt_len - 1) // self._block_size)


class WaitingShareAdmission(GreedyAdmission):
    """Admits a prompt if its KV blocks are free and few admitted sequences wait for a first decode.

    The sequences that wait for their first decode step must hold less than WAITING_SHARE of all
    blocks. DistServe's artifact has this rule on its decode instances. Sequences whose decode runs
    on another engine do not count.
    """

    def _has_space(
        self, sequence: Sequence, owners: list[Sequence], victims: Container[int]
    ) -> bool:
        num_waiting = sum(
            -(-owner.num_prefill_tokens // self._block_size)
            for owner in owners
            if owner.num_scheduled_tokens <= owner.num_prefill_tokens
            and not owner.request.kv_ticket
        )
        if num_waiting >= WAITING_SHARE * self._kv_cache.block_pool.num_blocks:
            return False
        return super()._has_space(sequence, owners, victims)


def _most_new(sequence: Sequence) -> int:
    """Return the largest number of tokens that a sequence may still generate."""
    return sequence.request.max_tokens - sequence.num_output_tokens


ADMISSION_RULES: dict[str, type[AdmissionController]] = {
    "greedy": GreedyAdmission,
    "reserve-static": StaticReservation,
    "reserve-dynamic": DynamicReservation,
    "reserve-max": LongestReservation,
    "distserve": WaitingShareAdmission,
}
"""Rules by name; gllm.scheduler.config.KV_ADMISSION_NAMES lists the names."""
RESERVING_ADMISSIONS = ("reserve-static", "reserve-dynamic")
"""Rules that read predicted output lengths."""
