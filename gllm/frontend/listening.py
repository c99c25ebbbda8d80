"""Address of an HTTP server: bind it, or say which flags to change."""

import os
import ssl

from aiohttp import web


async def listen(
    runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None = None
) -> None:
    """Accept connections for an application that is set up; it is cleaned up on an error.

    Raises:
        ValueError: the address cannot be used; the message names the flags.
    """
    try:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    except OSError as error:
        await runner.cleanup()
        code = error.errno or 0
        cause = os.strerror(code) if code > 0 else error.strerror
        raise ValueError(
            f"--host {host} --port {port}: cannot listen there: {cause}; choose an address of "
            "this machine and a free port"
        ) from error
