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
    """Return the milliseconds [rows] that a forest of samples predicts for features [rows, n].

    Predictions are kept in files in the user's cache, because a fit takes seconds.

    Args:
        samples: The measurements to which the forest is fitted.
        features: Keys within the measured range.
        folder: Of the cache; default: `forests` in the user's cache.

    Raises:
        CostRangeError: A key is outside of the measured range.
        ModuleNotFoundError: Nothing is in the cache, and scikit-learn is missing.
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
    """Milliseconds of an operator for each number of tokens from `low` to `high`."""

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
    """Milliseconds of a layer's prefill attention by cached tokens and chunk, on a grid."""

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
    """Milliseconds of a layer's decode attention by batch and mean cached tokens, on a grid.

    Args:
        samples: The measurements.
        cell: Tokens from the last measured context on for which it stands.
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


class HostLine:
    """Linear fit of the host's milliseconds by the number of rows of a micro-batch.

    Rows were measured in eights, so that a forest could say nothing of those between; host work is
    a constant plus a time per row. Where the tensor parallel size is missing the nearest one stands
    in, because every worker prepares all rows whatever its share of the model.
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
