"""Folder with the packed weights of models, which all workers and engines of a machine map.

A part is a layer, or embedding and LM head: a stage with other layers uses the same files. A part
that cannot be encoded, a file that cannot be used and a folder that is full cost the sharing of
memory and nothing else: the weights are then read from the model as without a cache.
"""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from gllm.config.sized_folder import SizedFolder
from gllm.kernels.native.builds import select_build
from gllm.kernels.native.library import DTYPES, describe_kernels
from gllm.models.identity import hash_model
from gllm.models.ranks import Ranks
from gllm.models.weight_cache.folder_plan import (
    CachedFile,
    PartName,
    find_evictions,
    find_stale,
)
from gllm.models.weight_cache.part_codec import NotEncodableError, decode_part, encode_part
from gllm.models.weight_cache.part_file import (
    SCHEMA,
    PartHeader,
    UnusableFileError,
    map_part_file,
    write_part_file,
)
from gllm.models.weight_files import find_weight_files

log = logging.getLogger(__name__)

DEFAULT_SHARE = 0.5
"""Share of the file system that the files may take without a configured limit."""
CODE_PACKAGES = ("kernels", "models")
"""Packages whose code decides how weights are packed and read."""
P = TypeVar("P")


class CacheFullError(OSError):
    """The files would take more than the limit."""


class WeightCache:
    """The packed weights of one model in the folder, as one worker sees them while it loads."""

    def __init__(
        self,
        location: SizedFolder,
        model_folder: Path,
        settings: Mapping[str, object],
        describe: Callable[[int], object],
        ranks: Ranks,
    ) -> None:
        """Open the folder, creating it if necessary, and remove files that nothing can use.

        Args:
            location: folder and largest size, by default half of its file system.
            model_folder: files of the model.
            settings: everything but the files and `describe` that decides how weights are packed,
                such as the dtype, by name.
            describe: returns all of the model's specification that decides a part, by its index.
            ranks: ranks of the modules that `load` returns.

        Raises:
            ModelError: the model's files are missing or damaged.
        """
        self._root, self._ranks, self._describe = location.folder, ranks, describe
        self._model_folder = model_folder
        self._files_status = read_file_status(model_folder)
        self._name = PartName(
            _digest(16, [SCHEMA, hash_code(), torch.__version__]),
            _digest(16, str(model_folder.resolve())),
            _digest(16, [hash_model(model_folder), self._files_status]),
            "0" * 32,
        )
        self._settings = dict(settings)
        self._used: set[str] = set()
        """Names of the files that were mapped or written."""
        self._num_written = 0
        self._has_warned = False
        self._can_write = True
        self._limit_bytes = location.max_bytes
        try:
            self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self._limit_bytes is None:
                status = os.statvfs(self._root)
                self._limit_bytes = int(status.f_frsize * status.f_blocks * DEFAULT_SHARE)
            self._remove(find_stale(self._list(), self._name, time.time()))
        except OSError as error:
            self._stop_writing(error)

    def load(self, index: int) -> tuple[Any, int] | None:
        """Map a part.

        Args:
            index: index of the part, as for `describe`.

        Returns:
            The part and the bytes of its weights; None if it has to be read from the model.
        """
        try:
            key, path = self._locate(index)
        except NotEncodableError:
            return None
        try:
            found = map_part_file(path)
            if found is None:
                return None
            header, data = found
            if header.key != key:
                raise UnusableFileError("it is of another part")
            if header.kernels != _kernels_of(map(_dtype_named, header.kernels)):
                # Measured anew: other operations are left to torch.
                self._remove([path.name])
                return None
            part = decode_part(header.tree, data, self._ranks)
        except (UnusableFileError, ValueError, OSError) as error:
            self._warn(f"{path.name} is not used: {error}")
            self._remove([path.name])
            return None
        self._used.add(path.name)
        return part, header.weight_bytes

    def store(self, index: int, part: P, weight_bytes: int) -> P:
        """Write a part that was read from the model.

        Args:
            index: index of the part.
            part: the modules.
            weight_bytes: size that counts as that of its weights.

        Returns:
            The part in the memory that other processes share; the same part if it was not written.
        """
        if not self._can_write:
            return part
        try:
            key, path = self._locate(index)
            encoded = encode_part(part, self._ranks)
        except NotEncodableError as error:
            log.debug("a part of the model stays out of the weight cache: %s", error)
            return part
        if read_file_status(self._model_folder) != self._files_status:
            # They are being replaced: the part may be of the old or the new files.
            return part
        kernels = _kernels_of(encoded.dtypes)
        header = PartHeader(key, kernels, weight_bytes, 0, "", encoded.tree)
        try:
            write_part_file(path, encoded, header, self._make_room)
        except OSError as error:
            self._stop_writing(error)
            return part
        del encoded
        stored = self.load(index)
        if stored is None:
            return part
        self._num_written += 1
        shared: P = stored[0]
        return shared

    def log_use(self, num_parts: int) -> None:
        """Log how many of the stage's parts are shared."""
        num_mapped = len(self._used) - self._num_written
        log.info(
            "weight cache %s: %d of %d parts mapped, %d written",
            *(self._root, num_mapped, num_parts, self._num_written),
        )

    def _locate(self, index: int) -> tuple[str, Path]:
        """Return the key and the path of a part. Raises NotEncodableError."""
        described = encode_part(self._describe(index), self._ranks).tree
        settings = {**self._settings, "build": hash_build(), "content": self._name.content}
        key = json.dumps({**settings, "part": described})
        name = PartName(self._name.version, self._name.source, self._name.content, _digest(32, key))
        return key, self._root / str(name)

    def _make_room(self, num_bytes: int) -> None:
        """Remove the files used least recently until a new one fits. Raises CacheFullError."""
        assert self._limit_bytes is not None, "without a limit nothing is written"
        names = find_evictions(self._list(), self._used, num_bytes, self._limit_bytes)
        if names is None:
            raise CacheFullError(f"its limit is {self._limit_bytes} bytes")
        self._remove(names)

    def _list(self) -> list[CachedFile]:
        """Return the files of the folder."""
        files = []
        with os.scandir(self._root) as entries:
            for entry in entries:
                # Another process may have removed it.
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    files.append(CachedFile(entry.name, status.st_size, status.st_mtime))
        return files

    def _remove(self, names: list[str]) -> None:
        """Remove files; those that are mapped stay in memory until their processes end."""
        for name in names:
            path = self._root / name
            with suppress(OSError):
                # What others have put there is theirs.
                if path.lstat().st_uid == os.geteuid():
                    path.unlink()

    def _stop_writing(self, error: OSError) -> None:
        """Read the rest of the weights from the model and keep them in memory of this process."""
        self._can_write = False
        reason = str(error) if isinstance(error, CacheFullError) else error.strerror or str(error)
        self._warn(f"the packed weights are not kept: {reason}")

    def _warn(self, reason: str) -> None:
        """Log a reason for which weights are not shared, once."""
        if not self._has_warned:
            self._has_warned = True
            log.warning(
                "weight cache %s: %s; the weights are read from the model", self._root, reason
            )


def read_file_status(model_folder: Path) -> list[tuple[str, int, int]]:
    """Return name, size and time of change of a model's weight files, and of config.json."""
    paths = [model_folder / "config.json", *find_weight_files(model_folder)]
    statuses = [(path.name, path.stat()) for path in paths if path.exists()]
    return [(name, status.st_size, status.st_mtime_ns) for name, status in statuses]


@cache
def hash_code() -> str:
    """Return a digest of the code that packs and reads weights, without compiled kernels."""
    root = Path(__file__).parents[2]
    files = (path for name in CODE_PACKAGES for path in (root / name).rglob("*.py"))
    return _hash_files(sorted(files))


@cache
def hash_build() -> str:
    """Return a digest of the compiled kernels in use, of which a machine may use several."""
    path = select_build().path
    return _hash_files([] if path is None else [path])


def _hash_files(paths: Iterable[Path]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _digest(num_digits: int, value: object) -> str:
    """Return a digest of a value in hexadecimal."""
    text = value if isinstance(value, str) else json.dumps(value)
    return hashlib.sha256(text.encode()).hexdigest()[:num_digits]


def _kernels_of(dtypes: Any) -> dict[str, str]:
    """Return the kernels that compute with tensors of some dtypes, by the dtypes that have any."""
    chosen = sorted((dtype for dtype in dtypes if dtype in DTYPES), key=str)
    return {str(dtype): describe_kernels(dtype) for dtype in chosen}


def _dtype_named(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype
