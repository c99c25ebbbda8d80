"""Drafts for simulated texts of one repeated token: right with a given probability.

For the simulator and emulated devices, which make up their texts.
"""

from array import array
from collections.abc import Sequence
from random import Random

from gllm.scheduler.speculative_config import SpeculativeConfig


class SyntheticDrafter:
    """Guesses that the last token of a sequence is repeated, or another one, as a rate says.

    The random numbers depend on the sequence's tokens at the first draft, so that a step log is
    replayed with the same guesses.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._rate = config.synthetic_acceptance_rate
        self._random: Random | None = None

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        """Return `num_tokens` tokens, after the last of `token_ids`; see Drafter."""
        if self._random is None:
            self._random = Random(hash((len(token_ids), *token_ids[:16])))
        right = token_ids[-1]
        wrong = right - 1 if right else 1
        draw = self._random.random
        return [right if draw() < self._rate else wrong for _ in range(num_tokens)]
