"""Entry point of a data mover: `python -m gllm.transport.link DESCRIPTOR`.

The descriptor is its end of a DescriptorChannel. The process ends when its parent does, because the
channel is closed then.
"""

import os
import sys

from gllm.observability.child_start import exit_on_import_error, leave_signals_to_parent


def main() -> None:
    """Run a data mover (`gllm-link`), which moves activations and KV blocks between machines.

    Reads from the command line the number of an inherited socket, over which the parent process
    sends commands. Exits with status 0 once the parent closes the socket, and with
    IMPORT_ERROR_STATUS if its modules cannot be imported.
    """
    leave_signals_to_parent()
    with exit_on_import_error():
        import setproctitle

        from gllm.transport.descriptors import DescriptorChannel
        from gllm.transport.link.mover import DataMover
    setproctitle.setproctitle("gllm-link")
    DataMover(DescriptorChannel.from_descriptor(int(sys.argv[1]))).run()
    # Threads may wait for connections; the kernel ends these.
    os._exit(0)


if __name__ == "__main__":
    main()
