"""Command lines of the programs that serve over HTTP, and of those that call a server."""

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping

import setproctitle

from gllm.config.server import ServerConfig, check_api_key
from gllm.deploy.server_client import ServerClient, ServerError
from gllm.observability.logs import LogConfig, configure_logging
from gllm.observability.streams import protect_standard_streams
from gllm.options.exit_status import find_exit_status
from gllm.options.flags import FlagParser, FlagType, add_flags, config_from_flags, parse_url
from gllm.options.version import __version__

log = logging.getLogger("gllm")

KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable with API keys, separated by commas."""
DEFAULT_URL = "http://127.0.0.1:8000"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Environment variable with the default of --otlp-traces-endpoint."""


def build_server_parser(prog: str, description: str, *configs: type) -> argparse.ArgumentParser:
    """Return the argument parser of a server: the model and a flag per field of its configurations.

    Args:
        prog: name of the program.
        description: text for the help.
        configs: configuration classes besides ServerConfig, which is always included.
    """
    parser = FlagParser(prog=prog, description=description)
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_config_flag()
    for config in (*configs, ServerConfig):
        add_flags(parser, config)
    return parser


def parse_command_line(
    parser: argparse.ArgumentParser, argv: list[str] | None, title: str
) -> tuple[argparse.Namespace, LogConfig]:
    """Parse a server's command line, configure logging and set the process title.

    Args:
        parser: parser made by `build_server_parser`.
        argv: arguments; None for those of this process.
        title: title of the process.

    Returns:
        The values of the flags, some of them from environment variables, and the log configuration.
    """
    values = parser.parse_args(argv)
    values.model = values.positional or values.model
    values.otlp_traces_endpoint = values.otlp_traces_endpoint or os.environ.get(TRACES_VARIABLE)
    return values, parse_logs(values, title)


def parse_logs(values: argparse.Namespace, title: str) -> LogConfig:
    """Configure logging by the flags and set the process title; return the log configuration."""
    protect_standard_streams()
    logs = LogConfig(values.log_level, values.log_format)
    configure_logging(logs)
    setproctitle.setproctitle(title)
    return logs


def pop_environment_keys(environment: MutableMapping[str, str]) -> list[str]:
    """Return the API keys in $GLLM_API_KEY and unset it, because child processes inherit it.

    Raises:
        ValueError: the variable is set but has no key, so that a server would run without keys.
    """
    if KEY_VARIABLE not in environment:
        return []
    keys = [key.strip() for key in environment.pop(KEY_VARIABLE).split(",") if key.strip()]
    if not keys:
        raise ValueError(f"{KEY_VARIABLE} holds no key: unset it to serve without keys")
    for key in keys:
        check_api_key(key, KEY_VARIABLE)
    return keys


def add_server_flags(parser: argparse.ArgumentParser, flag: str = "--url") -> None:
    """Add flags for the URL and the API key of the server that a command calls.

    Args:
        parser: parser of the command.
        flag: name of the URL's flag; without dashes it is an optional positional argument.
    """
    help_text = f"URL of the server, on several machines of the head (default {DEFAULT_URL})"
    nargs = None if flag.startswith("-") else "?"
    parser.add_argument(
        flag, nargs=nargs, default=DEFAULT_URL, type=FlagType(parse_url), help=help_text
    )
    parser.add_argument("--api-key", help=f"default: ${KEY_VARIABLE}")


def make_client(values: argparse.Namespace, timeout_seconds: float | None = 10.0) -> ServerClient:
    """Return an HTTP client for the flags that `add_server_flags` has added.

    Args:
        values: parsed flags.
        timeout_seconds: timeout of each request; None for no limit.

    Raises:
        ValueError: the API key contains characters that HTTP headers do not allow.
    """
    key = values.api_key or os.environ.get(KEY_VARIABLE, "").split(",")[0]
    if key:
        check_api_key(key, f"--api-key or ${KEY_VARIABLE}")
    return ServerClient(values.url, key, timeout_seconds)


def read_server_config(values: argparse.Namespace) -> ServerConfig:
    """Return the HTTP server's configuration from its flags and the API keys in $GLLM_API_KEY.

    Raises:
        ValueError: a value is invalid.
    """
    values.api_key = [*(values.api_key or ()), *pop_environment_keys(os.environ)]
    config: ServerConfig = config_from_flags(ServerConfig, values)
    return config


def report_failure(command: str, error: Exception) -> int:
    """Print the error that ends a client command to standard error; return the exit status.

    Args:
        command: name of the command, such as drain.
        error: cause; the status is 1 for a ServerError, otherwise that of `find_exit_status`.
    """
    print(f"gllm {command}: {error}", file=sys.stderr)
    return 1 if isinstance(error, ServerError) else find_exit_status(error)


def report_error(error: Exception, logs: LogConfig, status: int | None = None) -> int:
    """Report the error that ends a server, as a log record or on standard error.

    Args:
        error: cause of the end.
        logs: log configuration; its format decides between a JSON record and text.
        status: exit status; None for that of `find_exit_status`.

    Returns:
        The exit status.
    """
    if logs.format == "json":
        log.critical("%s", error)
    else:
        print(f"gllm: {error}", file=sys.stderr)
    return find_exit_status(error) if status is None else status
