"""TCP ports of this machine that processes of gllm are to listen at."""

import errno
import socket

from gllm.options.addresses import parse_host_port


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


def check_port_is_free(flag: str, address: str) -> None:
    """Check early that no other program listens at a port that is bound later, after a slow start.

    Other errors of the address are left to the one who binds it.

    Args:
        flag: flag of the address, for the message.
        address: HOST:PORT or PORT; port 0 is any free one.

    Raises:
        OSError: another program listens there; the message names the flag and the fix.
    """
    try:
        host, port = ("", int(address)) if address.isdigit() else parse_host_port(address)
        probe_port(host, port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return
        raise OSError(
            error.errno,
            f"{flag} {address}: another program listens there: end it "
            f"(`ss -ltnp 'sport = :{port}'` shows it), or choose another port",
        ) from None
    except ValueError:
        return
