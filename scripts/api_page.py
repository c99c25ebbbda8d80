"""Write the generated parts of docs/api.md: `python -m scripts.api_page`."""

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gllm.frontend.endpoint import Endpoint
from gllm.frontend.fields.base import ModelRequestFields, RequestFields
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.frontend.routes.registry import ENDPOINTS
from scripts.api_limits import limits_table
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
    """Return the table of endpoints, those with the same summary in one row."""
    names: dict[str, list[str]] = {}
    for endpoint in endpoints:
        names.setdefault(endpoint.summary, []).append(f"`{endpoint.method} {endpoint.path}`")
    lines = ["| endpoint | effect |", "| --- | --- |"]
    lines += (f"| {', '.join(same)} | {summary} |" for summary, same in names.items())
    return "\n".join(lines) + "\n"


def field_sections() -> str:
    """Return a section per request body, then the sections of fields that bodies share."""
    return "\n".join(_field_lines(ENDPOINTS)).rstrip("\n") + "\n"


def _field_lines(endpoints: Iterable[Endpoint]) -> Iterator[str]:
    """Yield the lines of `field_sections`."""
    # Sections that have described a row of a table, by the row: first those that bodies share.
    rows: dict[str, str] = {}
    bases = dict.fromkeys(
        base for endpoint in endpoints if endpoint.request_schema for base in _bases(endpoint)
    )
    shared = {_title(base): [*_field_tables(base, _title(base), rows)] for base in bases}
    described: dict[type[RequestFields], str] = {}
    for endpoint in endpoints:
        title = f"{endpoint.method} {endpoint.path}"
        if endpoint.query_parameters:
            yield from (f"## {title}", "", *_query_table(endpoint), "")
        fields = endpoint.request_schema
        if fields is None:
            continue
        if fields in described:
            yield from (f"## {title}", "", f"The fields of {_link(described[fields])}.", "")
            continue
        described[fields] = title
        yield from (f"## {title}", "", *_field_tables(fields, title, rows))
        if links := ", ".join(_link(_title(base)) for base in _bases(endpoint)):
            yield from ("", _wrapped(f"Also accepted: {links}."))
        yield ""
    for title, lines in shared.items():
        yield from (f"## {title}", "", *lines, "")


def _bases(endpoint: Endpoint) -> list[type[RequestFields]]:
    """Return the schemas whose fields the body of an endpoint shares with others."""
    assert endpoint.request_schema is not None
    return [
        base
        for base in endpoint.request_schema.__mro__[1:]
        if issubclass(base, RequestFields) and base not in (RequestFields, ModelRequestFields)
    ]


def _wrapped(text: str) -> str:
    """Return a paragraph in lines of at most 120 characters."""
    return textwrap.fill(text, 120, break_long_words=False, break_on_hyphens=False)


def _link(title: str) -> str:
    """Return a link to a section of the page."""
    return f"[{title}](#{_anchor(title)})"


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


def _field_tables(
    fields: type[RequestFields], title: str, described: dict[str, str]
) -> Iterator[str]:
    """Yield tables of the fields that a schema adds to its bases: supported, ignored, rejected.

    Rows of earlier sections, which `described` has, become a link; those of this one are added.
    """
    (_,), schemas = msgspec.json.schema_components([fields])
    properties = schemas[fields.__name__]["properties"]
    own_names = set(fields.__annotations__)
    if ModelRequestFields in fields.__bases__:
        own_names |= ModelRequestFields.__annotations__.keys()
    rows = {
        _row(f"`{name}`", _type_name(schema), schema.get("description", "")): f"`{name}`"
        for name, schema in properties.items()
        if name in own_names
    }
    head = ("| field | type | effect |", "| --- | --- | --- |")
    yield from _table(head, rows, title, described)
    ignored = vars(fields).get("ignored_fields") or {}
    by_purpose: dict[str, list[str]] = {}
    for name, purpose in ignored.items():
        by_purpose.setdefault(purpose, []).append(f"`{name}`")
    if ignored:
        items = (f"{', '.join(names)} ({purpose})" for purpose, names in by_purpose.items())
        yield from ("", _wrapped(f"Ignored: {'; '.join(items)}."))
    by_reason: dict[tuple[str, str], list[str]] = {}
    for name, field in (vars(fields).get("unsupported_fields") or {}).items():
        if name not in properties:
            values = [msgspec.json.encode(value).decode() for value in field.accepted_values]
            accepted = " or ".join(f"`{value}`" for value in values) or "none"
            by_reason.setdefault((accepted, field.reason), []).append(f"`{name}`")
    if by_reason:
        rows = {
            _row(", ".join(names), accepted, reason): ", ".join(names)
            for (accepted, reason), names in by_reason.items()
        }
        head = ("| rejected field | accepted values | reason |", "| --- | --- | --- |")
        yield ""
        yield from _table(head, rows, title, described, are_rejected=True)


def _table(
    head: tuple[str, str],
    rows: dict[str, str],
    title: str,
    described: dict[str, str],
    are_rejected: bool = False,
) -> Iterator[str]:
    """Yield a table of the rows that no earlier section has, then a line with links to the others.

    Args:
        head: the first two lines of the table.
        rows: the names of the fields of each row.
        title: this section.
        described: the section of each row of earlier ones; gets the new rows.
        are_rejected: True for fields that are rejected.
    """
    new = [row for row in rows if row not in described]
    if new:
        yield from (*head, *new)
    earlier: dict[str, list[str]] = {}
    for row, names in rows.items():
        if row in described:
            earlier.setdefault(described[row], []).append(names)
        else:
            described[row] = title
    if earlier:
        if new:
            yield ""
        parts = (f"{', '.join(names)}, as {_link(of)}" for of, names in earlier.items())
        lead = "Rejected: " if are_rejected else "Also: " if new else "Fields: "
        yield _wrapped(f"{lead}{'; '.join(parts)}.")


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
