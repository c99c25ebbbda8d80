"""Packs whole training texts into windows of equal length.

Owns which text goes into which window. A text is never cut, since a question without its context
cannot be answered. It knows nothing of what the tokens mean.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

IGNORED_LABEL = -100
_OPEN_WINDOWS = 16


@dataclass(frozen=True)
class TrainingText:
    """The tokens of a text and which of them the model is to predict."""

    tokens: np.ndarray
    trained: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


def pack(texts: Sequence[TrainingText], length: int) -> list[list[TrainingText]]:
    """Put each text into the fullest open window that still has room for it."""
    done: list[list[TrainingText]] = []
    open_windows: list[tuple[int, list[TrainingText]]] = []
    for text in texts:
        if len(text) > length:
            raise ValueError(f"a text of {len(text)} tokens does not fit a window of {length}")
        fitting = [i for i, (used, _) in enumerate(open_windows) if used + len(text) <= length]
        if fitting:
            best = max(fitting, key=lambda i: open_windows[i][0])
            used, window = open_windows[best]
            open_windows[best] = (used + len(text), [*window, text])
            continue
        if len(open_windows) == _OPEN_WINDOWS:
            fullest = max(range(_OPEN_WINDOWS), key=lambda i: open_windows[i][0])
            done.append(open_windows.pop(fullest)[1])
        open_windows.append((len(text), [text]))
    return done + [window for _, window in open_windows]


def batches(
    windows: Sequence[list[TrainingText]], length: int, batch_size: int, pad_id: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Return padded (token ids, labels) arrays of the windows; drop an incomplete last batch."""
    for start in range(0, len(windows) - batch_size + 1, batch_size):
        ids = np.full((batch_size, length), pad_id, dtype=np.int64)
        labels = np.full((batch_size, length), IGNORED_LABEL, dtype=np.int64)
        for row, window in enumerate(windows[start : start + batch_size]):
            tokens = np.concatenate([text.tokens for text in window])
            trained = np.concatenate([text.trained for text in window])
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens)] = np.where(trained, tokens, IGNORED_LABEL)
        yield ids, labels
