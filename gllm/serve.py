"""`python -m gllm.serve MODEL`: serve one pipeline over HTTP.

This process is the HTTP frontend and the parent of the workers. Exit status: 0 after SIGTERM or
SIGINT, 1 if the engine failed, 2 for an invalid command line or a model that cannot be served.
"""

import argparse
import os
import sys

from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.flags import config_from_flags
from gllm.config.server import ServerConfig
from gllm.engine.preflight import plan_model
from gllm.observability.logs import LogConfig
from gllm.runtime.local_node import LocalNode
from gllm.server_command import (
    build_server_parser,
    parse_command_line,
    pop_environment_keys,
    report_error,
)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: the model and a flag per configuration field."""
    description = "Serve a model over HTTP in OpenAI's API."
    return build_server_parser("gllm.serve", description, EngineConfig, AttachmentConfig)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal or a failure of the engine; return the exit status."""
    values, logs = parse_command_line(build_parser(), argv, "gllm-frontend")
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


if __name__ == "__main__":
    sys.exit(main())
