"""Folder of gllm in the user's cache, and folders in it."""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder in the user's cache directory that gllm uses; it may not exist yet.

    A user without a home directory (neither $HOME nor an entry in the user database) has one among
    the temporary files.

    Raises:
        PermissionError: that one belongs to another user.
    """
    root = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(root) if root else Path("~/.cache").expanduser()) / "gllm"
    except RuntimeError:
        folder = Path(tempfile.gettempdir()) / f"gllm-cache-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(
                f"{folder} belongs to another user: set HOME or XDG_CACHE_HOME to a folder of yours"
            ) from None
        return folder


def make_folder(
    target: Path,
    last_file: str,
    write: Callable[[Path], None],
    max_folders: int,
    is_stale: Callable[[Path], bool] = lambda folder: False,
) -> None:
    """Write a folder of the cache if it is missing, and remove others that are no longer used.

    It is written under another name, and renamed when it is complete.

    Args:
        target: The folder.
        last_file: A file that every complete folder has.
        write: Writes the files into the folder that it gets.
        max_folders: Folders beside the target that are kept, those used last.
        is_stale: Returns True for a folder that is of no use.

    Raises:
        OSError: A file cannot be written.
    """
    if (target / last_file).is_file():
        os.utime(target)
        return
    root = target.parent
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".", dir=root))
    try:
        write(temporary)
        # Another process may have written the same folder meanwhile.
        if not target.exists():
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    folders = [path for path in root.iterdir() if path.is_dir()]
    folders.sort(key=lambda path: path.lstat().st_mtime, reverse=True)
    for rank, folder in enumerate(folders):
        if rank >= max_folders or is_stale(folder):
            shutil.rmtree(folder, ignore_errors=True)
