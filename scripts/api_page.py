"""Generate docs/api.md from the table of endpoints: `python -m scripts.api_page`."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gllm.config.limits import limits_table
from gllm.frontend.endpoint import Endpoint
from gllm.frontend.fields.base import ModelRequestFields, RequestFields
from gllm.frontend.routes.registry import ENDPOINTS

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
INTRODUCTION = """\
# The HTTP API

Written by `python -m scripts.api_page` from the code; `GET /openapi.json` says it to programs.

Every error of every endpoint is `{"error": {"message", "type", "param", "code"}}`; a field that is
not as it has to be is 400 with its name in `param`. Null means unset. A field that is not known is
ignored, with one warning in the log; one that is known and not done here is refused by name, but
for the values its row shows, which ask for nothing. Paths that answer GET answer HEAD too.

| status | when |
| --- | --- |
| 400 | a field or the body is not as it has to be |
| 401 | a key is missing or wrong |
| 403 | a page of another origin asks, or `Host` is not a name of this server |
| 404, 405 | no such path, model or method |
| 408 | headers take longer than `--header-timeout`, or the body than `--read-timeout` |
| 413 | the body is above `--max-body-bytes`, once decompressed |
| 414, 431 | the URL is above 8 KiB, a header above 16 KiB, all of them above 64 KiB or 100 |
| 415 | the body has another Content-Encoding than gzip and deflate |
| 429 | above `--rate-limit`; `Retry-After` says for how long |
| 501 | known, not done or switched off |
| 503 | loading, full, draining or dead; `Retry-After` says when to ask again |

## Keys

With `--api-key`, `--api-key-file` or `GLLM_API_KEY` a request has to bear one of the keys, as
`Authorization: Bearer KEY` or `x-api-key: KEY`. Only `/health`, `/ready` and `/metrics` answer
without, for probes and scrapers have none, and the chat page, which asks for one. `/version` and
`/openapi.json` do not: who has no key needs neither, and a version tells what to try. All keys may
do the same. A key on the command line is seen by `ps` for as long as the process starts, and stays
in the shell's history: put keys into a file that only the server's user can read.

`--rate-limit N` lets each key compute N requests a minute, all at once if it likes; without keys it
counts by address (IPv6 by /64), so behind a proxy all clients are one. Answers tell the state in
`x-ratelimit-limit-requests`, `x-ratelimit-remaining-requests` and `x-ratelimit-reset-requests`.

## Connections

`X-Request-Id` is taken (up to 128 of `A-Z a-z 0-9 . _ : -`) or made, answered, and named by the
log's lines. A client that disconnects aborts its request. A stream that has nothing to say for 7 to
14 s opens, if it had not, and sends the comment `: keep-alive`; what fails after that is an `error`
event, what fails before has its status. A client that reads slowly gets fewer, larger events; one
that reads nothing for `--write-timeout` seconds is cut off.

A connection on which no request comes is closed after `--header-timeout` seconds, one that is idle
between requests after `--keep-alive-timeout`. Behind a proxy the latter has to be longer than the
proxy keeps its connections: the default is enough for a minute, and load balancers that keep them
for ten minutes need 650.

After SIGTERM new requests get 503, every answer says `Connection: close`, running requests get
`--shutdown-timeout` seconds; a second signal ends at once.

`--ssl-certfile` and `--ssl-keyfile` switch to https, and with `--ssl-ca-certs` clients have to show
a certificate, probes too.

## Browsers

Any web page that a user visits can send requests to a server on the user's machine or network. Two
checks on every path keep such pages out:

- A request with an `Origin` that is not the server's own is 403 (`origin_not_allowed`), with a
  valid key too. `--allowed-origins https://app.example.com` accepts the pages of that origin and
  answers their preflights (CORS); `*` accepts all origins, also `null`. Cookies and client
  certificates of a browser are never allowed to other origins, so a page sends its key itself. The
  chat page is of the server's own origin: `Sec-Fetch-Site` says `same-origin`, or where a browser
  does not send it, `Origin` has the host and port of `Host`.
- A server bound to a loopback address accepts only loopback names in `Host` (`localhost`,
  `127.0.0.1`, `[::1]`, any port); other names are 403 (`host_not_allowed`). That is the protection
  against DNS rebinding, where another site's name resolves to the server's address. Behind a proxy
  that passes `Host` on, name it: `--allowed-hosts llm.example.com`. A server bound to another
  address accepts every name unless `--allowed-hosts` is given, then only those, loopback names and
  IP addresses, which cannot be rebound and which probes use.

Clients that are no browsers send no `Origin` and are not affected by the first check.

## Limits

What is larger is 400 and names the field and the limit, before any work on it. Grammars have limits
of their own ([structured-output.md](structured-output.md)); `--max-body-bytes` counts a body as it
is after decompression (`Content-Encoding: gzip` or `deflate`), and `--max-choices` limits `n`. How
long a request of each size keeps the server from others:
[benchmarks/frontend-gaps.md](benchmarks/frontend-gaps.md).

"""
ENDPOINTS_TITLE = """
## Special tokens in texts

What messages, tool results, arguments and tools hold is text, special tokens that they spell
included: `<|im_end|>` in a message ends no turn. Only the chat template writes control tokens.
`parse_special: true`, llama.cpp's name for it, takes those in a request for control tokens too. The
prompts of `/v1/completions` and of `/tokenize` are the whole text that a model gets, so there
special tokens always are control tokens.

## Endpoints

"""
TRANSLATIONS = """
## How other APIs are served

`/v1/responses` and `/v1/messages` ask chat completions, and answer in their own shape. An error
names the field as the client knows it. Where there is no counterpart:

- Nothing is kept. `store` has no effect, answers say `"store": false`, and what names a stored
  answer, conversation or template is refused.
- `instructions`, `system`, and system and developer messages at the beginning become one system
  message: chat templates have no place for more. In `/v1/messages`, a user's messages in a row
  become one.
- Reasoning is told whole: as `reasoning_text`, or as a `thinking` block with an empty signature.
  Given back, it reaches the chat template as `reasoning_content`. Summaries and encrypted contents
  are neither made nor read, and no budget of reasoning is kept.
- Tools are functions that the client runs; every other type is refused, as are images and files.
  What else items, parts, blocks and tools hold (`status`, `cache_control`, `is_error`, `strict`)
  has no effect.
- A stream cannot take back a call that turns out to be none: its item ends as `incomplete`, its
  block without a whole object. An answer that is not streamed leaves it out, but for its text.
- Messages that end with the assistant's are gone on with; input that ends so is answered anew.
- Every token of the prompt that is not read from the prefix cache counts as plain input: none is
  told as written to it. In `/v1/messages`, `input_tokens` are those without the cached ones.
- An answer that `/abort` ends is `incomplete` with the reason `abort`; of `/v1/messages`, that is
  the `stop_reason`.
- Errors of `/v1/messages` have `"type": "error"` beside `error`.
"""


def render_page() -> str:
    """Return the page in Markdown."""
    return "".join(
        [
            INTRODUCTION,
            limits_table(),
            ENDPOINTS_TITLE,
            "\n".join([*_endpoint_table(ENDPOINTS), *_field_sections(ENDPOINTS)]),
            "\n",
            TRANSLATIONS,
        ]
    )


def _endpoint_table(endpoints: Iterable[Endpoint]) -> Iterator[str]:
    """Yield the lines of the table of endpoints."""
    yield "| endpoint | what it does |"
    yield "| --- | --- |"
    for endpoint in endpoints:
        yield f"| `{endpoint.method} {endpoint.path}` | {endpoint.summary} |"


def _field_sections(endpoints: Iterable[Endpoint]) -> Iterator[str]:
    """Yield a section with the fields of each request body, then the sections that bodies share."""
    shared: dict[type[RequestFields], None] = {}
    for endpoint in endpoints:
        fields = endpoint.request_schema
        if fields is None:
            continue
        bases = [base for base in fields.__mro__[1:] if issubclass(base, RequestFields)]
        bases = [base for base in bases if base not in (RequestFields, ModelRequestFields)]
        shared.update(dict.fromkeys(bases))
        yield from ("", f"## {endpoint.method} {endpoint.path}", "")
        yield from _field_table(fields)
        if bases:
            links = (f"[{_title(base)}](#{_anchor(_title(base))})" for base in bases)
            yield from ("", f"Also accepted: {', '.join(links)}.")
    for base in shared:
        yield from ("", f"## {_title(base)}", "", *_field_table(base))


def _title(fields: type[RequestFields]) -> str:
    """Return the first line of a schema's docstring as a title."""
    return (fields.__doc__ or "").strip().splitlines()[0].removesuffix(".")


def _anchor(title: str) -> str:
    """Return the anchor of a heading, as GitHub derives it."""
    return title.lower().replace(" ", "-").replace(",", "")


def _field_table(fields: type[RequestFields]) -> Iterator[str]:
    """Yield the lines of a table of the fields that a schema adds to its bases."""
    (_,), schemas = msgspec.json.schema_components([fields])
    properties = schemas[fields.__name__]["properties"]
    own_names = set(fields.__annotations__)
    if ModelRequestFields in fields.__bases__:
        own_names |= ModelRequestFields.__annotations__.keys()
    yield "| field | type | what it does |"
    yield "| --- | --- | --- |"
    for name, schema in properties.items():
        if name in own_names:
            yield f"| `{name}` | {_type_name(schema)} | {schema.get('description', '')} |"
    for name, purpose in vars(fields).get("ignored_fields", {}).items():
        yield f"| `{name}` | any | accepted without effect: {purpose} |"
    for name, unsupported in vars(fields).get("unsupported_fields", {}).items():
        if name not in properties:
            values = " or ".join(
                f"`{msgspec.json.encode(value).decode()}`" for value in unsupported.accepted_values
            )
            yield f"| `{name}` | {values or 'none'} | {unsupported.reason} |"


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


if __name__ == "__main__":
    PAGE.write_text(render_page(), encoding="utf-8")
