"""Configuration of the HTTP server around an engine."""

import re
from dataclasses import dataclass

from gllm.config.field_types import convert_fields
from gllm.config.flags import output_folder, parse_bytes
from gllm.config.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.config.output_parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParserConfig,
)
from gllm.observability.logs import LOG_FORMATS


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server around an engine."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on; 0 picks a free one", ge=0, le=65535)
    served_model_name: str | None = option(None, "the name clients ask for; default: the model's")
    shutdown_timeout: float = option(
        30.0, "seconds that running requests get after SIGTERM", ge=0, le=MAX_TIMEOUT_SECONDS
    )
    max_num_queued_requests: int = option(
        2048, "requests in the engine; more get 503", ge=1, le=INT32_MAX
    )
    profile_dir: str | None = option(
        None,
        "folder of the profiles that /start_profile records; default: none are",
        parse=output_folder,
    )
    max_choices: int = option(128, "largest n of a request", ge=1, le=INT32_MAX)
    max_body_bytes: int = option(
        8 * 2**20, "largest request body, as 8MiB", ge=1, le=INT64_MAX, parse=parse_bytes
    )
    api_key: tuple[str, ...] = option(
        (),
        "a key that clients have to send, any number of times, besides those in $GLLM_API_KEY, "
        "separated by commas; ps may show it: a file is safer",
        repeat=True,
        secret=True,
    )
    api_key_file: str | None = option(
        None, "file of such keys, one a line, with # before comments; default: none"
    )
    rate_limit: int | None = option(
        None,
        "requests a minute for each key, or each address without keys; default: no limit",
        ge=1,
        le=INT32_MAX,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin whose pages may use the server (CORS), any number of times, * for all; default: "
        "only the server's own pages",
        repeat=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name that requests may be sent to, any number of times, *.example.com for all below "
        "it, * for all; default: localhost on a loopback --host, else all",
        repeat=True,
    )
    ssl_certfile: str | None = option(
        None, "PEM file of the certificate and those above it, for https; default: plain http"
    )
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's private key")
    ssl_ca_certs: str | None = option(
        None, "PEM file of those whose certificates clients have to show; default: none has to"
    )
    header_timeout: float = option(
        30.0,
        "seconds in which a request's headers come; a connection that says nothing is closed",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    read_timeout: float = option(
        60.0, "seconds in which a request's body comes", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    keep_alive_timeout: float = option(
        75.0,
        "seconds for which a connection may be idle; more than a proxy keeps its own for",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    write_timeout: float = option(
        300.0,
        "seconds without reading after which a client is cut off",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    tool_call_parser: str = option(
        "auto",
        "how the model writes tool calls; auto: as its chat template shows; none: left in the text",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "how the model encloses its reasoning; auto: as its chat template shows; none: left in the "
        "text",
        choices=REASONING_PARSERS,
    )
    log_level: str = option("info", "what is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        "text", "log lines for people, or a JSON object each", choices=LOG_FORMATS
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that gets a span of each request by OTLP over HTTP, as "
        "http://localhost:4318/v1/traces; default: $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or none",
    )

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix, and no key."""
        convert_fields(self)
        for number, key in enumerate(self.api_key, 1):
            check_api_key(key, f"api_key {number}")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s,]+", origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}, but has to have * or origins as "
                    "https://example.com, with a port where there is one, without a path"
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host):
                raise ValueError(
                    f"allowed_hosts has {host!r}, but has to have * or host names as example.com "
                    "or *.example.com, without scheme, port and path"
                )
        pair = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            given = next(name for name in pair if name not in missing)
            raise ValueError(f"{given} is given without {missing[0]}: https needs both")
        if missing and self.ssl_ca_certs is not None:
            raise ValueError("ssl_ca_certs is given without ssl_certfile and ssl_keyfile")

    @property
    def output_parsers(self) -> OutputParserConfig:
        """The parsers of chat output."""
        return OutputParserConfig(self.tool_call_parser, self.reasoning_parser)


def check_api_key(key: str, origin: str) -> None:
    """Raises ValueError for a key that no header can carry; it names the origin, not the key."""
    if not key or not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{origin}: a key has to be printable ASCII without spaces, not empty")
