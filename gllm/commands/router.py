"""`gllm router MODEL`: serve the engines of a fleet over HTTP, as if they were one.

Exit status: 0 after SIGTERM or SIGINT, 2 for an invalid command line or a model that cannot be
served, 75 if an address, a name or the model hub is not available now.
"""

import argparse
import sys

from gllm.commands.server_command import (
    build_server_parser,
    parse_command_line,
    read_server_config,
    report_error,
)
from gllm.config.router import RouterConfig
from gllm.options.flags import config_from_flags
from gllm.options.ports import check_port_is_free


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm router`."""
    description = "Serve many engines of one model over HTTP, as if one."
    return build_server_parser("gllm router", description, RouterConfig)


def main(argv: list[str] | None = None) -> int:
    """Run a router, which serves several engines of one model under one URL, until a signal.

    Returns:
        The exit status: 2 for invalid options, 75 for an address that is in use or not there.
    """
    values, logs = parse_command_line(make_parser(), argv, "gllm-router")
    # Imported late: --help needs none of it.
    import uvloop

    from gllm.frontend.server import Server
    from gllm.router.fleet_engine import FleetEngine

    try:
        server = read_server_config(values)
        config = config_from_flags(RouterConfig, values)
        if config.hub != "off":
            check_port_is_free("--hub", config.hub)
        engine = FleetEngine(config, server.served_model_name)
        return uvloop.run(Server(engine, server).run())
    except (ValueError, OSError) as error:
        return report_error(error, logs)


if __name__ == "__main__":
    sys.exit(main())
