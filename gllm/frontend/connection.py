"""HTTP connections: limits and timeouts of headers, write timeouts, and errors in our JSON.

Answers the errors that aiohttp finds below the routes, such as bytes that are not HTTP.

requirements.txt pins aiohttp to one version, because no public interface of it tells that a
connection waits for the headers of a request, lets a runner create connections of another class, or
changes its shutdown timeout after the start. All uses of private names are in this file:

- `_waiter` of `web.RequestHandler`: future of the task that waits for the next request.
- `_request_count` of `web.RequestHandler`: requests of the connection so far.
- `_make_server` of `web.AppRunner`: creates the factory of connections.
- `_shutdown_timeout` of `web.AppRunner`: seconds that `cleanup` waits for running answers.
- `_kwargs` and `_loop` of `web.Server`: arguments of a connection's constructor.
"""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gllm.config.server import ServerConfig
from gllm.frontend.errors import ApiError, error_response, to_client_error
from gllm.frontend.request_id import current_request_id, request_id

log = logging.getLogger(__name__)

SERVER_NAME = "gllm"
"""Value of the Server header; aiohttp's own contains its version and Python's."""
MAX_URL_BYTES = 8192
"""Bytes of a request line."""
MAX_HEADER_BYTES = 16384
"""Bytes of one header."""
MAX_HEADERS = 100
"""Number of headers."""
MAX_HEADERS_BYTES = 65536
"""Bytes of the request line and all headers, exceeded by one read of the socket at most."""


class Connection(web.RequestHandler):
    """HTTP connection of a client, with limits on the size and arrival time of request headers.

    Also aborts the connection if the client does not read a response within the write timeout.
    """

    __slots__ = ("_config", "_header_timer", "_num_header_bytes")

    def __init__(self, manager: web.Server, config: ServerConfig, **options: Any) -> None:
        super().__init__(manager, **options)
        self._config = config
        self._num_header_bytes = 0
        """Bytes of the incomplete headers that have arrived."""
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the header timeout at once: a connection without requests occupies a socket."""
        super().connection_made(transport)
        self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        """Receive data; reject the request if its headers are too large."""
        super().data_received(data)
        # The first bytes can arrive before the task that waits for the next request has started.
        waiter = self._waiter
        has_headers = self._request_count and (waiter is None or waiter.done())
        if has_headers:
            self._reset_headers()
        elif data:
            self._num_header_bytes += len(data)
            if self._num_header_bytes > MAX_HEADERS_BYTES:
                self._reject(
                    _headers_too_large_error(
                        f"The headers have more than {MAX_HEADERS_BYTES} bytes."
                    )
                )
                return
            # The keep-alive timeout is that of an idle connection; it would close this one without
            # an answer.
            self.keep_alive(True)
            if self._header_timer is None:
                self._start_header_timer()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Cancel the header timeout of a closed connection."""
        self._reset_headers()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write a response; abort the connection if the client does not read it in time."""
        if isinstance(resp, web.HTTPException):  # raised before any middleware
            resp = _error_answer(to_client_error(resp, request.path))
        is_broken = request.content.exception() is not None
        if is_broken:
            resp.force_close()
        try:
            async with asyncio.timeout(self._config.write_timeout):
                return await super().finish_response(request, resp, start_time)
        except TimeoutError:
            abort_unread_answer(request)
            return resp, True
        finally:
            if is_broken:
                # aiohttp would continue to read the body, and log its errors.
                self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Return the response to a malformed request, or to an error that no middleware caught."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client has disconnected
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has started")
        if isinstance(exc, HttpProcessingError):
            api_error = _malformed_request_error(exc)
        else:
            cause = exc if isinstance(exc, Exception) else RuntimeError(message)
            api_error = to_client_error(cause, request.path)
        response = _error_answer(api_error)
        response.force_close()
        return response

    def _start_header_timer(self) -> None:
        seconds = self._config.header_timeout
        self._header_timer = asyncio.get_running_loop().call_later(
            seconds, self._on_header_timeout, seconds
        )

    def _on_header_timeout(self, seconds: float) -> None:
        """Handle a header timeout: answer 408, or close the connection if it was silent."""
        if self._num_header_bytes:
            self._reject(request_timeout_error(seconds))
        else:
            self._reset_headers()
            self.force_close()

    def _reject(self, error: ApiError) -> None:
        """Answer a request whose headers are incomplete, and close the connection."""
        self._reset_headers()
        if self.transport is None:
            return
        current_id = request_id("")
        log.info("request %s: %d %s", current_id, error.status, error.code)
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\nX-Request-Id: {current_id}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()

    def _reset_headers(self) -> None:
        self._num_header_bytes = 0
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


class ConnectionRunner(web.AppRunner):
    """aiohttp runner whose connections are of class `Connection`.

    If a client disconnects, the handler of its request is cancelled.
    """

    def __init__(self, app: web.Application, config: ServerConfig) -> None:
        super().__init__(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=config.shutdown_timeout,
            max_line_size=MAX_URL_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            max_headers=MAX_HEADERS,
            keepalive_timeout=config.keep_alive_timeout,
            # Bodies are decompressed in a thread, within a limit (fields/parsing.py).
            auto_decompress=False,
        )
        self._config = config

    def set_shutdown_timeout(self, seconds: float) -> None:
        """Set the seconds for which `cleanup` waits for requests in progress."""
        self._shutdown_timeout = seconds

    async def _make_server(self) -> web.Server:
        server = await super()._make_server()
        return _ConnectionServer(
            server.request_handler,
            request_factory=server.request_factory,
            handler_cancellation=server.handler_cancellation,
            config=self._config,
            **server._kwargs,
        )


class _ConnectionServer(web.Server):
    """Factory of connections for asyncio."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


def abort_unread_answer(request: web.BaseRequest) -> None:
    """Abort the connection of a client that does not read its response; discard unsent data."""
    log.warning(
        "request %s ended: %s does not read its answer", current_request_id(), request.remote
    )
    if request.transport is not None:
        request.transport.abort()


def _error_answer(error: ApiError) -> web.Response:
    """Return an error with the request's id, which no middleware adds here."""
    response = error_response(error)
    response.headers["X-Request-Id"] = current_id = current_request_id()
    response.headers["Server"] = SERVER_NAME
    # The message may quote a header with a key, so it is not logged.
    log.info("request %s: %d %s", current_id, error.status, error.code)
    return response


def request_timeout_error(seconds: float) -> ApiError:
    """Return the error (status 408) for a request that was not received within `seconds`."""
    return ApiError(408, f"The request did not come within {seconds:g} s.", code="read_timeout")


def _headers_too_large_error(why: str) -> ApiError:
    return ApiError(431, why, code="headers_too_large")


def _malformed_request_error(error: HttpProcessingError) -> ApiError:
    """Return the error of bytes that are not an HTTP request."""
    if isinstance(error, LineTooLong):
        if error.args[1] == MAX_URL_BYTES:
            why = f"The URL has more than {MAX_URL_BYTES} bytes."
            return ApiError(414, why, code="url_too_long")
        return _headers_too_large_error(f"A header has more than {MAX_HEADER_BYTES} bytes.")
    if error.message.startswith("Too many headers"):
        return _headers_too_large_error(f"There are more than {MAX_HEADERS} headers.")
    reason = error.message.partition("\n")[0].removesuffix(":")
    return ApiError(400, f"This is not a request: {reason:.200}", code="http_400")
