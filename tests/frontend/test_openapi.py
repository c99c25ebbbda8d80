"""What the API's page and its OpenAPI document say is what the server takes."""

import json
import re

import msgspec
from aiohttp.web import Application

from gllm.frontend.openapi import build_openapi_document
from gllm.frontend.routes.registry import ENDPOINTS
from scripts import api_page

BODIES = [one for one in ENDPOINTS if one.request_schema is not None]


def test_the_page_is_as_the_code():
    page = api_page.PAGE.read_text(encoding="utf-8")
    assert api_page.with_current_parts(page) == page, "run python -m scripts.api_page"


async def test_the_document_is_served(server):
    async with server.client.get("/openapi.json") as response:
        assert await response.json() == json.loads(json.dumps(build_openapi_document(ENDPOINTS)))


def test_the_document_says_what_needs_no_key():
    document = build_openapi_document(ENDPOINTS)
    assert set(document["components"]["securitySchemes"]) == {"bearer", "header"}
    for endpoint in ENDPOINTS:
        described = document["paths"][endpoint.path][endpoint.method.lower()]
        assert (described.get("security") == []) == endpoint.is_public


def test_the_document_has_every_route(server):
    app: Application = server.client.server.app
    resources = [(route.method, route.resource) for route in app.router.routes()]
    routed = {(method, one.canonical) for method, one in resources if one is not None}
    assert all(one is not None for _, one in resources)
    paths = build_openapi_document(ENDPOINTS)["paths"]
    described = {(method.upper(), path) for path, one in paths.items() for method in one}
    assert described == routed


def test_declarations_of_an_endpoint_agree():
    for endpoint in ENDPOINTS:
        parameters = [parameter.name for parameter in endpoint.path_parameters]
        assert re.findall(r"{(\w+)}", endpoint.path) == parameters
        fields = endpoint.request_schema
        has_stream = fields is not None and "stream" in fields.__struct_fields__
        # A rendered request is not run, whatever it says of its answer.
        can_stream = has_stream and not endpoint.path.endswith("/render")
        assert endpoint.can_stream == can_stream, endpoint.path


def test_every_field_is_described():
    for endpoint in BODIES:
        body = endpoint.request_schema
        assert body is not None
        _, schemas = msgspec.json.schema_components([body])
        for name, schema in schemas[body.__name__]["properties"].items():
            assert schema.get("description"), (endpoint.path, name)


def test_references_lead_somewhere():
    document = build_openapi_document(ENDPOINTS)

    def references(value):
        if isinstance(value, dict):
            yield from [value["$ref"]] if "$ref" in value else []
            value = list(value.values())
        if isinstance(value, list):
            for one in value:
                yield from references(one)

    for reference in set(references(document["paths"])):
        found = document
        for step in reference.removeprefix("#/").split("/"):
            found = found[step]
        assert found["type"] == "object"
