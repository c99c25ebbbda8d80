"""Drafter of tests that guesses the rest of known outputs, with some wrong tokens."""

from array import array
from collections.abc import Sequence
from random import Random

WRONG_TOKEN = 7


class KnowingDrafter:
    """Guesses the rest of a known output; some tokens are wrong.

    Args:
        prompt_len: tokens before the output.
        outputs: outputs that may come.
        acceptance: probability that a guess is the token of the output.
    """

    def __init__(self, prompt_len: int, outputs: list[list[int]], acceptance: float) -> None:
        self._prompt_len, self._outputs, self._acceptance = prompt_len, outputs, acceptance
        self._rng = Random(3)

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        """Return the next tokens of the first output that begins as this one."""
        known = [*token_ids[self._prompt_len :], *guesses]
        matching = [tokens for tokens in self._outputs if tokens[: len(known)] == known]
        drafts = matching[0][len(known) :][:num_tokens] if matching else []
        return [token if self._rng.random() < self._acceptance else WRONG_TOKEN for token in drafts]
