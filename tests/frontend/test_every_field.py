"""Values that no field may have, for every field of every endpoint, made from the schemas."""

import json

import msgspec
import pytest

from gllm.frontend.routes.registry import ENDPOINTS
from gllm.text.surrogates import replace_escaped_surrogates
from tests.support.http.endpoint_bodies import EXAMPLES, NEED_ROUTERS

BODIES = [one for one in ENDPOINTS if one.request_schema is not None]
DIFFERENT = list({one.request_schema: one for one in reversed(BODIES)}.values())
"""One endpoint for each schema of a body."""
SCHEMAS = {one.path: one.request_schema for one in BODIES if one.request_schema is not None}
VALUES = [
    "NaN",
    "Infinity",
    "-Infinity",
    '"\\ud800"',
    '["\\udfff"]',
    '{"\\ud800": 1}',
    "tru",
    "1" + "0" * 30,
    "1" + "0" * 5000,
    "1e308",
    "1e999",
    str(2**31),
    str(2**63),
    str(-(2**63) - 1),
    "true",
    "0",
    "1",
    "-1",
    "0.5",
    '""',
    '"x"',
    '"7"',
    '"\\u0000"',
    json.dumps("x" * 100_000),
    "[]",
    "[null]",
    "[[]]",
    "[{}]",
    '["7"]',
    "[true]",
    f"[{2**63}]",
    json.dumps(["x"] * 2000),
    json.dumps([1] * 2000),
    "{}",
    '{"x": 1}',
    '{"": null}',
    f'{{"{2**63}": 1}}',
    '{"type": "x"}',
    "[" * 90 + "]" * 90,
]
"""As JSON, or nearly."""


def test_every_endpoint_has_an_example():
    assert EXAMPLES.keys() == {one.path for one in BODIES}


async def test_examples_work(server):
    for path, example in EXAMPLES.items():
        answer = await server.post(path, example)
        code = None if answer.status == 200 else answer.error["code"]
        assert code == NEED_ROUTERS.get(path), path


def bodies(endpoint, stride=1):
    """(field, value, body) for every field of an endpoint and values, as JSON, or nearly.

    With a `stride` a field has one of so many values, the next field the next ones.
    """
    for index, field in enumerate(msgspec.structs.fields(endpoint.request_schema)):
        rest = {k: v for k, v in EXAMPLES[endpoint.path].items() if k != field.name}
        begin = json.dumps(rest).removesuffix("}") + (", " if rest else "")
        for value in VALUES[index % stride :: stride]:
            yield field, value, f"{begin}{json.dumps(field.name)}: {value}}}".encode()


def refused_bodies():
    """(path, body) of every endpoint that no schema takes."""
    return [
        (endpoint.path, body)
        for endpoint in BODIES
        for field, value, body in bodies(endpoint)
        if not fits(field.type, value)
    ]


def fits(kind, text):
    """Whether a schema takes a value."""
    try:
        repaired = replace_escaped_surrogates(text.encode())
        msgspec.convert(msgspec.json.decode(repaired), kind, str_keys=True)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False
    return True


async def test_no_value_of_some_breaks_the_server(server):
    num_refused = 0
    for endpoint in DIFFERENT:
        wrong, refused = await post_all(server, endpoint, bodies(endpoint, stride=8))
        assert wrong == [], endpoint.path
        num_refused += refused
    assert num_refused > 100


@pytest.mark.full
@pytest.mark.parametrize("endpoint", DIFFERENT, ids=lambda one: one.path)
async def test_no_value_of_a_field_breaks_the_server(server, endpoint):
    wrong, refused = await post_all(server, endpoint, bodies(endpoint))
    assert wrong == []
    assert refused > 7 * len(msgspec.structs.fields(endpoint.request_schema))
    assert server.engine.num_requests == 0
    answer = await server.post(endpoint.path, EXAMPLES[endpoint.path])
    assert answer.status == 200 or answer.error["code"] == NEED_ROUTERS[endpoint.path]


async def post_all(server, endpoint, cases):
    """Post bodies; return what was wrong with the answers, and the number of refused values."""
    wrong, refused = [], 0
    for field, value, body in cases:
        async with server.client.post(endpoint.path, data=body) as response:
            text = await response.text()
        status = response.status
        names = (field.name, None) if value == "tru" else (field.name,)
        if fits(field.type, value):
            good = status < 500 and not (status == 200 and '"error": {' in text)
        else:
            refused += 1
            good = status == 400 and json.loads(text)["error"]["param"] in names
        if not good:
            wrong.append((field.name, value[:40], status, text[:200]))
    return wrong, refused


REFUSED = [
    (path, name)
    for path, schema in SCHEMAS.items()
    if path in {one.path for one in DIFFERENT}
    for name in schema.unsupported_fields
    if name not in schema.__struct_fields__
]


async def test_what_is_not_done_is_said(server):
    assert len(REFUSED) > 10
    for path, name in REFUSED:
        odd = await server.post(path, {**EXAMPLES[path], name: {"odd": 1}})
        assert (odd.status, odd.error["param"]) == (400, name), path
        for value in (None, *SCHEMAS[path].unsupported_fields[name].accepted_values):
            answer = await server.post(path, {**EXAMPLES[path], name: value})
            assert answer.status == 200, (path, name, value)
