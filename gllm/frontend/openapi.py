"""Generate the OpenAPI document from the table of endpoints and the schemas of their fields."""

from collections.abc import Sequence

import msgspec

from gllm.frontend.endpoint import Endpoint
from gllm.frontend.fields.base import JsonObject, RequestFields
from gllm.frontend.response_schemas import ErrorResponse
from gllm.options.version import __version__

SECURITY_SCHEMES: JsonObject = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
"""Headers that can carry an API key. The document does not say if the server requires one."""


def build_openapi_document(endpoints: Sequence[Endpoint]) -> JsonObject:
    """Return the OpenAPI 3.1 document of the HTTP API, for /openapi.json."""
    paths: dict[str, JsonObject] = {}
    for endpoint in endpoints:
        for method in endpoint.methods:
            paths.setdefault(endpoint.path, {})[method.lower()] = _operation(endpoint, method)
    return {
        "openapi": "3.1.0",
        "info": {"title": "gllm", "version": __version__},
        "paths": paths,
        "components": {"schemas": _schemas(endpoints), "securitySchemes": SECURITY_SCHEMES},
        "security": [{}, *({name: []} for name in SECURITY_SCHEMES)],
    }


def _schemas(endpoints: Sequence[Endpoint]) -> JsonObject:
    """Return the JSON Schemas of all requests, answers and events by name."""
    request_schemas = {
        endpoint.request_schema for endpoint in endpoints if endpoint.request_schema is not None
    }
    response_schemas = {
        schema
        for endpoint in endpoints
        for schema in (endpoint.response_schema, *endpoint.event_schemas)
        if schema is not None
    }
    types = {ErrorResponse, *request_schemas, *response_schemas}
    _, schemas = msgspec.json.schema_components(
        sorted(types, key=lambda schema: schema.__name__),
        ref_template="#/components/schemas/{name}",
    )
    for fields in request_schemas:
        _add_field_rules(schemas[fields.__name__], fields)
    return schemas


def _add_field_rules(schema: JsonObject, fields: type[RequestFields]) -> None:
    """Add the rules of a request body that the types of its fields do not express."""
    properties = schema["properties"]
    for property_ in properties.values():
        # A field's own range is narrower than that of its type.
        for bound in ("minimum", "maximum"):
            if bound in property_ or f"exclusive{bound.capitalize()}" in property_:
                for member in property_.get("anyOf", []):
                    member.pop(bound, None)
    for name in fields.required_fields:
        _forbid_null(properties[name])
    if fields.required_fields:
        schema["required"] = list(fields.required_fields)
    if fields.required_any_of:
        schema["anyOf"] = [{"required": [name]} for name in fields.required_any_of]
    for name, purpose in fields.ignored_fields.items():
        properties.setdefault(name, {"description": f"ignored: {purpose}"})
    for name, unsupported in fields.unsupported_fields.items():
        values = [None, *unsupported.accepted_values]
        properties.setdefault(name, {"enum": values, "description": f"{name} {unsupported.reason}"})


def _forbid_null(field_schema: JsonObject) -> None:
    """Remove null and the default from the schema of a field, because the field is required."""
    members = field_schema.get("anyOf", [])
    field_schema.pop("default", None)
    if {"type": "null"} in members:
        members.remove({"type": "null"})
        if len(members) == 1:
            field_schema |= field_schema.pop("anyOf")[0]


def _operation(endpoint: Endpoint, method: str) -> JsonObject:
    """Return the OpenAPI operation of an endpoint and one of its methods."""
    error = {"application/json": _reference(ErrorResponse)}
    operation: JsonObject = {"summary": endpoint.summary}
    if endpoint.unsupported_reason:
        operation["responses"] = {
            "501": {"description": endpoint.unsupported_reason, "content": error}
        }
    else:
        operation["responses"] = _responses(endpoint, method, error)
    if endpoint.is_public:
        operation["security"] = []
    if parameters := _parameters(endpoint):
        operation["parameters"] = parameters
    if endpoint.request_schema is not None:
        content = {"application/json": _reference(endpoint.request_schema)}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameters(endpoint: Endpoint) -> list[JsonObject]:
    """Return the parameters of an endpoint's path and query string."""
    placed = [
        *(("path", parameter) for parameter in endpoint.path_parameters),
        *(("query", parameter) for parameter in endpoint.query_parameters),
    ]
    return [
        {"name": parameter.name, "in": place, "description": parameter.description}
        | ({"required": True} if place == "path" else {})
        | {"schema": dict(parameter.schema)}
        for place, parameter in placed
    ]


def _responses(endpoint: Endpoint, method: str, error: JsonObject) -> JsonObject:
    """Return the responses of an endpoint by status."""
    content: JsonObject = {}
    if method != "HEAD":
        answer = _reference(endpoint.response_schema)
        if endpoint.answers_list:
            answer = {"schema": {"type": "array", "items": answer["schema"]}}
        content[endpoint.content_type] = answer
    if endpoint.can_stream:
        events: list[type[msgspec.Struct]] = [*endpoint.event_schemas, ErrorResponse]
        members = [_reference(event)["schema"] for event in events]
        content["text/event-stream"] = {"schema": {"anyOf": members}}
    return {
        "200": {"description": endpoint.summary, "content": content},
        "4XX": {"description": "the request is invalid or not allowed", "content": error},
        "5XX": {"description": "the server failed or is overloaded", "content": error},
    }


def _reference(schema: type[msgspec.Struct] | None) -> JsonObject:
    """Return an OpenAPI media type object that refers to a schema; empty if there is none."""
    if schema is None:
        return {}
    return {"schema": {"$ref": f"#/components/schemas/{schema.__name__}"}}
