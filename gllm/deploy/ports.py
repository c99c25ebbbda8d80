"""TCP ports of this machine that processes of gllm are to listen at."""

import socket


def probe_port(address: str, port: int) -> int:
    """Check that a TCP port is free by listening at it briefly; return its number.

    Args:
        address: IP address of this machine; empty for all.
        port: number of the port; 0 for any free one.

    Raises:
        OSError: the port is in use, or this user may not listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
        return int(listener.getsockname()[1])
