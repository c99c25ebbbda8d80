"""Configuration of an engine's attachment to routers."""

from dataclasses import dataclass

from gllm.options.field_types import convert_fields
from gllm.options.flags import parse_list
from gllm.options.options import MAX_TIMEOUT_SECONDS, option

ROLES = ("mixed", "prefill", "decode")
"""Values of --role."""


@dataclass(frozen=True)
class AttachmentConfig:
    """Options of an engine behind a router: router addresses, own role and name, and timeouts."""

    router: tuple[str, ...] = option(
        (),
        "routers to attach to: HOST:PORT of their hubs, separated by commas, or dns:NAME:PORT for "
        "all addresses of a name; default: none",
        parse=parse_list,
        is_common=True,
    )
    hub: str | None = option(
        None,
        "PORT or HOST:PORT at which routers attach that were started with --engines; a port alone "
        "is one of this machine only, or with --node-secret-file one of all its addresses; "
        "default: none",
    )
    role: str = option(
        "mixed",
        "role of the engine, for routers with --preset and for hand-offs by bootstrap fields",
        choices=ROLES,
    )
    name: str | None = option(
        None, "name of the engine, unique in the fleet; default: host name and process id"
    )
    node_secret_file: str | None = option(
        None,
        "file of `gllm node --new-secret` that encrypts the connections with routers; needed off "
        "this machine",
    )
    router_timeout: float = option(
        5.0,
        "seconds of silence after which a router is lost and its requests end",
        ge=2,
        le=MAX_TIMEOUT_SECONDS,
    )

    ready_without_router: bool = option(
        False,
        "GET /ready of an engine with --router answers 200 although no router has attached it",
    )

    def __post_init__(self) -> None:
        """Convert and check the fields. Raises ValueError that names the field and the fix."""
        convert_fields(self)
        name = self.name
        if name is not None and not (0 < len(name) <= 200 and name.isprintable()):
            raise ValueError("name has to have 1 to 200 printable characters")

    @property
    def is_used(self) -> bool:
        """True if the engine attaches to routers."""
        return bool(self.router) or self.hub is not None
