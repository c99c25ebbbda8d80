"""Request fields of the services of a cluster."""

from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gllm.deploy.cluster.selection import NodeRequirements
from gllm.deploy.cluster.service import ServiceRequest
from gllm.frontend.fields.base import NonNegativeInt, RequestFields, doc
from gllm.options.field_types import FieldError

MAX_SERVICE_NODES = 64
"""Maximum number of nodes of a service."""


class ResourceSpecification(msgspec.Struct, forbid_unknown_fields=True):
    """Number of nodes for a model service, and the GPUs and memory that each node needs."""

    num_nodes: Annotated[int, Meta(ge=1, le=MAX_SERVICE_NODES)] | None = None
    gpus_per_node: NonNegativeInt | None = None
    memory_bytes_per_node: NonNegativeInt | None = None
    nodes: list[str] | None = None


class DeployServiceFields(RequestFields):
    """Request body of POST /services, which starts a model service on nodes of a cluster."""

    required_fields: ClassVar[tuple[str, ...]] = ("service_name", "model_name")

    service_name: Annotated[
        str | None, doc("unique name: letters, digits, dots, hyphens and underscores")
    ] = None
    model_name: Annotated[
        str | None, doc("model as in `gllm serve`: a hub name, `demo`, or a folder of all nodes")
    ] = None
    resource_specification: Annotated[
        ResourceSpecification | None,
        doc(
            "`num_nodes` (default 1), `gpus_per_node` (default: those that a node has), "
            "`memory_bytes_per_node`, and `nodes`, names of the nodes to use instead of any free "
            "ones"
        ),
    ] = None
    inference_parameters: Annotated[
        dict[str, Any] | None,
        doc("parameters of the engine by name, such as `max_model_len`: see docs/platform.md"),
    ] = None

    def validate(self) -> None:
        """Check the rules that `to_request` enforces. Raises FieldError."""
        self.to_request()

    def to_request(self) -> ServiceRequest:
        """Return the request for the master. Raises FieldError."""
        resources = self.resource_specification or ResourceSpecification()
        names = tuple(resources.nodes or ())
        if len(set(names)) != len(names):
            raise FieldError("resource_specification", "resource_specification names a node twice")
        num_nodes = resources.num_nodes or max(1, len(names))
        if names and num_nodes != len(names):
            raise FieldError(
                "resource_specification",
                f"resource_specification has num_nodes {num_nodes}, but {len(names)} nodes: leave "
                "one of both out",
            )
        if num_nodes > MAX_SERVICE_NODES:
            raise FieldError(
                "resource_specification",
                f"resource_specification has {num_nodes} nodes, but at most {MAX_SERVICE_NODES} "
                "are allowed",
            )
        requirements = NodeRequirements(
            num_nodes,
            resources.gpus_per_node or 0,
            resources.memory_bytes_per_node or 0,
            names,
        )
        return ServiceRequest(
            self.service_name or "",
            self.model_name or "",
            requirements,
            self.inference_parameters or {},
        )
