"""`gllm cluster`: own nodes that have no model, and run services on them.

Exit status: 0 after SIGTERM or SIGINT, 2 for an invalid command line, 75 if an address or a name is
not available now.
"""

import argparse

from gllm.commands.server_command import parse_logs, read_server_config, report_error
from gllm.config.cluster import ClusterConfig
from gllm.config.server import ServerConfig
from gllm.options.flags import FlagParser, add_flags, config_from_flags

TITLE = "gllm-cluster"


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm cluster`."""
    parser = FlagParser(prog="gllm cluster", description=(__doc__ or "").splitlines()[0])
    parser.add_config_flag()
    for config in (ClusterConfig, ServerConfig):
        add_flags(parser, config)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the master of a cluster, with its HTTP API, until a signal.

    The master starts engines, called services, on the nodes that join it.

    Returns:
        The exit status: 2 for invalid options, 75 for an address that is in use or not there.
    """
    values = make_parser().parse_args(argv)
    logs = parse_logs(values, TITLE)
    # Imported late: --help needs none of it.
    import uvloop

    from gllm.deploy.cluster.master import Master
    from gllm.frontend.cluster_server import serve_cluster

    try:
        cluster = config_from_flags(ClusterConfig, values)
        server = read_server_config(values)
        if not (server.api_key or server.api_key_file):
            raise ValueError(
                "the master of a cluster needs an API key: --api-key-file, --api-key or "
                "$GLLM_API_KEY; who has it can start services on all nodes and read their keys"
            )
        master = Master(cluster, server.shutdown_timeout)
        return uvloop.run(serve_cluster(master, server))
    except (ValueError, OSError) as error:
        return report_error(error, logs)
