"""Entry point of a worker process: `python -m gllm.runtime.worker CHANNEL STACKS RATIOS PARENT`.

Prepares the process before it imports torch, which takes a second: it dies with its parent, writes
its stacks when it crashes, and garbage collection is off. Its identity and its stage arrive over
the channel, because the parent reads the model's configuration meanwhile.
"""

import faulthandler
import gc
import os
import signal
import sys

from gllm.observability.child_start import exit_on_import_error, leave_signals_to_parent
from gllm.runtime.messaging.parent_death import die_with_parent


def main() -> None:
    """Run a worker process: die with the parent, dump stacks on crashes, then run the event loop.

    It reads four integers from the command line: the descriptors of the channel to the parent, the
    stack-dump file and the file of kernel measurements, and the parent's process id. It exits with
    1 after a failure, and with IMPORT_ERROR_STATUS if its modules cannot be imported.
    """
    channel, stacks, ratios, parent = map(int, sys.argv[1:])
    die_with_parent(parent)
    for descriptor in (channel, stacks, ratios):
        os.set_inheritable(descriptor, False)
    leave_signals_to_parent()
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    # Objects of imports and loading stay alive; visiting them takes a tenth of the start-up time.
    gc.disable()
    with exit_on_import_error():
        import setproctitle

        setproctitle.setproctitle("gllm-standby")
        from gllm.runtime.worker.worker import run_worker
    run_worker(channel, ratios)


main()
