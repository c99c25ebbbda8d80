"""HTTP server of a cluster's master: its endpoints, start, signals and end."""

import logging

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.deploy.cluster.master import Master
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.context import SERVER_CONFIG
from gllm.frontend.endpoint import register_endpoints
from gllm.frontend.listening import listen, raise_open_files_limit, tls_context, watch_signals
from gllm.frontend.middleware import keys, observe, origin
from gllm.frontend.routes.cluster import CLUSTER
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.options.addresses import format_host_port

log = logging.getLogger("gllm")

CLUSTER_MIDDLEWARE = (observe, origin, keys)
"""Modules whose `install` adds a middleware, outermost first."""


def make_cluster_app(cluster: Master, config: ServerConfig) -> web.Application:
    """Return the aiohttp application with the HTTP API of a cluster's master: services and nodes.

    The master is the process of `gllm cluster`, which starts and stops model services on nodes.

    Raises:
        ValueError: a flag has a value that cannot be used; the message names the flag.
    """
    app = web.Application(client_max_size=config.max_body_bytes)
    app[SERVER_CONFIG] = config
    app[CLUSTER] = cluster
    for middleware in CLUSTER_MIDDLEWARE:
        middleware.install(app, config)
    register_endpoints(app, CLUSTER_ENDPOINTS)
    return app


async def serve_cluster(master: Master, config: ServerConfig) -> int:
    """Run a cluster's master and its HTTP API until SIGINT or SIGTERM; return the exit status.

    Raises:
        ValueError: A flag has a value that cannot be used; the message names the flag.
        OSError: The address at which nodes connect to the master cannot be bound.
    """
    should_stop = watch_signals()
    raise_open_files_limit()
    tls = tls_context(config)
    runner = ConnectionRunner(make_cluster_app(master, config), config)
    await runner.setup()
    master.start()
    try:
        await listen(runner, config.host, config.port, tls)
        host, port = runner.addresses[0][:2]
        log.info(
            "the master of the cluster is ready: services at http%s://%s/services, nodes join %s",
            "s" if config.ssl_certfile else "",
            format_host_port(str(host), int(port)),
            master.address,
        )
        await should_stop.wait()
        log.info("ending %d services", len(master.services()))
        return 0
    finally:
        await master.stop()
        await runner.cleanup()
