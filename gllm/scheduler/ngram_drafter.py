"""Drafts by n-grams: tokens that followed an earlier occurrence of a sequence's last tokens.

Source: Saxena, "Prompt Lookup Decoding" (2023). Occurrences are found as in LZ77 with hash chains:
each n-gram of the smallest length refers to its occurrence before.
"""

from array import array
from collections.abc import Sequence

from gllm.scheduler.speculative_config import SpeculativeConfig

MAX_OCCURRENCES = 16
"""Latest occurrences of the shortest n-gram of which the longest match is searched."""


class NgramDrafter:
    """Drafts of one sequence, from its own prompt and output.

    The longest of the latest matches counts, of equal ones the latest. A match that reaches the end
    repeats itself: the draft goes on with its own tokens.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        self._shortest, self._longest = config.lookup_range[0], config.lookup_range[-1]
        self._latest: dict[tuple[int, ...], int] = {}
        """End of the latest occurrence of each n-gram of the smallest length."""
        self._earlier = array("i")
        """By end of such an n-gram, the end of its occurrence before; 0 if there is none."""

    def draft(self, token_ids: "array[int]", guesses: Sequence[int], num_tokens: int) -> list[int]:
        """Return tokens that may follow; none if the last ones have not occurred before.

        Args:
            token_ids: prompt and output, which have only grown since the last call.
            guesses: draft tokens behind them that are not verified yet.
            num_tokens: most tokens to return.
        """
        self._index(token_ids)
        num_known, shortest = len(token_ids), self._shortest
        end = num_known + len(guesses)
        suffix = [*token_ids[max(0, num_known - self._longest) :], *guesses][-self._longest :]
        if len(suffix) < shortest or num_tokens < 1:
            return []
        position = self._latest.get(tuple(suffix[-shortest:]), 0)
        if position == end:
            position = self._earlier[position]
        best, best_length = 0, 0
        for _ in range(MAX_OCCURRENCES):
            if not position:
                break
            length = self._count_equal(token_ids, position, suffix)
            if length > best_length:
                best, best_length = position, length
                if length == len(suffix):
                    break
            position = self._earlier[position]
        if not best:
            return []
        copied = [*token_ids[best : best + num_tokens], *guesses][:num_tokens]
        # The rest repeats what lies between the match and the end.
        period = end - best
        while len(copied) < num_tokens:
            copied.append(copied[len(copied) - period])
        return copied

    def _index(self, token_ids: "array[int]") -> None:
        """Add the n-grams of tokens that are new since the last call."""
        shortest, latest, earlier = self._shortest, self._latest, self._earlier
        for end in range(len(earlier), len(token_ids) + 1):
            if end < shortest:
                earlier.append(0)
                continue
            ngram = tuple(token_ids[end - shortest : end])
            earlier.append(latest.get(ngram, 0))
            latest[ngram] = end

    def _count_equal(self, token_ids: "array[int]", position: int, suffix: list[int]) -> int:
        """Return how many tokens before a position equal the end of the suffix."""
        for length in range(self._shortest, len(suffix)):
            if length == position or token_ids[position - 1 - length] != suffix[-1 - length]:
                return length
        return len(suffix)
