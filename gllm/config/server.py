"""Configuration of the HTTP server: address, limits, timeouts, access, logs."""

import re
from dataclasses import dataclass

from gllm.config.output_parsers import (
    REASONING_PARSERS,
    TOOL_CALL_PARSERS,
    OutputParserConfig,
)
from gllm.observability.logs import LOG_FORMATS
from gllm.options.field_types import convert_fields
from gllm.options.flags import output_folder, parse_bytes
from gllm.options.options import INT32_MAX, INT64_MAX, MAX_TIMEOUT_SECONDS, option
from gllm.options.slo import Slo


@dataclass(frozen=True)
class ServerConfig:
    """Options of the HTTP server: address, limits, timeouts, API keys, TLS and logs."""

    host: str = option("127.0.0.1", "address to listen on", is_common=True)
    port: int = option(
        8000, "port to listen on; 0 picks a free one", ge=0, le=65535, is_common=True
    )
    served_model_name: str | None = option(
        None,
        "name of the model in requests and answers; default: the name of its folder or repository. "
        "Without this flag, requests may also name the model as --model does",
        is_common=True,
    )
    shutdown_timeout: float = option(
        30.0, "seconds for running requests to finish after SIGTERM", ge=0, le=MAX_TIMEOUT_SECONDS
    )
    max_num_queued_requests: int = option(
        2048, "maximum requests in the engine; further ones get 503", ge=1, le=INT32_MAX
    )
    slo_ttft: float | None = option(
        None,
        "default objective of requests for the time to the first token, in seconds; default: none",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    slo_tpot: float | None = option(
        None,
        "default objective of requests for the mean time per further token, in seconds; default: "
        "none",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    profile_dir: str | None = option(
        None,
        "folder for the profiles of /start_profile; default: profiling is disabled",
        parse=output_folder,
    )
    max_choices: int = option(128, "maximum n of a request", ge=1, le=INT32_MAX)
    max_body_bytes: int = option(
        8 * 2**20,
        "maximum size of a request body, such as 8MiB",
        ge=1,
        le=INT64_MAX,
        parse=parse_bytes,
    )
    response_store_size: int = option(
        64 * 2**20,
        "memory for responses of /v1/responses that later requests refer to, such as 64MiB; 0: "
        "nothing is stored",
        ge=0,
        le=INT64_MAX,
        parse=parse_bytes,
    )
    response_store_ttl: float = option(
        3600.0,
        "seconds for which a response is stored after its last use",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key that clients have to send; repeatable, in addition to the comma-separated keys of "
        "$GLLM_API_KEY; process lists may show it, a file is safer",
        repeat=True,
        secret=True,
    )
    api_key_file: str | None = option(
        None,
        "file of API keys, one per line, with # before comments; default: none",
        is_common=True,
    )
    control_key_file: str | None = option(
        None,
        "file of control keys, one per line: requests that show one may have hand-off fields of "
        "other routers, and engines with the same key accept each other's hand-offs; default: such "
        "fields are refused",
    )
    control_network: tuple[str, ...] = option(
        (),
        "network such as 10.0.0.0/8 whose addresses need to show no control key, and in which a "
        "bootstrap_host may be; repeatable, needs --control-key-file",
        repeat=True,
    )
    rate_limit: int | None = option(
        None,
        "requests per minute for each API key, or each address without keys; default: no limit",
        ge=1,
        le=INT32_MAX,
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origin whose pages may use the server (CORS); repeatable, * for all; default: only the "
        "server's own pages",
        repeat=True,
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "host name accepted in the Host header; repeatable, *.example.com for all subdomains, * "
        "for all; default: localhost if --host is a loopback address, otherwise all",
        repeat=True,
    )
    ssl_certfile: str | None = option(
        None, "PEM file of the certificate chain, for https; default: plain http"
    )
    ssl_keyfile: str | None = option(None, "PEM file of the certificate's private key")
    ssl_ca_certs: str | None = option(
        None,
        "PEM file of the authorities that sign client certificates; default: clients need none",
    )
    header_timeout: float = option(
        30.0,
        "seconds for a request's headers to arrive; a silent connection is closed",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    read_timeout: float = option(
        60.0, "seconds for a request's body to arrive", gt=0, le=MAX_TIMEOUT_SECONDS
    )
    keep_alive_timeout: float = option(
        75.0,
        "seconds after which an idle connection is closed; set it above a proxy's own timeout",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    write_timeout: float = option(
        300.0,
        "seconds after which a client that reads nothing is disconnected",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    tool_call_parser: str = option(
        "auto",
        "format of the model's tool calls; auto: from its chat template; none: calls stay in the "
        "text",
        choices=TOOL_CALL_PARSERS,
    )
    reasoning_parser: str = option(
        "auto",
        "tags of the model's reasoning; auto: from its chat template; none: reasoning stays in the "
        "text",
        choices=REASONING_PARSERS,
    )
    log_level: str = option(
        "info", "minimum level of log lines", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option("text", "log lines as text or as JSON objects", choices=LOG_FORMATS)
    otlp_traces_endpoint: str | None = option(
        None,
        "URL to which a span per request is sent by OTLP over HTTP, such as "
        "http://localhost:4318/v1/traces; default: $OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, or none",
    )

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field, without secrets."""
        convert_fields(self)
        for number, key in enumerate(self.api_key, 1):
            check_api_key(key, f"api_key {number}")
        for origin in self.allowed_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s,]+", origin):
                raise ValueError(
                    f"allowed_origins has {origin!r}, but has to have * or origins such as "
                    "https://example.com, with a port where there is one, without a path"
                )
        for host in self.allowed_hosts:
            if not re.fullmatch(r"\*|(\*\.)?[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?", host):
                raise ValueError(
                    f"allowed_hosts has {host!r}, but has to have * or host names such as "
                    "example.com or *.example.com, without scheme, port and path"
                )
        if self.control_network and self.control_key_file is None:
            raise ValueError(
                "control_network is given without control_key_file: engines authenticate hand-offs "
                "with the key"
            )
        pair = {"ssl_certfile": self.ssl_certfile, "ssl_keyfile": self.ssl_keyfile}
        missing = [name for name, value in pair.items() if value is None]
        if len(missing) == 1:
            present = next(name for name in pair if name not in missing)
            raise ValueError(f"{present} is given without {missing[0]}: https needs both")
        if missing and self.ssl_ca_certs is not None:
            raise ValueError("ssl_ca_certs is given without ssl_certfile and ssl_keyfile")

    @property
    def slo(self) -> Slo:
        """Default SLO of requests."""
        return Slo(self.slo_ttft, self.slo_tpot)

    @property
    def output_parsers(self) -> OutputParserConfig:
        """Names of the parsers of chat output."""
        return OutputParserConfig(self.tool_call_parser, self.reasoning_parser)


def check_api_key(key: str, origin: str) -> None:
    """Raise ValueError if an API key cannot be sent in an HTTP header.

    Args:
        key: Key, which does not appear in the message.
        origin: Source of the key for the message, such as the name of a flag.
    """
    if not key or not all("!" <= char <= "~" for char in key):
        raise ValueError(f"{origin}: a key has to be printable ASCII without spaces, not empty")
