"""HTTP below the routes: how long a connection may take, and the answer to what is no request.

Owns limits on headers, time-outs of reading headers and of writing answers, and the shape of errors
that aiohttp finds itself. Uses internals of aiohttp, which has no
public way to do so.
"""

import asyncio
import logging
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, LineTooLong

from gllm.config.server import ServerConfig
from gllm.frontend.errors import ApiError, error_response, to_api_error
from gllm.frontend.request_id import current_request_id, request_id

log = logging.getLogger(__name__)

SERVER_NAME = "gllm"
"""In the place of aiohttp's own name, which tells its version and Python's."""
MAX_URL_BYTES = 8192
MAX_HEADER_BYTES = 16384
"""Of one header."""
MAX_HEADERS = 100
MAX_HEADERS_BYTES = 65536
"""Of the request line and all headers; one read from the socket may be above it."""


class Connection(web.RequestHandler):
    """One connection of a client."""

    __slots__ = ("_config", "_head_bytes", "_head_timer")

    def __init__(self, manager: web.Server, config: ServerConfig, **options: Any) -> None:
        super().__init__(manager, **options)
        self._config = config
        self._head_bytes = 0
        """Of a request whose headers have not all come."""
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Expect a request at once: who connects and says nothing takes a place from others."""
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        """Watch how much and for how long a request's head comes in."""
        super().data_received(data)
        if not self._waits_for_head:
            self._forget_head()
        elif data:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEADERS_BYTES:
                self._end(_too_large(f"The headers have more than {MAX_HEADERS_BYTES} bytes."))
            elif self._head_timer is None:
                self._start_head_timer()

    @property
    def _waits_for_head(self) -> bool:
        # The first bytes may come before the task that waits for them.
        waiter = self._waiter
        return self._request_count == 0 or (waiter is not None and not waiter.done())

    def connection_lost(self, exc: BaseException | None) -> None:
        """Nothing is to be waited for any more."""
        self._forget_head()
        super().connection_lost(exc)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Write an answer; a client that does not read it loses it."""
        if isinstance(resp, web.HTTPException):  # raised before any middleware
            resp = _answer(to_api_error(resp))
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
                # aiohttp would go on reading the body, and log what is wrong with it.
                self.force_close()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The answer to what is no request, and to what nobody else has caught."""
        if isinstance(exc, ConnectionError):
            raise exc  # the client is gone: nobody reads an answer
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        if isinstance(exc, HttpProcessingError):
            told = _bad_request(exc)
        else:
            told = to_api_error(exc if isinstance(exc, Exception) else RuntimeError(message))
        response = _answer(told)
        response.force_close()
        return response

    def _start_head_timer(self) -> None:
        seconds = self._config.header_timeout
        self._head_timer = self._loop.call_later(seconds, self._on_late_head, seconds)

    def _on_late_head(self, seconds: float) -> None:
        """Headers are not there in time: answer, unless nothing was said at all."""
        if self._head_bytes:
            self._end(request_timeout_error(seconds))
        else:
            self._forget_head()
            self.force_close()

    def _end(self, error: ApiError) -> None:
        """Answer to headers that are not all there, and close."""
        self._forget_head()
        if self.transport is None:
            return
        named = request_id("")
        log.info("request %s: %d %s", named, error.status, error.code)
        body = msgspec.json.encode(error.body())
        head = (
            f"HTTP/1.1 {error.status} \r\nContent-Type: application/json\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\nX-Request-Id: {named}\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.force_close()

    def _forget_head(self) -> None:
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ConnectionRunner(web.AppRunner):
    """What serves an application; a client that disconnects cancels its handler."""

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
            # Bodies are decompressed in a thread, within a bound (fields/content_encoding.py).
            auto_decompress=False,
        )
        self._config = config

    def set_shutdown_timeout(self, seconds: float) -> None:
        """How long `cleanup` waits for answers that are being written."""
        self._shutdown_timeout = seconds

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(
            made.request_handler,
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            config=self._config,
            **made._kwargs,
        )


class _Server(web.Server):
    """Makes connections."""

    def __call__(self) -> Connection:
        return Connection(self, loop=self._loop, **self._kwargs)


def abort_unread_answer(request: web.BaseRequest) -> None:
    """End the connection of a client that does not read, with what it was not sent."""
    log.warning(
        "request %s ended: %s does not read its answer", current_request_id(), request.remote
    )
    if request.transport is not None:
        request.transport.abort()


def _answer(error: ApiError) -> web.Response:
    """An error with its request's id, where no middleware adds it."""
    response = error_response(error)
    response.headers["X-Request-Id"] = named = current_request_id()
    response.headers["Server"] = SERVER_NAME
    # The message may quote a header, and that a key: it is told, not logged.
    log.info("request %s: %d %s", named, error.status, error.code)
    return response


def request_timeout_error(seconds: float) -> ApiError:
    """For a request that does not come in time."""
    return ApiError(408, f"The request did not come within {seconds:g} s.", code="read_timeout")


def _too_large(why: str) -> ApiError:
    return ApiError(431, why, code="headers_too_large")


def _bad_request(error: HttpProcessingError) -> ApiError:
    """What a client is told of bytes that are no request."""
    if isinstance(error, LineTooLong):
        if error.args[1] == MAX_URL_BYTES:
            why = f"The URL has more than {MAX_URL_BYTES} bytes."
            return ApiError(414, why, code="url_too_long")
        return _too_large(f"A header has more than {MAX_HEADER_BYTES} bytes.")
    if error.message.startswith("Too many headers"):
        return _too_large(f"There are more than {MAX_HEADERS} headers.")
    what = error.message.partition("\n")[0].removesuffix(":")
    return ApiError(400, f"This is not a request: {what:.200}", code="http_400")
