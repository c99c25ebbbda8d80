"""Folders of Unix sockets, whose paths are limited to 107 characters."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket (sockaddr_un)."""
NAME_BYTES = 16
"""Bytes that remain for the random part of a folder's name and for the socket in it."""
SHORT_FOLDERS = ("/tmp", "/dev/shm", "/run")


def create_socket_folder(prefix: str, short_folders: Sequence[str] = SHORT_FOLDERS) -> Path:
    """Create a folder for Unix sockets, in $TMPDIR or, if its path is too long, in a short one.

    Args:
        prefix: beginning of the folder's name.
        short_folders: where to create it otherwise; the first one that is writable.

    Raises:
        OSError: no folder can be written to whose path is short enough.
    """
    parents = (tempfile.gettempdir(), *short_folders)
    for parent in parents:
        is_short = len(os.fsencode(os.path.join(parent, prefix))) <= MAX_PATH_BYTES - NAME_BYTES
        if is_short and os.access(parent, os.W_OK | os.X_OK):
            return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    raise OSError(
        f"no folder for Unix sockets: the path of TMPDIR ({parents[0]!r}) is too long, and none of "
        f"{', '.join(short_folders)} can be written to; set TMPDIR to a shorter path"
    )
