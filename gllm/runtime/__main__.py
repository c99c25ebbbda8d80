"""A worker process from its first moment: `python -m gllm.runtime STAGE PARENT`.

Owns what has to be settled before torch is imported, which takes a second: whose child this is, and
that no garbage is collected meanwhile. What the worker is to be (spec.py) comes on its standard
input; the parent is still finding out. Knows nothing of a worker's work (worker.py).
"""

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the parent's thread that made it is gone."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Entry of the process."""
    stage, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to act upon.
    # What imports and loading make stays; to walk through it again and again takes a tenth of it.
    gc.disable()
    from gllm.runtime.worker import work

    work(stage, sys.stdin.buffer.readline())


main()
