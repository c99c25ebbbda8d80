"""Every request that is accepted and every answer, against what /openapi.json says of them."""

import functools
import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from jsonschema import Draft202012Validator

from gllm.frontend.endpoint import Endpoint, find_endpoint
from gllm.frontend.errors import Handler
from gllm.frontend.fields.parsing import decompress
from gllm.frontend.openapi import build_openapi_document
from gllm.frontend.routes.registry import ENDPOINTS

MOST_BYTES = 2**20
"""Of an inflated body."""

BY_PATH = {one.path: one for one in ENDPOINTS if one.method == "POST"}


@functools.cache
def document() -> dict[str, Any]:
    return build_openapi_document(ENDPOINTS)


@functools.cache
def validator(name: str) -> Draft202012Validator:
    """Of a component of the document."""
    components = document()["components"]
    return Draft202012Validator(
        {"$ref": f"#/components/schemas/{name}", "components": {"schemas": components["schemas"]}}
    )


def complaint(name: str, value: object) -> str:
    """Why a value does not fit a component; empty where it does."""
    error = next(validator(name).iter_errors(value), None)
    if error is None:
        return ""
    return f"{name}: {error.message[:300]} at {error.json_path} ({list(error.schema_path)})"


class SchemaCheck:
    """What was wrong with the requests and answers of a server."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self.requests = self.answers = 0

    def install(self, app: web.Application) -> None:
        """See what goes through all middleware."""

        @web.middleware
        async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
            response = await handler(request)
            endpoint = find_endpoint(request)
            if isinstance(response, web.Response) and request.method != "HEAD":
                self._answer(endpoint, response)
            has_body = endpoint is not None and endpoint.request_schema is not None
            if endpoint is not None and has_body and response.status == 200:
                self._request(endpoint, await request.read(), request.headers)
            return response

        app.middlewares.insert(0, check)

    def events(self, path: str, events: list[Any]) -> None:
        """Check the events of a stream."""
        kinds = [*(kind.__name__ for kind in BY_PATH[path].event_schemas), "ErrorResponse"]
        for event in events:
            complaints = [complaint(kind, event) for kind in kinds]
            if all(complaints):
                self.complaints += complaints

    def _answer(self, endpoint: Endpoint | None, response: web.Response) -> None:
        if response.content_type != "application/json" or not isinstance(response.body, bytes):
            return
        value = json.loads(response.body)
        if response.status >= 400:
            self._note("ErrorResponse", value)
        elif endpoint is not None and endpoint.response_schema is not None:
            for each in value if endpoint.answers_list else [value]:
                self._note(endpoint.response_schema.__name__, each)
            self.answers += 1

    def _request(self, endpoint: Endpoint, body: bytes, headers: Mapping[str, str]) -> None:
        assert endpoint.request_schema is not None
        encoding = headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            body = decompress(body, encoding, MOST_BYTES)
        self._note(endpoint.request_schema.__name__, json.loads(body))
        self.requests += 1

    def _note(self, name: str, value: object) -> None:
        if why := complaint(name, value):
            self.complaints.append(why)
