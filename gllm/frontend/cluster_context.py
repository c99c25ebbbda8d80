"""Key of the application of a cluster's master."""

from aiohttp import web

from gllm.deploy.cluster.master import Master

CLUSTER: web.AppKey[Master] = web.AppKey("cluster")
"""Key of the master."""
