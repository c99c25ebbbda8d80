"""Folder of gllm in the user's cache."""

import os
import tempfile
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
