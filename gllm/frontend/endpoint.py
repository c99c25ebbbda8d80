"""What an endpoint is.

Owns the registry's type. Knows nothing of any one endpoint.
"""

from dataclasses import dataclass

from gllm.frontend.errors import Handler
from gllm.frontend.fields.body import Body


@dataclass(frozen=True)
class Endpoint:
    """A method, a path, and who answers; the handler's docstring says what it is for."""

    method: str
    path: str
    handler: Handler
    body: type[Body] | None = None
    """The schema of its request body; None for no body."""
    content: str = "application/json"
    """Type of an answer that is not streamed."""

    @property
    def streams(self) -> bool:
        """Whether it may answer with server-sent events."""
        return self.body is not None and "stream" in self.body.__struct_fields__

    @property
    def summary(self) -> str:
        """What it is for, in a sentence."""
        text = self.handler.__doc__ or ""
        return " ".join(text.partition("\n\n")[0].split())
