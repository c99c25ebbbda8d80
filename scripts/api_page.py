"""Write the generated parts of docs/api.md: `python -m scripts.api_page`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gllm.frontend.endpoint import Endpoint
from gllm.frontend.fields.base import ModelRequestFields, RequestFields
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.frontend.routes.registry import ENDPOINTS
from gllm.options.limits import limits_table
from scripts.page_parts import replace_parts

PAGE = Path(__file__).parent.parent / "docs" / "api.md"


def with_current_parts(page: str) -> str:
    """Return the page with its generated parts up to date."""
    return replace_parts(page, PARTS)


def endpoint_table() -> str:
    """Return the table of endpoints."""
    return _endpoint_table(ENDPOINTS)


def cluster_endpoint_table() -> str:
    """Return the table of the endpoints of a cluster's master."""
    return _endpoint_table(CLUSTER_ENDPOINTS)


def cluster_field_sections() -> str:
    """Return a section per request body of a cluster's master."""
    return "\n".join(_field_lines(CLUSTER_ENDPOINTS)).rstrip("\n") + "\n"


def _endpoint_table(endpoints: Iterable[Endpoint]) -> str:
    lines = ["| endpoint | effect |", "| --- | --- |"]
    for endpoint in endpoints:
        lines.append(f"| `{endpoint.method} {endpoint.path}` | {endpoint.summary} |")
    return "\n".join(lines) + "\n"


def field_sections() -> str:
    """Return a section per request body, then the sections of fields that bodies share."""
    return "\n".join(_field_lines(ENDPOINTS)).rstrip("\n") + "\n"


def _field_lines(endpoints: Iterable[Endpoint]) -> Iterator[str]:
    """Yield the lines of `field_sections`."""
    shared: dict[type[RequestFields], None] = {}
    described: dict[type[RequestFields], str] = {}
    for endpoint in endpoints:
        if endpoint.query_parameters:
            yield from (f"## {endpoint.method} {endpoint.path}", "", *_query_table(endpoint), "")
        fields = endpoint.request_schema
        if fields is None:
            continue
        if fields in described:
            other = described[fields]
            yield from (f"## {endpoint.method} {endpoint.path}", "")
            yield from (f"The fields are those of [{other}](#{_anchor(other)}).", "")
            continue
        described[fields] = f"{endpoint.method} {endpoint.path}"
        bases = [base for base in fields.__mro__[1:] if issubclass(base, RequestFields)]
        bases = [base for base in bases if base not in (RequestFields, ModelRequestFields)]
        shared.update(dict.fromkeys(bases))
        yield from (f"## {endpoint.method} {endpoint.path}", "")
        yield from _field_tables(fields)
        if bases:
            yield from ("", "Also accepted:", "")
            yield from (f"- [{_title(base)}](#{_anchor(_title(base))})" for base in bases)
        yield ""
    for base in shared:
        yield from (f"## {_title(base)}", "", *_field_tables(base), "")


def _query_table(endpoint: Endpoint) -> Iterator[str]:
    """Yield the table of the parameters of an endpoint's query string."""
    yield from ("| query parameter | effect |", "| --- | --- |")
    for parameter in endpoint.query_parameters:
        yield _row(f"`{parameter.name}`", parameter.description)


def _title(fields: type[RequestFields]) -> str:
    """Return the first line of a schema's docstring as a title."""
    return (fields.__doc__ or "").strip().splitlines()[0].removesuffix(".")


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub derives it."""
    return title.lower().replace(" ", "-").replace(",", "").replace("/", "")


def _field_tables(fields: type[RequestFields]) -> Iterator[str]:
    """Yield tables of the fields that a schema adds to its bases: supported, ignored, rejected."""
    (_,), schemas = msgspec.json.schema_components([fields])
    properties = schemas[fields.__name__]["properties"]
    own_names = set(fields.__annotations__)
    if ModelRequestFields in fields.__bases__:
        own_names |= ModelRequestFields.__annotations__.keys()
    yield from ("| field | type | effect |", "| --- | --- | --- |")
    for name, schema in properties.items():
        if name in own_names:
            yield _row(f"`{name}`", _type_name(schema), schema.get("description", ""))
    if ignored := vars(fields).get("ignored_fields"):
        yield from ("", "| ignored field | purpose in other servers |", "| --- | --- |")
        yield from (_row(f"`{name}`", purpose) for name, purpose in ignored.items())
    if unsupported := vars(fields).get("unsupported_fields"):
        yield from ("", "| rejected field | accepted values | error |", "| --- | --- | --- |")
        for name, field in unsupported.items():
            if name not in properties:
                values = [msgspec.json.encode(value).decode() for value in field.accepted_values]
                accepted = " or ".join(f"`{value}`" for value in values)
                yield _row(f"`{name}`", accepted or "none", f"{name} {field.reason}")


def _row(*cells: str) -> str:
    """Return a row of a table."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |"


def _type_name(schema: dict[str, Any]) -> str:
    """Return the type of a JSON Schema in words, without null, which every field accepts."""
    if "anyOf" in schema:
        names = [_type_name(member) for member in schema["anyOf"] if member.get("type") != "null"]
        return " or ".join(dict.fromkeys(names))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"] if value is not None)
    match schema.get("type"):
        case "array":
            return f"list of {_type_name(schema.get('items', {}))}"
        case str(name):
            return name
    return "object" if "$ref" in schema else "any"


PARTS = {
    "limits": limits_table,
    "endpoints": endpoint_table,
    "fields": field_sections,
    "cluster endpoints": cluster_endpoint_table,
    "cluster fields": cluster_field_sections,
}
"""Functions that return the generated parts, by name."""

if __name__ == "__main__":
    PAGE.write_text(with_current_parts(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
