"""Entry point of a worker process: `python -m gllm.runtime STAGE PARENT`.

Prepares the process before it imports torch, which takes a second: it dies with its parent, and
garbage collection is off. Its WorkerSpec arrives on standard input, because the parent reads the
model's configuration meanwhile.
"""

import ctypes
import gc
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""Option of prctl(2): the signal that this process gets when its parent exits."""


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the parent's thread that created it exits."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def main() -> None:
    """Run a worker."""
    stage, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent handles Ctrl-C.
    # Objects of imports and loading stay alive; visiting them takes a tenth of the start-up time.
    gc.disable()
    from gllm.runtime.worker import run_worker

    run_worker(stage, sys.stdin.buffer.readline())


main()
