"""Death of a process with its parent, by the kernel.

`python -m gllm.runtime.messaging.parent_death PARENT COMMAND...` becomes `COMMAND...`.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent exits."""


def die_with_parent(parent: int) -> None:
    """Make the kernel kill this process when the thread that created it exits.

    The setting survives exec.

    Args:
        parent: process id of the parent.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
