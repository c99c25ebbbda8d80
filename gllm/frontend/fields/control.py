"""The fields of the endpoints that steer the server.

Owns the schemas. Knows nothing of what they cause.
"""

from typing import Annotated, ClassVar

from gllm.config.field_types import FieldError
from gllm.frontend.fields.base import RequestFields, doc
from gllm.frontend.fields.generation import RequestId


class AbortFields(RequestFields):
    """POST /abort."""

    required_any_of: ClassVar[tuple[str, ...]] = ("request_id", "abort_all")

    request_id: Annotated[
        RequestId | None, doc("of the request: its request_id, else its X-Request-Id")
    ] = None
    abort_all: Annotated[bool | None, doc("end every request")] = None

    def validate(self) -> None:
        """Raises FieldError unless it is clear what to end."""
        if bool(self.abort_all) == (self.request_id is not None):
            raise FieldError("request_id", "request_id or abort_all has to be given, and not both")
