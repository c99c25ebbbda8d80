"""Access to internals of aiohttp, which requirements.txt therefore pins to one version.

No public interface of aiohttp tells that a connection waits for the headers of a request, lets a
runner create connections of another class, or changes its shutdown timeout after the start. All
uses of private names are in this file:

- `_waiter` of `web.RequestHandler`: future of the task that waits for the next request.
- `_request_count` of `web.RequestHandler`: requests of the connection so far.
- `_make_server` of `web.AppRunner`: creates the factory of connections.
- `_shutdown_timeout` of `web.AppRunner`: seconds that `cleanup` waits for running answers.
- `_kwargs` and `_loop` of `web.Server`: arguments of a connection's constructor.
"""

from collections.abc import Callable
from typing import Any

from aiohttp import web


class HeaderAwareConnection(web.RequestHandler):
    """Connection that tells whether it waits for the headers of a request."""

    __slots__ = ()

    @property
    def is_waiting_for_headers(self) -> bool:
        """True until the headers of the next request are complete."""
        # The first bytes can arrive before the task that waits for them has started.
        waiter = self._waiter
        return self._request_count == 0 or (waiter is not None and not waiter.done())


ConnectionFactory = Callable[..., HeaderAwareConnection]
"""Creates a connection from its server and the keyword arguments of RequestHandler."""


class CustomConnectionRunner(web.AppRunner):
    """AppRunner whose connections are created by a factory; `options` are those of AppRunner."""

    def __init__(
        self, app: web.Application, new_connection: ConnectionFactory, **options: Any
    ) -> None:
        super().__init__(app, **options)
        self._new_connection = new_connection

    def set_shutdown_timeout(self, seconds: float) -> None:
        """Set the time that `cleanup` waits for running answers."""
        self._shutdown_timeout = seconds

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _ConnectionServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            new_connection=self._new_connection,
            **server._kwargs,
        )


class _ConnectionServer(web.Server):
    """Factory of connections for asyncio."""

    def __call__(self) -> HeaderAwareConnection:
        options = dict(self._kwargs)
        new_connection: ConnectionFactory = options.pop("new_connection")
        return new_connection(self, loop=self._loop, **options)
