"""`gllm router MODEL`: serve the engines of a fleet over HTTP, as if they were one.

Exit status: 0 after SIGTERM or SIGINT, 2 for an invalid command line or a model that cannot be
served.
"""

import argparse
import os
import sys

from gllm.commands.server_command import (
    build_server_parser,
    parse_command_line,
    pop_environment_keys,
    report_error,
)
from gllm.config.router import RouterConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import config_from_flags


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: the model and a flag per configuration field."""
    description = "Serve many engines of one model over HTTP, as if one."
    return build_server_parser("gllm router", description, RouterConfig)


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    values, logs = parse_command_line(build_parser(), argv, "gllm-router")
    try:
        values.api_key = [*(values.api_key or ()), *pop_environment_keys(os.environ)]
        router = config_from_flags(RouterConfig, values)
        server = config_from_flags(ServerConfig, values)
        return _serve(router, server)
    except (ValueError, OSError) as error:
        return report_error(error, 2, logs)


def _serve(router: RouterConfig, server: ServerConfig) -> int:
    import uvloop

    from gllm.frontend.server import Server
    from gllm.router.fleet_engine import FleetEngine

    return uvloop.run(Server(FleetEngine(router, server.served_model_name), server).run())


if __name__ == "__main__":
    sys.exit(main())
