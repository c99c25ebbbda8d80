"""Listening socket of an HTTP server: its address, TLS and the limit on open files."""

import asyncio
import logging
import os
import resource
import signal
import ssl

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.observability.stop_signals import StopAction, StopSignals

log = logging.getLogger(__name__)


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """Return the TLS context of the server's certificate, or None if none is configured.

    Raises:
        ValueError: A file cannot be used; the message names the flag.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    files = f"--ssl-certfile {config.ssl_certfile}, --ssl-keyfile {config.ssl_keyfile}"
    try:
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, password=_refuse)
    except OSError as error:
        raise ValueError(f"{files} cannot be used: {_reason(error)}") from error
    if config.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(cafile=config.ssl_ca_certs)
        except OSError as error:
            flag = f"--ssl-ca-certs {config.ssl_ca_certs}"
            raise ValueError(f"{flag} cannot be used: {_reason(error)}") from error
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _refuse() -> str:
    """Refuse an encrypted key, for which OpenSSL would ask for a password on the terminal."""
    raise ValueError("--ssl-keyfile is encrypted: decrypt it, the server cannot ask for a password")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or "").lower().replace("_", " ")
        return f"{reason or 'it is not in PEM format'}"
    return error.strerror or str(error)


def watch_signals() -> asyncio.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process at once."""
    should_stop, signals, loop = asyncio.Event(), StopSignals(), asyncio.get_running_loop()

    def on_signal(number: int) -> None:
        if signals.on_signal(number, loop.time()) is StopAction.KILL:
            os._exit(1)  # workers exit with their parent
        should_stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number)
    return should_stop


def raise_open_files_limit() -> None:
    """Raise this process's soft limit on open files (RLIMIT_NOFILE) to the hard limit.

    Each connection uses a file; at the limit the process cannot accept further ones.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError) as error:  # some systems refuse their own hard limit
        log.warning("the limit on open files stays at %d: %s", soft, error)


async def listen(
    runner: web.AppRunner, host: str, port: int, tls: ssl.SSLContext | None = None
) -> None:
    """Start listening for HTTP connections on an address; clean the runner up if that fails.

    Args:
        runner: Runner of the application, after its `setup`.
        host: Address to bind.
        port: TCP port to bind.
        tls: TLS context; None for plain HTTP.

    Raises:
        ValueError: The address cannot be used; the message names the flags.
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
