"""Cache of measured speeds, by everything that decides them: device, kernels, threads, model.

This module imports no torch.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from gllm.messages.reports import StageMeasured
from gllm.models.identity import hash_model
from gllm.options.cache_folder import cache_folder
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.device import count_cores, describe_device

log = logging.getLogger(__name__)

VERSION = 3
"""Increased whenever measurements of earlier versions cannot be compared with new ones."""


def create_key(
    assignment: StageAssignment,
    numerics: str,
    describe_device: Callable[[bool], str] = describe_device,
) -> str:
    """Return the cache key of a speed measurement: a hash of model, device, threads and options.

    Args:
        assignment: stage and options of the worker.
        numerics: dtypes, quantization, device and kernels of the executor, as text.
        describe_device: returns a description of the GPU if its argument is true, else of the CPU.
    """
    config = assignment.config
    parts = (
        VERSION,
        hash_model(Path(assignment.model_folder)),
        numerics,
        describe_device(numerics.startswith("cuda")),
        count_cores(),
        assignment.num_threads,
        assignment.num_local_workers,
        assignment.num_ranks,
        assignment.rank,
        assignment.stage == 0,
        assignment.stage == assignment.num_stages - 1,
        config.slowdown_of(assignment.stage),
        config.max_model_len,
        config.scheduler.block_size,
        config.scheduler.max_num_seqs,
        config.gpu_memory_utilization,
        config.cpu_experts,
    )
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()


class ProbeCache:
    """Folder that stores speed measurements of workers, one file per cache key."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use a folder, which need not exist; None for the user's cache."""
        self._folder = cache_folder() / "probes" if folder is None else folder

    def load(self, key: str) -> StageMeasured | None:
        """Return a stored measurement; None if none can be read."""
        try:
            return msgspec.json.decode(self._path(key).read_bytes(), type=StageMeasured)
        except (OSError, msgspec.DecodeError):
            return None

    def store(self, key: str, measured: StageMeasured) -> None:
        """Store a measurement; other processes read the complete file or none."""
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # A folder, because it is removed with a file that could not be written to its end.
            with tempfile.TemporaryDirectory(dir=path.parent) as folder:
                file = Path(folder, path.name)
                file.write_bytes(msgspec.json.encode(measured))
                os.replace(file, path)
        except OSError as error:
            log.info("the measured speed is not kept for the next start: %s", error)

    def forget(self, key: str) -> None:
        """Remove a stored measurement."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"
