"""Define `Endpoint`, a row of the endpoint table, and register endpoints with an application.

`gllm.frontend.routes.registry` has the table.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import msgspec
from aiohttp import web

from gllm.frontend.errors import Handler
from gllm.frontend.fields.base import RequestFields
from gllm.frontend.fields.parsing import defer_100_continue

Operation = Literal["chat", "text_completion"]
"""Values of OpenTelemetry's `gen_ai.operation.name`."""


@dataclass(frozen=True)
class EndpointParameter:
    """A path or query parameter of an endpoint, with its JSON Schema.

    Values of path parameters may contain slashes.
    """

    name: str
    description: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"}, hash=False)
    """JSON Schema of the value."""


@dataclass(frozen=True)
class Endpoint:
    """One endpoint of the HTTP API: method, path, handler, schemas, and flags for middleware.

    The OpenAPI document and docs/api.md are generated from these fields.
    """

    method: str
    path: str
    """Path template in OpenAPI's syntax, such as `/v1/models/{model}`."""
    handler: Handler
    """Coroutine that handles a request; the first paragraph of its docstring is the summary."""
    response_schema: type[msgspec.Struct] | None = None
    """Schema of a JSON response that is not streamed."""
    request_schema: type[RequestFields] | None = None
    """Fields of the request body; None if there is no body."""
    answers_list: bool = False
    """The response is a JSON array of objects of `response_schema`."""
    event_schemas: tuple[type[msgspec.Struct], ...] = ()
    """Schemas of the server-sent events of a streamed response."""
    content_type: str = "application/json"
    """Media type of a response that is not streamed."""
    path_parameters: tuple[EndpointParameter, ...] = ()
    query_parameters: tuple[EndpointParameter, ...] = ()
    """Other parameters of the query string are ignored."""
    operation: Operation | None = None
    """Kind of text generation, for traces; None if the endpoint generates no text."""
    is_public: bool = False
    """True if requests need no API key: those of probes, scrapers and browsers."""
    is_control: bool = False
    """True for commands to the server, which the rate limit does not count."""
    is_polled: bool = False
    """True for endpoints of probes and scrapers, which the access log leaves out."""
    unsupported_reason: str = ""
    """Reason why the endpoint is not implemented; empty if it is."""

    @property
    def methods(self) -> tuple[str, ...]:
        """HTTP methods of its routes: HEAD in addition to GET."""
        return (self.method, "HEAD") if self.method == "GET" else (self.method,)

    @property
    def is_rate_limited(self) -> bool:
        """True if the rate limit counts its requests."""
        return self.request_schema is not None and not self.is_control

    @property
    def can_stream(self) -> bool:
        """True if it responds with server-sent events when the client requests them."""
        return bool(self.event_schemas)

    @property
    def summary(self) -> str:
        """Description of the endpoint for the API reference, in one sentence."""
        if self.unsupported_reason:
            return f"Not implemented (501): {self.unsupported_reason}."
        docstring = self.handler.__doc__ or ""
        return " ".join(docstring.partition("\n\n")[0].split())

    @property
    def route_path(self) -> str:
        """Path pattern in aiohttp's syntax."""
        path = self.path
        for parameter in self.path_parameters:
            path = path.replace(f"{{{parameter.name}}}", f"{{{parameter.name}:.+}}")
        return path


get = partial(Endpoint, "GET")
post = partial(Endpoint, "POST")
delete = partial(Endpoint, "DELETE")
get_probe = partial(Endpoint, "GET", is_public=True, is_polled=True)
"""Endpoint for probes and scrapers."""
post_command = partial(Endpoint, "POST", is_control=True)
"""Endpoint that controls the server."""

ENDPOINTS_BY_ROUTE = web.AppKey("endpoints_by_route", Mapping[web.AbstractRoute, Endpoint])
"""Endpoints of an application. A GET endpoint has two routes."""


def register_endpoints(app: web.Application, endpoints: Iterable[Endpoint]) -> None:
    """Add the routes of all endpoints to an aiohttp application."""
    app[ENDPOINTS_BY_ROUTE] = {
        app.router.add_route(
            method, endpoint.route_path, endpoint.handler, expect_handler=defer_100_continue
        ): endpoint
        for endpoint in endpoints
        for method in endpoint.methods
    }


def find_endpoint(request: web.Request) -> Endpoint | None:
    """Return the endpoint that an HTTP request is routed to; None if no path and method match."""
    return request.app[ENDPOINTS_BY_ROUTE].get(request.match_info.route)
