"""Predictions of operator forests, as files in the user's cache and as tables in memory.

The tables answer keys within the measured range; the cost model checks that.
"""

import hashlib
import math
import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Self

import numpy as np

from gllm.options.cache_folder import cache_folder
from gllm.sim.costs.operators import (
    MAX_TREE_DEPTH,
    NUM_TREES,
    Array,
    OperatorForest,
    OperatorSamples,
)


def predict_cached(samples: OperatorSamples, features: Array, folder: Path | None = None) -> Array:
    """Return operator times predicted by a random forest, from a cache on disk where possible.

    Predictions are cached in files, because fitting a forest takes seconds.

    Args:
        samples: The measurements to which the forest is fitted.
        features: Inputs of the predictions within the measured range, [rows, features].
        folder: Folder of the cache; default: `forests` in the user's cache folder.

    Returns:
        Milliseconds of each row.

    Raises:
        CostRangeError: An input is outside of the measured range.
        ModuleNotFoundError: The predictions are not cached, and scikit-learn is missing.
    """
    path = (folder or cache_folder() / "forests") / f"{_digest(samples, features)}.npy"
    with suppress(OSError, ValueError):
        cached = np.load(path)
        if cached.shape == (len(features),):
            return np.asarray(cached, np.float64)
    values = OperatorForest(samples).predict(features)
    # A full or read-only disk costs time, but no result.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            np.save(file, values)
        os.replace(file.name, path)
    return values


def _digest(samples: OperatorSamples, features: Array) -> str:
    """Return the digest of everything that decides the predictions."""
    try:
        library = version("scikit-learn")
    except PackageNotFoundError:
        library = ""
    parts = (library, NUM_TREES, MAX_TREE_DEPTH, samples.features.shape, features.shape)
    digest = hashlib.sha256(repr(parts).encode())
    for array in (samples.features, samples.milliseconds, features):
        digest.update(np.ascontiguousarray(array, np.float64).tobytes())
    return digest.hexdigest()


STEP = 16
"""Grid of cached tokens and of chunks in tokens. The profiles' own grid is 16 to 64 wide, and a
forest is constant between neighbours of it, so a finer grid would hardly say more."""


class TokenTable:
    """Lookup table of an operator's time in milliseconds by number of tokens in the batch.

    Args:
        low: Smallest number of tokens.
        times: Milliseconds for `low` tokens, `low` + 1 tokens, and so on.
    """

    def __init__(self, low: int, times: Sequence[float]) -> None:
        self.low = low
        self.high = low + len(times) - 1
        self._times = list(times)

    @classmethod
    def of(cls, samples: OperatorSamples, unit: int = 1) -> Self:
        """Tabulate a forest with one feature, which is `unit` times the number of tokens."""
        ((low, high),) = samples.ranges.values()
        tokens = np.arange(math.ceil(low / unit), high // unit + 1)
        times = predict_cached(samples, tokens[:, None].astype(np.float64) * unit)
        return cls(int(tokens[0]), times.tolist())

    def plus(self, other: "TokenTable") -> "TokenTable":
        """Return the sum of two tables, for numbers of tokens in both."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        return TokenTable(low, [self.at(n) + other.at(n) for n in range(low, high + 1)])

    def at(self, tokens: int) -> float:
        """Return the milliseconds for a number of tokens within the range."""
        return self._times[tokens - self.low]


class PrefillTable:
    """Lookup table of a layer's prefill attention time in milliseconds.

    The keys are the tokens cached before the chunk and the tokens of the chunk, in steps of 16.

    Args:
        samples: Measured attention times, to which a random forest is fitted.
    """

    def __init__(self, samples: OperatorSamples) -> None:
        self.chunk_range = samples.ranges["chunk"]
        self.length_range = samples.ranges["kv + chunk"]
        self._low = int(self.chunk_range[0])
        most = int(self.length_range[1])
        lengths = range(self._low, int(self.chunk_range[1]) + 1, STEP)
        grid = [(kv, chunk**2) for chunk in lengths for kv in range(0, most - chunk + 1, STEP)]
        times = iter(predict_cached(samples, np.array(grid, np.float64)).tolist())
        self._rows = [[next(times) for _ in range(0, most - c + 1, STEP)] for c in lengths]

    def at(self, kv: float, chunk: float) -> float:
        """Return the milliseconds at the nearest grid point; both arguments are in range."""
        row = self._rows[min(round((chunk - self._low) / STEP), len(self._rows) - 1)]
        # Rounding both up can step over the longest sequence, by one cell.
        return row[min(round(kv / STEP), len(row) - 1)]


class DecodeTable:
    """Lookup table of a layer's decode attention time in milliseconds.

    The keys are the batch size and the mean number of cached tokens, the latter in steps of 16.

    Args:
        samples: Measured attention times, to which a random forest is fitted.
        cell: Number of context lengths, from the longest measured one on, for which its time is
            used.
    """

    def __init__(self, samples: OperatorSamples, cell: int = 1) -> None:
        self.batch_range = samples.ranges["batch"]
        low, last = map(int, samples.ranges["mean kv"])
        self.kv_range = (float(low), float(last + cell - 1))
        self._low = low
        contexts = [*range(low, last, STEP), last]
        batches = range(int(self.batch_range[0]), int(self.batch_range[1]) + 1)
        grid = np.array([(batch, kv) for batch in batches for kv in contexts], np.float64)
        self._rows = predict_cached(samples, grid).reshape(len(batches), len(contexts)).tolist()

    def at(self, batch: int, kv: float) -> float:
        """Return the milliseconds at the nearest grid point; both arguments are in range."""
        row = self._rows[batch - int(self.batch_range[0])]
        return row[min(round((kv - self._low) / STEP), len(row) - 1)]


class HostTimeFit:
    """Linear fit of the host (CPU) time of a micro-batch in milliseconds by its batch size.

    Batch sizes were measured in steps of 8; a line predicts those between, because host work is a
    constant plus a time per sequence. If the tensor parallel size was not measured, the nearest
    measured one is used: each worker prepares all sequences whatever its share of the model.

    Args:
        rows: Measured times, with the columns `tp` and `batch_size`.
        tp: Tensor parallel size.
        columns: Columns of times whose sum is fitted.
    """

    def __init__(self, rows: Sequence[dict[str, float]], tp: int, columns: Sequence[str]) -> None:
        """Fit the sum of some columns of a table of host times."""
        nearest = min((row["tp"] for row in rows), key=lambda other: (abs(other - tp), other))
        rows = [row for row in rows if row["tp"] == nearest]
        batches = [row["batch_size"] for row in rows]
        self.range = min(batches), max(batches)
        times = [sum(row.get(column, 0.0) for column in columns) for row in rows]
        slope, start = np.polyfit(batches, times, 1) if len(rows) > 1 else (0.0, times[0])
        self._slope, self._start = float(slope), float(start)

    def at(self, rows: float) -> float:
        """Return the milliseconds for a number of rows within the range."""
        return self._start + self._slope * rows
