"""The table of the HTTP endpoints of a cluster's master, as in `registry`."""

from gllm.frontend import cluster_response_schemas as schemas
from gllm.frontend import server_response_schemas as server_schemas
from gllm.frontend.endpoint import Endpoint, PathParameter
from gllm.frontend.fields.services import DeployServiceFields
from gllm.frontend.routes import cluster, server

SERVICE_NAME = PathParameter("name", "name of a service, as in /services")
NODE_NAME = PathParameter("name", "name of a node, as in /nodes")

CLUSTER_ENDPOINTS = (
    Endpoint(
        "POST",
        "/services",
        cluster.deploy_service,
        schemas.ServiceResponse,
        DeployServiceFields,
        is_control=True,
    ),
    Endpoint(
        "GET", "/services", cluster.list_services, schemas.ServiceListResponse, is_polled=True
    ),
    # Before the path that a name with a slash would match too.
    Endpoint(
        "GET",
        "/services/{name}/key",
        cluster.get_service_key,
        schemas.ServiceKeyResponse,
        path_parameters=(SERVICE_NAME,),
    ),
    Endpoint(
        "GET",
        "/services/{name}",
        cluster.get_service,
        schemas.ServiceResponse,
        path_parameters=(SERVICE_NAME,),
        is_polled=True,
    ),
    Endpoint(
        "DELETE",
        "/services/{name}",
        cluster.delete_service,
        schemas.ServiceDeletionResponse,
        path_parameters=(SERVICE_NAME,),
    ),
    Endpoint(
        "GET", "/nodes", cluster.list_cluster_nodes, schemas.ClusterNodeListResponse, is_polled=True
    ),
    Endpoint(
        "GET",
        "/nodes/{name}",
        cluster.get_cluster_node,
        schemas.ClusterNodeResponse,
        path_parameters=(NODE_NAME,),
        is_polled=True,
    ),
    Endpoint(
        "POST",
        "/nodes/{name}/drain",
        cluster.drain_cluster_node,
        schemas.NodeExitResponse,
        path_parameters=(NODE_NAME,),
        is_control=True,
    ),
    Endpoint(
        "GET",
        "/health",
        cluster.get_cluster_health,
        server_schemas.HealthResponse,
        is_public=True,
        is_polled=True,
    ),
    Endpoint(
        "GET",
        "/metrics",
        cluster.get_cluster_metrics,
        content_type="text/plain",
        is_public=True,
        is_polled=True,
    ),
    Endpoint("GET", "/version", server.get_version, server_schemas.VersionResponse),
    Endpoint("GET", "/openapi.json", server.get_openapi_document),
)
