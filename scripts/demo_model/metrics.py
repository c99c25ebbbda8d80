"""The measures the demo model is judged by, as pure functions of texts and token ids.

Owns what each rate means. It knows nothing of how answers and stories were generated, so that any
engine can be measured with it.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from scripts.demo_model.templates import words

REPEAT_LENGTH = 8
COPY_LENGTH = 50
_HASH_BASE = np.uint64(0x9E3779B97F4A7C15)


def share(outcomes: Iterable[bool]) -> float:
    """Return the fraction of outcomes that are true; zero if there are none."""
    values = list(outcomes)
    return sum(values) / len(values) if values else 0.0


def exact_answer_rate(given: Sequence[str], expected: Sequence[str]) -> float:
    """Return the share of answers equal to the expected ones, ignoring surrounding space."""
    pairs = zip(given, expected, strict=True)
    return share(answer.strip() == right.strip() for answer, right in pairs)


def known_word_rate(stories: Iterable[str], vocabulary: AbstractSet[str]) -> float:
    """Return the share of words in the stories that belong to the vocabulary."""
    return share(word in vocabulary for story in stories for word in words(story))


def repeats_itself(story: str, length: int = REPEAT_LENGTH) -> bool:
    """Return whether a run of ``length`` words occurs twice in the story."""
    told = words(story)
    runs = [tuple(told[start : start + length]) for start in range(len(told) - length + 1)]
    return len(set(runs)) < len(runs)


def tells_about(story: str, name: str, animal: str) -> bool:
    """Return whether the story mentions the hero's name and animal."""
    return {name.lower(), animal.lower()} <= set(words(story))


class CopyIndex:
    """Knows every run of ``length`` tokens of a corpus, by hash, and finds them in other texts."""

    def __init__(self, texts: Iterable[np.ndarray], length: int = COPY_LENGTH) -> None:
        self._length = length
        hashes = [_run_hashes(text, length) for text in texts]
        self._known = np.unique(np.concatenate(hashes)) if hashes else np.zeros(0, np.uint64)

    def has_copied_run(self, tokens: np.ndarray) -> bool:
        """Return whether the tokens contain a run of the corpus."""
        return bool(np.isin(_run_hashes(tokens, self._length), self._known).any())


def _run_hashes(tokens: np.ndarray, length: int) -> np.ndarray:
    """Return a 64-bit polynomial hash of every run of ``length`` tokens, modulo 2**64."""
    count = max(len(tokens) - length + 1, 0)
    hashes = np.zeros(count, dtype=np.uint64)
    values = tokens.astype(np.uint64) + np.uint64(1)
    for offset in range(length if count else 0):
        hashes = hashes * _HASH_BASE + values[offset : offset + count]
    return hashes
