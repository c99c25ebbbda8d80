"""Downloads from the hub: checks before the weights, progress, and what an error means.

huggingface_hub downloads several files at a time, and continues files that an earlier download left
incomplete.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any, Protocol

from gllm.models.errors import ModelError
from gllm.observability.progress import ProgressLines
from gllm.options.exit_status import UnavailableError

GB = 10**9
"""Bytes of a gigabyte in messages."""
MB = 10**6
"""Bytes of a megabyte, the unit of the progress."""


class ModelUnreachableError(ModelError, UnavailableError):
    """The model hub cannot be reached now, and the model is not on this machine."""


class FilePlan(Protocol):
    """Interface of huggingface_hub's DryRunFileInfo: a file that a download would fetch."""

    file_size: int | None
    """Bytes, if they are known."""
    will_download: bool
    """False if the file is in the cache."""


def check_space(name: str, files: list[FilePlan], folder: Path, free_bytes: int | None) -> None:
    """Check that the files to download fit on the disk.

    Args:
        name: Name of the repository.
        files: Files of the download.
        folder: A folder of the cache.
        free_bytes: Free bytes of its disk; None to ask the system.

    Raises:
        ModelError: They do not fit.
    """
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    free = shutil.disk_usage(folder).free if free_bytes is None else free_bytes
    if missing > free:
        raise ModelError(
            f"the weights of {name!r} need {missing / GB:.1f} GB more on disk, but {folder} has "
            f"{free / GB:.1f} GB free: set HF_HOME to a folder on a larger disk"
        )


def total_bytes(files: list[FilePlan]) -> int:
    """Return the bytes of all files of a download, those in the cache included."""
    return sum(file.file_size or 0 for file in files)


def progress_lines(name: str, files: list[FilePlan]) -> type[Any] | None:
    """Return a class for huggingface_hub's bars that prints lines; None for its own in a terminal.

    Args:
        name: Name of the repository.
        files: Files of the download.
    """
    if sys.stderr.isatty():
        return None
    missing = sum(file.file_size or 0 for file in files if file.will_download)
    return make_byte_counter(ProgressLines(f"{name}, MB", missing // MB).update)


def silent_bars() -> type[Any]:
    """Return a class for huggingface_hub's bars that shows nothing, for small downloads."""
    return make_byte_counter(lambda num_megabytes: None)


def make_byte_counter(report: Callable[[int], None]) -> type[Any]:
    """Return a class of bars that show nothing, and report the megabytes that are downloaded.

    Several bars count the same bytes, as received and as written; the larger count is reported.

    Args:
        report: Called with the further megabytes.
    """
    from huggingface_hub.utils.tqdm import tqdm

    counts: dict[int, int] = {}
    num_reported = 0
    lock = Lock()

    class ByteCounter(tqdm):
        """Counter of the bytes of a bar."""

        def __init__(self, *args: Any, **options: Any) -> None:
            self._counts_bytes = options.get("unit") == "B"
            super().__init__(*args, **{**options, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            """Count further units."""
            nonlocal num_reported
            if self._counts_bytes:
                # Several threads download.
                with lock:
                    counts[id(self)] = counts.get(id(self), 0) + int(n or 0)
                    further = max(counts.values()) // MB - num_reported
                    if further > 0:
                        num_reported += further
                        report(further)
            return super().update(n)

    return ByteCounter


@contextmanager
def hub_errors(name: str, is_begun: bool = False) -> Iterator[None]:
    """Raise the hub's errors about a repository as ModelError that says what to do.

    Args:
        name: Name of the repository.
        is_begun: The repository was reached just before.
    """
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        XetDownloadError,
    )

    try:
        yield
    except GatedRepoError as error:
        reason = "is gated: accept its terms on huggingface.co and set HF_TOKEN"
        raise ModelError(f"model {name!r} {reason}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        reason = "is neither a folder nor a name on huggingface.co (private ones need HF_TOKEN)"
        raise ModelError(f"model {name!r} {reason}") from error
    except (LocalEntryNotFoundError, OSError, HTTPError, XetDownloadError) as error:
        cause = str(error).partition("\n")[0] or type(error).__name__
        if is_begun:
            reason = (
                "is downloaded in part: the download broke off; run the same command again, and it "
                f"goes on ({cause})"
            )
        else:
            reason = (
                "is no folder, and huggingface.co cannot be reached and it is not in the local "
                f"cache: pass the path of a model folder, or `demo` for the shipped model ({cause})"
            )
        raise ModelUnreachableError(f"model {name!r} {reason}") from error
