"""Configuration of the master of a cluster (`gllm cluster`)."""

from dataclasses import dataclass

from gllm.config.nodes import DEFAULT_HEAD_PORT
from gllm.options.field_types import convert_fields
from gllm.options.options import INT32_MAX, MAX_TIMEOUT_SECONDS, option


@dataclass(frozen=True)
class ClusterConfig:
    """Options of `gllm cluster`, the process that machines join to serve models on request.

    Has its address, the shared secret, and the timeouts after which a machine is lost.
    """

    hub: str = option(
        str(DEFAULT_HEAD_PORT),
        "PORT or HOST:PORT at which nodes join; a port alone is one of this machine only, or with "
        "--node-secret-file one of all its addresses",
    )
    node_secret_file: str | None = option(
        None,
        "file of `gllm node --new-secret`, the same as on the nodes; needed off this machine",
    )
    node_timeout: float = option(
        5.0,
        "seconds of silence after which a node is lost",
        ge=1,
        le=MAX_TIMEOUT_SECONDS,
    )
    node_return_timeout: float = option(
        60.0,
        "seconds for which a lost node, and a node that has lost the master, keep their services",
        gt=0,
        le=MAX_TIMEOUT_SECONDS,
    )
    max_nodes: int = option(
        256,
        "maximum number of nodes",
        ge=1,
        le=INT32_MAX,
        # The hub of the nodes names the second one.
        flags=("--max-nodes", "--max-spares"),
    )

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
