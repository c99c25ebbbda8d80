"""HTTP server of a cluster's master: its endpoints, start, signals and end."""

import asyncio
import logging
import os
import signal

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.deploy.cluster.master import Master
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.context import SERVER_CONFIG
from gllm.frontend.endpoint import register_endpoints
from gllm.frontend.listening import listen, raise_open_files_limit, tls_context
from gllm.frontend.middleware import keys, observe, origin
from gllm.frontend.routes.cluster import CLUSTER
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.options.addresses import format_host_port

log = logging.getLogger("gllm")

CLUSTER_MIDDLEWARE = (observe, origin, keys)
"""Modules whose `install` adds a middleware, outermost first."""


def make_cluster_app(cluster: Master, config: ServerConfig) -> web.Application:
    """Return the application of a cluster's master.

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


class ClusterServer:
    """Serves the master of a cluster over HTTP until a signal."""

    def __init__(self, master: Master, config: ServerConfig) -> None:
        self._master = master
        self._config = config
        self._should_stop = asyncio.Event()

    async def run(self) -> int:
        """Serve until a signal; return the exit status.

        Raises:
            ValueError: a flag has a value that cannot be used; the message names the flag.
            OSError: the address of the hub cannot be bound.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)
        raise_open_files_limit()
        tls = tls_context(self._config)
        runner = ConnectionRunner(make_cluster_app(self._master, self._config), self._config)
        await runner.setup()
        self._master.start()
        try:
            await listen(runner, self._config.host, self._config.port, tls)
            host, port = runner.addresses[0][:2]
            log.info(
                "the master of the cluster is ready: services at http%s://%s/services, nodes join "
                "%s",
                "s" if self._config.ssl_certfile else "",
                format_host_port(str(host), int(port)),
                self._master.address,
            )
            await self._should_stop.wait()
            log.info("ending %d services", len(self._master.services()))
            return 0
        finally:
            await self._master.stop()
            await runner.cleanup()

    def _on_signal(self) -> None:
        if self._should_stop.is_set():
            os._exit(1)
        self._should_stop.set()
