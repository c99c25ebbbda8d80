"""HTTP client of a server of gllm, for the commands and for loops that follow a router.

`gllm bench` sends its load by aiohttp instead and shares the parts that read answers.
"""

import asyncio
import http.client
import json
import logging
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

from gllm.observability.overdue import OverdueWatch
from gllm.options.addresses import is_loopback
from gllm.recovery.backoff import Backoff

log = logging.getLogger("gllm")

DONE = b"[DONE]"
"""Data of the event that ends a stream."""
MAX_POLL_SECONDS = 2.0
"""Longest time between two looks at a router that does not answer."""


class ServerError(Exception):
    """Raised if a gllm server cannot be reached, or responds with an error."""

    def __init__(self, message: str, status: int = 0, code: str = "", reason: str = "") -> None:
        """Create the error.

        Args:
            message: text to show to the user.
            status: HTTP status code of the response; 0 without a response.
            code: error code in the response; empty without one.
            reason: error message in the response; empty without one.
        """
        super().__init__(message)
        self.status = status
        self.code = code
        self.reason = reason


def _is_on_loopback(url: str) -> bool:
    """Return True if a URL has a host that only this machine can reach."""
    try:
        return is_loopback(urlsplit(url).hostname or "")
    except ValueError:
        return False


class ServerClient:
    """Blocking HTTP client of a gllm server.

    Args:
        url: URL of the server; /v1 at its end is removed.
        api_key: API key for the Authorization header; None or empty for none.
        timeout_seconds: timeout of each request; None for no limit.
        is_own: True for a server of the same deployment: its certificate is not verified, and
            proxies are not used. A server on a loopback address is never reached by a proxy.
        certificate: files of the certificate and key to show to a server that requires one; None
            for none. Requests fail while the files cannot be read.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_seconds: float | None = 10.0,
        is_own: bool = False,
        certificate: tuple[str, str] | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        self._is_own = is_own
        self._certificate = certificate
        self._opener: urllib.request.OpenerDirector | None = None

    def open(self, path: str, body: Any = None, method: str | None = None) -> Any:
        """Send a request and return the open response, a context manager.

        Args:
            path: path of the endpoint, with a leading slash.
            body: object to send as JSON; None for none.
            method: HTTP method; None for GET, or POST with a body.

        Raises:
            ServerError: the server cannot be reached, or refuses.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        try:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            self._opener = self._opener or self._build_opener()
            return self._opener.open(request, timeout=self._timeout_seconds)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(path, error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"cannot read {self.url}{path} ({error})") from error

    def get(self, path: str) -> Any:
        """Return the JSON of a GET response. Raises ServerError."""
        return self._read(json.loads, path)

    def post(self, path: str, body: Any = None) -> Any:
        """Return the JSON of a POST response. Raises ServerError."""
        return self._read(json.loads, path, body, "POST")

    def get_text(self, path: str) -> str:
        """Return the text of a GET response. Raises ServerError."""
        return str(self._read(bytes.decode, path))

    def readiness_error(self) -> ServerError | None:
        """Return why the server is not ready for requests; None if it is."""
        try:
            self.open("/ready").close()
        except ServerError as error:
            return error
        return None

    def _build_opener(self) -> urllib.request.OpenerDirector:
        """Return the handlers of requests. Raises OSError if the certificate cannot be read."""
        handlers: list[urllib.request.BaseHandler] = []
        if self._is_own or _is_on_loopback(self.url):
            handlers.append(urllib.request.ProxyHandler({}))
        if not self._is_own:
            return urllib.request.build_opener(*handlers)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self._certificate is not None:
            context.load_cert_chain(*self._certificate)
        return urllib.request.build_opener(*handlers, urllib.request.HTTPSHandler(context=context))

    def _read(
        self,
        parse: Callable[[bytes], Any],
        path: str,
        body: Any = None,
        method: str | None = None,
    ) -> Any:
        try:
            with self.open(path, body, method) as answer:
                return parse(answer.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ServerError(f"cannot read {self.url}{path} ({error})") from error

    def _refusal(self, path: str, error: urllib.error.HTTPError) -> ServerError:
        """Return the error of an answer that refuses."""
        try:
            body = json.load(error)
            reason, code = error_message(body), str(body["error"].get("code") or "")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            reason = code = ""
        text = f"{self.url}{path} returned {error.code}" + (f": {reason}" if reason else "")
        if error.code == 401:
            text = f"{self.url} needs an API key: set --api-key or $GLLM_API_KEY"
        return ServerError(text, error.code, code, reason)


class ReadinessProbe:
    """Asks a process if it is ready, and warns if it cannot be reached for a while."""

    def __init__(
        self, server: ServerClient, title: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Create the probe.

        Args:
            server: HTTP client of the process.
            title: its name, for logs.
            clock: returns the time in seconds.
        """
        self._server = server
        self._title = title
        self._clock = clock
        self._watch = OverdueWatch()

    def is_ready(self) -> bool:
        """Return True if the process is ready for requests."""
        error = self._server.readiness_error()
        # A process that answers 503 says why in its own log.
        is_reached = error is None or error.status == 503
        if self._watch.should_warn(is_reached, self._clock()):
            log.warning("%s was not reached: %s", self._title, error)
        return error is None


async def follow_router(
    router: ServerClient,
    on_engines: Callable[[Any], Awaitable[None]],
    poll_seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Poll GET /engines of a router and call a function with each response, until cancelled.

    Args:
        router: HTTP client of the router, which may be starting or unreachable for a while.
        on_engines: called with each response; its errors are logged.
        poll_seconds: interval of the requests.
        clock: returns the time in seconds.
    """
    watch = OverdueWatch()
    backoff = Backoff(first_seconds=poll_seconds, max_seconds=max(poll_seconds, MAX_POLL_SECONDS))
    while True:
        try:
            await on_engines(await asyncio.to_thread(router.get, "/engines"))
        except ServerError as error:
            if error.status or watch.should_warn(False, clock()):
                log.warning("the decisions of the router cannot be followed: %s", error)
            await asyncio.sleep(backoff.next_delay())
            continue
        except Exception:
            log.exception("a decision of the router at %s could not be followed", router.url)
        watch.should_warn(True, clock())
        backoff.reset()
        await asyncio.sleep(poll_seconds)


class EventReader:
    """Incremental parser of server-sent events.

    Every `data:` line is one event, because gllm and similar servers send JSON without line breaks.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes; return the data of the events that are complete."""
        lines = (self._incomplete_line + data).split(b"\n")
        self._incomplete_line = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def read_events(answer: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the data of each server-sent event of a response, up to the event [DONE]."""
    reader = EventReader()
    for data in answer:
        for event in reader.feed(data):
            if event == DONE:
                return
            yield event


def error_message(error: Any) -> str:
    """Return the message in the JSON body of an error response, in any of the usual formats."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(error)
