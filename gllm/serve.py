"""`python -m gllm.serve MODEL`: one pipeline behind HTTP, this process being parent and frontend.

Owns the command line and the exit status: 0 after SIGTERM or SIGINT, 1 when the engine died, 2 for
a command line or a model that cannot be. Knows nothing of what is served (server.py).
"""

import argparse
import logging
import os
import sys
from collections.abc import MutableMapping

import setproctitle

from gllm import __version__
from gllm.config.engine import EngineConfig
from gllm.config.flags import FlagParser, add_flags, config_from_flags
from gllm.config.server import ServerConfig, check_api_key
from gllm.engine.preflight import plan_model
from gllm.observability.logs import LogConfig, configure_logging
from gllm.runtime.launch import Workers

log = logging.getLogger("gllm")

KEY_VARIABLE = "GLLM_API_KEY"
TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"


def parser() -> argparse.ArgumentParser:
    """The command line: the model, and a flag for each field of the configurations."""
    made = FlagParser(prog="gllm.serve", description="Serve a model over HTTP in OpenAI's API.")
    made.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    made.add_argument("--version", action="version", version=__version__)
    made.add_config_flag()
    add_flags(made, EngineConfig)
    add_flags(made, ServerConfig)
    return made


def main(argv: list[str] | None = None) -> int:
    """Serve until told to end; the exit status."""
    values = parser().parse_args(argv)
    values.model = values.positional or values.model
    values.otlp_traces_endpoint = values.otlp_traces_endpoint or os.environ.get(TRACES_VARIABLE)
    logs = LogConfig(values.log_level, values.log_format)
    configure_logging(logs)
    setproctitle.setproctitle("gllm-frontend")
    try:
        values.api_key = [*(values.api_key or ()), *keys_of_environment(os.environ)]
        engine_config = config_from_flags(EngineConfig, values)
        server_config = config_from_flags(ServerConfig, values)
        # Before the workers, which take seconds and memory to start.
        plan_model(engine_config)
        workers = Workers(engine_config.pipeline_parallel_size)
    except (ValueError, OSError) as error:
        return _refuse(error, 2, logs)
    try:
        return _serve(engine_config, server_config, workers, logs)
    finally:
        workers.kill()


def keys_of_environment(environment: MutableMapping[str, str]) -> list[str]:
    """The API keys of a variable, which is taken out: workers inherit the environment.

    Raises ValueError for one without any: a server without keys has to be meant.
    """
    if KEY_VARIABLE not in environment:
        return []
    keys = [key.strip() for key in environment.pop(KEY_VARIABLE).split(",") if key.strip()]
    if not keys:
        raise ValueError(f"{KEY_VARIABLE} holds no key: unset it to serve without keys")
    for key in keys:
        check_api_key(key, KEY_VARIABLE)
    return keys


def _serve(engine: EngineConfig, server: ServerConfig, workers: Workers, logs: LogConfig) -> int:
    # Here, not above: the workers import torch beside this process's own imports.
    import uvloop

    from gllm.engine.engine import Engine, EngineError
    from gllm.frontend.server import Server

    try:
        shows_progress = logs.format == "text"
        served = Engine(engine, server.served_model_name, logs, shows_progress, workers)
        return uvloop.run(Server(served, server).run())
    except (ValueError, OSError) as error:
        return _refuse(error, 2, logs)
    except EngineError as error:
        return _refuse(error, 1, logs)


def _refuse(error: Exception, status: int, logs: LogConfig) -> int:
    if logs.format == "json":
        log.critical("%s", error)
    else:
        print(f"gllm: {error}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
