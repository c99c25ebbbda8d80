"""Request fields of the endpoints that control the server."""

from typing import Annotated, ClassVar

from gllm.frontend.fields.base import RequestFields, doc
from gllm.frontend.fields.generation import RequestId
from gllm.options.field_types import FieldError


class AbortFields(RequestFields):
    """POST /abort."""

    required_any_of: ClassVar[tuple[str, ...]] = ("request_id", "abort_all")

    request_id: Annotated[
        RequestId | None, doc("id of the request: its request_id field, else its X-Request-Id")
    ] = None
    abort_all: Annotated[bool | None, doc("abort all requests")] = None

    def validate(self) -> None:
        """Check that exactly one field selects the requests. Raises FieldError."""
        if bool(self.abort_all) == (self.request_id is not None):
            raise FieldError("request_id", "exactly one of request_id and abort_all is required")
