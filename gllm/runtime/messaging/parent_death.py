"""Death of a process with its parent, by the kernel."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent exits."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent's thread that created it exits.

    The setting survives exec.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
