"""What the API takes, read off the registry of endpoints: an OpenAPI document and a page.

Owns both forms. Knows nothing of what endpoints do beyond their docstrings, schemas and fields'
descriptions.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from gllm import __version__
from gllm.frontend.endpoint import Endpoint
from gllm.frontend.errors import TYPES
from gllm.frontend.fields.body import Body, ModelBody

Json = dict[str, Any]
ERROR = {
    "type": "object",
    "required": ["error"],
    "additionalProperties": False,
    "properties": {
        "type": {"const": "error", "description": "of /v1/messages alone"},
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": sorted(set(TYPES.values()))},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        },
    },
}

KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""How a key may be sent; whether one has to be is the server's to say."""


def openapi(endpoints: Sequence[Endpoint]) -> Json:
    """The OpenAPI 3.1 document of endpoints."""
    bodies = {endpoint.body for endpoint in endpoints if endpoint.body is not None}
    answers = {kind for one in endpoints for kind in (one.answer, one.event) if kind is not None}
    types = sorted({*bodies, *answers}, key=lambda kind: kind.__name__)
    _, schemas = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    for body in bodies:
        _complete(schemas[body.__name__], body)
    paths: dict[str, Json] = {}
    for endpoint in endpoints:
        for method in endpoint.methods:
            paths.setdefault(endpoint.path, {})[method.lower()] = _operation(endpoint, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gllm", "version": __version__},
        "paths": paths,
        "components": {"schemas": {**schemas, "Error": ERROR}, "securitySchemes": KEYS},
        "security": [{}, *({name: []} for name in KEYS)],
    }


def _complete(schema: Json, body: type[Body]) -> None:
    """Add to the schema of a body what the types of its fields do not say."""
    properties = schema["properties"]
    for each in properties.values():
        # A field's own range is narrower than that of its type.
        for bound in ("minimum", "maximum"):
            if bound in each or f"exclusive{bound.capitalize()}" in each:
                for kind in each.get("anyOf", []):
                    kind.pop(bound, None)
    for name in body.required:
        kinds = properties[name].get("anyOf", [])
        properties[name].pop("default", None)
        if {"type": "null"} in kinds:
            kinds.remove({"type": "null"})
            if len(kinds) == 1:
                properties[name] |= properties[name].pop("anyOf")[0]
    if body.required:
        schema["required"] = list(body.required)
    if body.required_one_of:
        schema["anyOf"] = [{"required": [name]} for name in body.required_one_of]
    for name, purpose in body.inert.items():
        properties.setdefault(name, {"description": f"no effect: {purpose}"})
    for name, refused in body.refused.items():
        values = [None, *refused.off]
        properties.setdefault(name, {"enum": values, "description": f"refused: {refused.why}"})


def _reference(kind: type[msgspec.Struct] | None) -> Json:
    return {} if kind is None else {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}


def _operation(endpoint: Endpoint, method: str) -> Json:
    content: Json = {} if method == "HEAD" else {endpoint.content: _reference(endpoint.answer)}
    if endpoint.streams:
        content["text/event-stream"] = _reference(endpoint.event)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    described: Json = {
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": endpoint.summary, "content": content},
            "4XX": {"description": "the request is at fault", "content": error},
            "5XX": {"description": "the server is at fault, or busy", "content": error},
        },
    }
    if endpoint.reason:
        described["responses"] = {"501": {"description": endpoint.reason, "content": error}}
    if endpoint.is_open:
        described["security"] = []
    if names := re.findall(r"{(\w+)}", endpoint.path):
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        content = {"application/json": {"schema": schema}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def page(endpoints: Sequence[Endpoint]) -> str:
    """Tables in Markdown: of endpoints, of the fields of each, and of fields that several share."""
    lines = ["| endpoint | what it does |", "| --- | --- |"]
    lines += [f"| `{one.method} {one.path}` | {one.summary} |" for one in endpoints]
    shared: dict[type[Body], None] = {}
    for endpoint in endpoints:
        body = endpoint.body
        if body is None:
            continue
        lines += ["", f"## {endpoint.method} {endpoint.path}", ""]
        parents = [base for base in body.__mro__[1:] if issubclass(base, Body)]
        parents = [base for base in parents if base not in (Body, ModelBody)]
        shared.update(dict.fromkeys(parents))
        lines += _fields(body)
        lines += ["", f"And {', and '.join(_title(one).lower() for one in parents)}."] * bool(
            parents
        )
    for parent in shared:
        lines += ["", f"## {_title(parent)}", "", *_fields(parent)]
    return "\n".join(lines) + "\n"


def _title(body: type[Body]) -> str:
    """What a schema is, by its docstring."""
    return (body.__doc__ or "").strip().splitlines()[0].removesuffix(".")


def _fields(body: type[Body]) -> Iterator[str]:
    """The fields that a schema adds to those of its parents as a table: what they do, what has no
    effect, what is refused."""
    (_,), schemas = msgspec.json.schema_components([body])
    properties = schemas[body.__name__]["properties"]
    own = set(body.__annotations__)
    if ModelBody in body.__bases__:
        own |= ModelBody.__annotations__.keys()
    yield "| field | type | what it does |"
    yield "| --- | --- | --- |"
    for name, schema in properties.items():
        if name in own:
            yield f"| `{name}` | {_kind(schema)} | {schema.get('description', '')} |"
    for name, why in vars(body).get("inert", {}).items():
        yield f"| `{name}` | any | accepted without effect: {why} |"
    for name, refused in vars(body).get("refused", {}).items():
        if name not in properties:
            values = " or ".join(f"`{msgspec.json.encode(off).decode()}`" for off in refused.off)
            yield f"| `{name}` | {values or 'none'} | {refused.why} |"


def _kind(schema: Json) -> str:
    """A type in words; null, which every field may be, is left out."""
    if "anyOf" in schema:
        kinds = [_kind(one) for one in schema["anyOf"] if one.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    match schema.get("type"):
        case "array":
            return f"list of {_kind(schema.get('items', {}))}"
        case str(kind):
            return kind
    return "object" if "$ref" in schema else "any"
