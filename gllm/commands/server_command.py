"""Command line of the programs that serve over HTTP: an engine, or the router of a fleet."""

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping

import setproctitle

from gllm.config.server import ServerConfig, check_api_key
from gllm.observability.logs import LogConfig, configure_logging
from gllm.options.flags import FlagParser, add_flags
from gllm.options.version import __version__

log = logging.getLogger("gllm")

KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable with API keys, separated by commas."""
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Environment variable with the default of --otlp-traces-endpoint."""


def build_server_parser(prog: str, description: str, *configs: type) -> argparse.ArgumentParser:
    """Return the parser of a command line: the model and a flag per field of the configurations.

    Args:
        prog: name of the program.
        description: what it does.
        configs: its configurations; that of the server is added.
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
    """Parse the command line, begin to log and take the process title.

    Returns:
        The values of the flags, with those that the environment supplies, and the logs' format.
    """
    values = parser.parse_args(argv)
    values.model = values.positional or values.model
    values.otlp_traces_endpoint = values.otlp_traces_endpoint or os.environ.get(TRACES_VARIABLE)
    return values, parse_logs(values, title)


def parse_logs(values: argparse.Namespace, title: str) -> LogConfig:
    """Begin to log as the flags say, and take the process title; return the logs' format."""
    logs = LogConfig(values.log_level, values.log_format)
    configure_logging(logs)
    setproctitle.setproctitle(title)
    return logs


def pop_environment_keys(environment: MutableMapping[str, str]) -> list[str]:
    """Return the API keys of KEY_VARIABLE and remove it, because workers inherit the environment.

    Raises ValueError if the variable is set but has no key, so that a server never runs without
    keys by accident.
    """
    if KEY_VARIABLE not in environment:
        return []
    keys = [key.strip() for key in environment.pop(KEY_VARIABLE).split(",") if key.strip()]
    if not keys:
        raise ValueError(f"{KEY_VARIABLE} holds no key: unset it to serve without keys")
    for key in keys:
        check_api_key(key, KEY_VARIABLE)
    return keys


def report_error(error: Exception, status: int, logs: LogConfig) -> int:
    """Report why the program ends, in the format of its log; return the exit status."""
    if logs.format == "json":
        log.critical("%s", error)
    else:
        print(f"gllm: {error}", file=sys.stderr)
    return status
