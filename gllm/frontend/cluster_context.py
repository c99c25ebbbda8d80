"""Key of the application of a cluster's master."""

from aiohttp import web

from gllm.deploy.cluster.interface import ClusterControl

CLUSTER: web.AppKey[ClusterControl] = web.AppKey("cluster")
"""Key of the master."""
