"""TCP ports of this machine that processes of gllm are to listen at."""

import socket


def probe_port(address: str, port: int) -> int:
    """Listen at a port for a moment; return its number, which the system chooses for port 0.

    Raises:
        OSError: the port is in use, or this user may not listen there.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((address, port))
        listener.listen()
        return int(listener.getsockname()[1])
