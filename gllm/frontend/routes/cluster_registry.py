"""The table of the HTTP endpoints of a cluster's master, as in `registry`."""

from gllm.frontend import cluster_response_schemas as schemas
from gllm.frontend import server_response_schemas as server_schemas
from gllm.frontend.endpoint import Endpoint, EndpointParameter, get, get_probe, post_command
from gllm.frontend.fields.services import DeployServiceFields
from gllm.frontend.routes import cluster, server

SERVICE_NAME = EndpointParameter("name", "name of a service, as in /services")
NODE_NAME = EndpointParameter("name", "name of a node, as in /nodes")

CLUSTER_ENDPOINTS = (
    post_command("/services", cluster.deploy_service, schemas.ServiceResponse, DeployServiceFields),
    get("/services", cluster.list_services, schemas.ServiceListResponse, is_polled=True),
    # Before the path that a name with a slash would match too.
    get(
        "/services/{name}/key",
        cluster.get_service_key,
        schemas.ServiceKeyResponse,
        path_parameters=(SERVICE_NAME,),
    ),
    get(
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
    get("/nodes", cluster.list_cluster_nodes, schemas.ClusterNodeListResponse, is_polled=True),
    get(
        "/nodes/{name}",
        cluster.get_cluster_node,
        schemas.ClusterNodeResponse,
        path_parameters=(NODE_NAME,),
        is_polled=True,
    ),
    post_command(
        "/nodes/{name}/drain",
        cluster.drain_cluster_node,
        schemas.NodeExitResponse,
        path_parameters=(NODE_NAME,),
    ),
    get_probe("/health", cluster.get_cluster_health, server_schemas.HealthResponse),
    get_probe("/metrics", cluster.get_cluster_metrics, content_type="text/plain"),
    get("/version", server.get_version, server_schemas.VersionResponse),
    get("/openapi.json", server.get_openapi_document),
)
