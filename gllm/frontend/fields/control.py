"""Request fields of the endpoints that control the server."""

from typing import Annotated, ClassVar

from gllm.config.attachment import ROLES
from gllm.frontend.fields.base import RequestFields, doc
from gllm.frontend.fields.generation import RequestId
from gllm.options.field_types import FieldError


class AbortFields(RequestFields):
    """Request body of POST /abort: the id of a request to abort, or `abort_all`."""

    required_any_of: ClassVar[tuple[str, ...]] = ("request_id", "abort_all")

    request_id: Annotated[
        RequestId | None, doc("id of the request: its request_id field, else its X-Request-Id")
    ] = None
    abort_all: Annotated[bool | None, doc("abort all requests")] = None

    def validate(self) -> None:
        """Check that exactly one field selects the requests. Raises FieldError."""
        if bool(self.abort_all) == (self.request_id is not None):
            raise FieldError("request_id", "exactly one of request_id and abort_all is required")


def check_role(name: str, role: str | None) -> str:
    """Check that an engine role exists (`mixed`, `prefill` or `decode`), and return it.

    Args:
        name: Name of the request field, for errors.
        role: Its value.

    Raises:
        FieldError: There is no such role.
    """
    if role is None or role not in ROLES:
        raise FieldError(name, f"{name} is {role!r}, but has to be one of {', '.join(ROLES)}")
    return role


class EngineRoleFields(RequestFields):
    """Request body of POST /engines/{name}/role: the new role of an engine."""

    required_any_of: ClassVar[tuple[str, ...]] = ("role",)

    role: Annotated[str | None, doc("mixed, prefill or decode")] = None

    def validate(self) -> None:
        """Check the role. Raises FieldError."""
        check_role("role", self.role)


class RoleSwitchFields(RequestFields):
    """Request body of POST /pd_role_switch, SGLang's endpoint that changes an engine's role."""

    required_any_of: ClassVar[tuple[str, ...]] = ("new_role",)

    new_role: Annotated[str | None, doc("prefill, decode or mixed")] = None
    worker_url: Annotated[
        str | None, doc("at a router: name or address of the engine, as in /engines")
    ] = None
    drain_timeout_secs: Annotated[
        float | None, doc("ignored: a switch needs no drain, because running requests go on")
    ] = None

    def validate(self) -> None:
        """Check the role. Raises FieldError."""
        check_role("new_role", self.new_role)
