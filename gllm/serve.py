"""`python -m gllm.serve MODEL`: serve one pipeline over HTTP.

This process is the HTTP frontend and the parent of the workers. Exit status: 0 after SIGTERM or
SIGINT, 1 if the engine failed, 2 for an invalid command line or a model that cannot be served.
"""

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping

import setproctitle

from gllm import __version__
from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.flags import FlagParser, add_flags, config_from_flags
from gllm.config.server import ServerConfig, check_api_key
from gllm.engine.preflight import plan_model
from gllm.observability.logs import LogConfig, configure_logging
from gllm.runtime.local_node import LocalNode

log = logging.getLogger("gllm")

KEY_VARIABLE = "GLLM_API_KEY"
"""Environment variable with API keys, separated by commas."""
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
"""Environment variable with the default of --otlp-traces-endpoint."""


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: the model and a flag per configuration field."""
    parser = FlagParser(prog="gllm.serve", description="Serve a model over HTTP in OpenAI's API.")
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_config_flag()
    add_flags(parser, EngineConfig)
    add_flags(parser, AttachmentConfig)
    add_flags(parser, ServerConfig)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal or a failure of the engine; return the exit status."""
    values = build_parser().parse_args(argv)
    values.model = values.positional or values.model
    values.otlp_traces_endpoint = values.otlp_traces_endpoint or os.environ.get(TRACES_VARIABLE)
    logs = LogConfig(values.log_level, values.log_format)
    configure_logging(logs)
    setproctitle.setproctitle("gllm-frontend")
    try:
        values.api_key = [*(values.api_key or ()), *pop_environment_keys(os.environ)]
        engine_config = config_from_flags(EngineConfig, values)
        attachment = config_from_flags(AttachmentConfig, values)
        server_config = config_from_flags(ServerConfig, values)
        # Before the workers start, which takes seconds and memory.
        plan_model(engine_config)
        node = LocalNode(engine_config.num_workers)
    except (ValueError, OSError) as error:
        return report_error(error, 2, logs)
    try:
        return _serve(engine_config, attachment, server_config, node, logs)
    finally:
        node.close()


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


def _serve(
    engine: EngineConfig,
    attachment: AttachmentConfig,
    server: ServerConfig,
    node: LocalNode,
    logs: LogConfig,
) -> int:
    # Imported after the workers have started, so that they import torch at the same time.
    import uvloop

    from gllm.engine.engine import Engine, EngineError
    from gllm.frontend.server import Server

    try:
        shows_progress = logs.format == "text"
        served = Engine(engine, server.served_model_name, logs, shows_progress, node, attachment)
        return uvloop.run(Server(served, server).run())
    except (ValueError, OSError) as error:
        return report_error(error, 2, logs)
    except EngineError as error:
        return report_error(error, 1, logs)


def report_error(error: Exception, status: int, logs: LogConfig) -> int:
    """Report why the program ends, in the format of its log; return the exit status."""
    if logs.format == "json":
        log.critical("%s", error)
    else:
        print(f"gllm: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
