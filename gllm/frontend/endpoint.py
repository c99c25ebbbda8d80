"""What an endpoint is.

Owns the registry's type. Knows nothing of any one endpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
from aiohttp import web

from gllm.frontend.errors import Handler
from gllm.frontend.fields.body import Body


@dataclass(frozen=True)
class Endpoint:
    """A method, a path, and who answers; the handler's docstring says what it is for."""

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    """The schema of its request body; None for no body."""
    content: str = "application/json"
    """Type of an answer that is not streamed."""
    is_open: bool = False
    """Whether it answers without a key: for those who cannot have one, as probes and browsers."""
    is_control: bool = False
    """Whether it steers the server, which no rate limit may be in the way of."""

    answer: type[msgspec.Struct] | None = None
    """The schema of its answer, for one of JSON."""
    event: type[msgspec.Struct] | None = None
    """The schema of a streamed event."""
    reason: str = ""
    """Why it is not implemented; empty for one that is."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Methods of its routes: HEAD beside GET, which probes and caches use."""
        return (self.method, "HEAD") if self.method == "GET" else (self.method,)

    @property
    def is_limited(self) -> bool:
        """Whether the rate limit counts its requests: those that compute."""
        return self.body is not None and not self.is_control

    @property
    def streams(self) -> bool:
        """Whether it may answer with server-sent events."""
        return self.body is not None and "stream" in self.body.__struct_fields__

    @property
    def summary(self) -> str:
        """What it is for, in a sentence."""
        if self.reason:
            return f"Not implemented (501): {self.reason}."
        text = self.handler.__doc__ or ""
        return " ".join(text.partition("\n\n")[0].split())


ROUTED = web.AppKey("routed", Mapping[web.AbstractRoute, Endpoint])
"""The endpoints of an application by their routes."""


def endpoint_of(request: web.Request) -> Endpoint | None:
    """The endpoint that a request asks, None where there is none."""
    return request.app[ROUTED].get(request.match_info.route)
