"""Predictions of operator forests, kept in the user's cache: a fit takes seconds."""

import hashlib
import os
import tempfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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
