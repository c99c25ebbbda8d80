"""Memory of this process."""

import ctypes


def trim_memory() -> None:
    """Return freed heap memory of this process to the operating system (malloc_trim)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # Only in the GNU C library.
        trim(0)
