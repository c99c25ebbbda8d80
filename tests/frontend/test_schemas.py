"""The OpenAPI document: required fields, ranges and answer schemas are those of the server.

`schema_check.py` validates the requests and answers of all tests of this folder.
"""

import json
import math
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from gllm.frontend.fields.base import RequestFields
from gllm.frontend.fields.generation import HandoffFields, SamplingFields
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT_PATH, TEXT_PATH, serving
from tests.support.http.endpoint_bodies import EXAMPLES
from tests.support.http.schema_check import complaint, document

HANDOFF_FIELDS = {*HandoffFields.__struct_fields__} - {*SamplingFields.__struct_fields__}
BODIES = [one for one in ENDPOINTS if one.request_schema is not None]
QUICK = (CHAT_PATH, "/v1/messages", "/v1/responses", "/v1/embeddings")
LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
WITH: dict[str, dict[str, Any]] = {
    "top_logprobs": {"logprobs": True},
    "max_tokens": {"echo": True},
    "min_tokens": {"max_tokens": 2**31 - 1, "max_output_tokens": 2**31 - 1},
}
"""What a field needs beside it."""


def schema_of(body: type[RequestFields]):
    return document()["components"]["schemas"][body.__name__]


def bounds(body):
    """(field, bound, step beyond it, whether the bound itself is allowed) of all numbers."""
    for name, schema in schema_of(body)["properties"].items():
        for part in [schema, *schema.get("anyOf", [])]:
            for key in (*LOWER, *UPPER):
                if key in part:
                    kinds = json.dumps(schema)
                    unit = 1 if '"integer"' in kinds else 1e-9
                    beyond = (-1 if key in LOWER else 1) * unit
                    yield name, part[key], beyond, not key.startswith("exclusive")


@pytest.mark.full
def test_components_are_json_schemas():
    for schema in document()["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)


def test_every_answer_has_a_schema():
    for endpoint in ENDPOINTS:
        described = document()["paths"][endpoint.path][endpoint.method.lower()]["responses"]
        if endpoint.unsupported_reason:
            assert list(described) == ["501"], endpoint.path
            continue
        contents = described["200"]["content"]
        for kind, content in contents.items():
            is_json = kind in ("application/json", "text/event-stream")
            has_schema = "schema" in content
            assert has_schema == is_json or endpoint.path == "/openapi.json", endpoint.path
        assert endpoint.can_stream == ("text/event-stream" in contents), endpoint.path


async def test_fields_that_are_required_are_missed_by_name(server):
    for endpoint in BODIES:
        body, example = endpoint.request_schema, EXAMPLES[endpoint.path]
        assert body is not None
        assert complaint(body.__name__, example) == ""
        named = schema_of(body).get("required", [])
        assert named or body.required_any_of, endpoint.path
        for name in named:
            less = {key: value for key, value in example.items() if key != name}
            for wrong in (less, {**less, name: None}):
                answer = await server.post(endpoint.path, wrong)
                assert (answer.status, answer.error["param"]) == (400, name), endpoint.path
                assert complaint(body.__name__, wrong), endpoint.path
        if body.required_any_of:
            answer = await server.post(endpoint.path, {})
            assert answer.status == 400, endpoint.path
            assert answer.error["param"] in body.required_any_of, endpoint.path
            assert complaint(body.__name__, {}), endpoint.path


@pytest.mark.parametrize(
    "endpoint",
    [
        # The others share their fields with these.
        pytest.param(one, marks=[] if one.path in QUICK else [pytest.mark.full])
        for one in BODIES
    ],
    ids=lambda one: one.path,
)
async def test_ranges_are_those_of_the_server(engine, endpoint):
    engine.reply, engine.max_model_len = "Hi", 2**31 - 1
    known = endpoint.request_schema.__struct_fields__
    async with serving(engine, max_choices=2**31 - 1) as server:
        for name, bound, beyond, is_allowed in bounds(endpoint.request_schema):
            more = {key: value for key, value in WITH.get(name, {}).items() if key in known}
            example = {**EXAMPLES[endpoint.path], **more}
            outside = {**example, name: bound + beyond}
            assert complaint(endpoint.request_schema.__name__, outside), (name, bound)
            answer = await server.post(endpoint.path, outside)
            assert (answer.status, answer.error["param"]) == (400, name), (name, bound)
            if name == "n" and bound > 1:
                continue  # as many choices as there are integers
            within = {**example, name: bound if is_allowed else math.nextafter(bound, 1)}
            answer = await server.post(endpoint.path, within)
            allowed = answer.status == 200 or answer.error["param"] != name
            # Fields of hand-offs need an engine with KV transfers.
            assert allowed or name in ("dimensions", *HANDOFF_FIELDS), (name, bound, answer.json)


def test_there_are_ranges():
    names = {(one.path, name) for one in BODIES for name, *_ in bounds(one.request_schema)}
    for path in (CHAT_PATH, TEXT_PATH):
        for name in ("temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens"):
            assert (path, name) in names
        for name in ("presence_penalty", "frequency_penalty", "repetition_penalty", "priority"):
            assert (path, name) in names


async def test_an_answer_of_another_shape_is_noticed(engine):
    engine.max_model_len = "long"
    with pytest.raises(AssertionError, match="'long' is not of type 'integer'"):
        async with serving(engine) as server, server.client.get("/v1/models") as response:
            assert response.status == 200


async def test_answers_are_seen(server):
    await server.chat()
    await server.stream(TEXT_PATH)
    await server.post("/nowhere", {})
    assert (server.schemas.requests, server.schemas.answers) == (2, 1)
