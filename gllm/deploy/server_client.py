"""HTTP client of a server of gllm, for the commands and for loops that follow a router.

`gllm bench` sends its load by aiohttp instead and shares the parts that read answers.
"""

import asyncio
import http.client
import json
import logging
import ssl
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterable, Iterator
from typing import Any
from urllib.parse import urlsplit

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
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        timeout_seconds: float | None = 10.0,
        is_own: bool = False,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_seconds = timeout_seconds
        handlers: list[urllib.request.BaseHandler] = []
        if is_own or _is_on_loopback(url):
            handlers.append(urllib.request.ProxyHandler({}))
        if is_own:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            handlers.append(urllib.request.HTTPSHandler(context=context))
        self._opener = urllib.request.build_opener(*handlers)

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

    def is_ready(self) -> bool:
        """Return True if the server is ready for requests."""
        try:
            self.open("/ready").close()
        except ServerError:
            return False
        return True

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


async def follow_router(
    router: ServerClient, on_engines: Callable[[Any], Awaitable[None]], poll_seconds: float
) -> None:
    """Poll GET /engines of a router and call a function with each response, until cancelled.

    Args:
        router: HTTP client of the router, which may be starting or unreachable for a while.
        on_engines: called with each response; its errors are logged.
        poll_seconds: interval of the requests.
    """
    backoff = Backoff(first_seconds=poll_seconds, max_seconds=max(poll_seconds, MAX_POLL_SECONDS))
    while True:
        try:
            await on_engines(await asyncio.to_thread(router.get, "/engines"))
        except ServerError as error:
            log.log(logging.WARNING if error.status else logging.DEBUG, "%s", error)
            await asyncio.sleep(backoff.next_delay())
            continue
        except Exception:
            log.exception("a decision of the router at %s could not be followed", router.url)
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
