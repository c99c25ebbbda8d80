"""Folder of gllm in the user's cache."""

import os
from pathlib import Path


def cache_folder() -> Path:
    """Return gllm's folder in the user's cache, which may not exist."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path("~/.cache").expanduser()) / "gllm"
