"""`gllm router MODEL`: serve the engines of a fleet over HTTP, as if they were one.

Exit status: 0 after SIGTERM or SIGINT, 2 for an invalid command line or a model that cannot be
served.
"""

import argparse
import os
import sys

import setproctitle

from gllm import __version__
from gllm.config.flags import FlagParser, add_flags, config_from_flags
from gllm.config.router import RouterConfig
from gllm.config.server import ServerConfig
from gllm.observability.logs import LogConfig, configure_logging
from gllm.serve import TRACES_VARIABLE, pop_environment_keys, report_error


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line: the model and a flag per configuration field."""
    parser = FlagParser(
        prog="gllm router", description="Serve many engines of one model over HTTP, as if one."
    )
    parser.add_argument("positional", nargs="?", metavar="MODEL", help="the same as --model")
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_config_flag()
    add_flags(parser, RouterConfig)
    add_flags(parser, ServerConfig)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Serve until a signal; return the exit status."""
    values = build_parser().parse_args(argv)
    values.model = values.positional or values.model
    values.otlp_traces_endpoint = values.otlp_traces_endpoint or os.environ.get(TRACES_VARIABLE)
    logs = LogConfig(values.log_level, values.log_format)
    configure_logging(logs)
    setproctitle.setproctitle("gllm-router")
    try:
        values.api_key = [*(values.api_key or ()), *pop_environment_keys(os.environ)]
        router = config_from_flags(RouterConfig, values)
        server = config_from_flags(ServerConfig, values)
        return _serve(router, server)
    except (ValueError, OSError) as error:
        return report_error(error, 2, logs)


def _serve(router: RouterConfig, server: ServerConfig) -> int:
    import uvloop

    from gllm.engine.fleet_engine import FleetEngine
    from gllm.frontend.server import Server

    return uvloop.run(Server(FleetEngine(router, server.served_model_name), server).run())


if __name__ == "__main__":
    sys.exit(main())
