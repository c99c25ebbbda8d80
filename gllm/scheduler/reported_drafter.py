"""Drafts that the last stage computes with a draft model or head, and reports with its samples."""

from array import array
from collections.abc import Sequence

from gllm.scheduler.speculative_config import SpeculativeConfig


class ReportedDrafter:
    """Returns the draft tokens of a sequence that the last stage has reported.

    They count as long as the text and the guesses in flight go on as they do.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._start = 0
        """Position of the first draft token."""
        self._draft_token_ids: list[int] = []

    def report(self, num_tokens: int, draft_token_ids: Sequence[int]) -> None:
        """Replace the drafts by those behind the first `num_tokens` tokens."""
        self._start, self._draft_token_ids = num_tokens, list(draft_token_ids)

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        """Return up to `num_tokens` reported tokens behind the text and the guesses.

        Empty if these contradict the reported ones; see Drafter.
        """
        behind = [*token_ids[self._start :], *guesses]
        if behind != self._draft_token_ids[: len(behind)]:
            return []
        return self._draft_token_ids[len(behind) :][:num_tokens]
