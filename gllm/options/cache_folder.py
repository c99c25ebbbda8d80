"""Folder of gllm in the user's cache."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder in the user's cache directory that gllm uses; it may not exist yet."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "gllm"
