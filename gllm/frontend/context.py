"""What every route shares: the engine, the configuration, the metrics, the door.

Owns admission: how many requests may be inside. Knows nothing of what they ask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineInterface, EngineUnavailableError
from gllm.frontend.errors import ApiError
from gllm.frontend.metrics import Metrics

RETRY_AFTER_SECONDS = 5
"""Seconds after which to ask a loading engine again."""


@dataclass
class ServerContext:
    """One server's parts."""

    engine: EngineInterface
    config: ServerConfig
    metrics: Metrics
    num_admitted: int = field(default=0)
    """Requests inside, those among them that the engine has not seen yet."""

    def check_ready(self) -> None:
        """Raises EngineUnavailableError unless the engine takes requests."""
        status = self.engine.status()
        match status.state:
            case "ready":
                return
            case "loading":
                raise EngineUnavailableError("loading", "the model is loading", RETRY_AFTER_SECONDS)
            case "draining":
                raise EngineUnavailableError(
                    "draining", "the server is shutting down", RETRY_AFTER_SECONDS
                )
            case _:
                why = f"the engine is down: {status.cause_of_death}"
                raise EngineUnavailableError("dead", why, RETRY_AFTER_SECONDS)

    @contextmanager
    def admit(self, requests: int = 1) -> Iterator[None]:
        """Hold places for requests. Raises EngineUnavailableError where there are none."""
        self.check_ready()
        inside = max(self.num_admitted, self.engine.status().num_requests)
        if inside + requests > self.config.max_num_queued_requests:
            raise EngineUnavailableError("full", f"{inside} requests are queued: try again later")
        self.num_admitted += requests
        try:
            yield
        finally:
            self.num_admitted -= requests

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is not None and name != self.engine.model.name:
            raise ApiError(
                404,
                f"The model `{name}` does not exist.",
                param="model",
                code="model_not_found",
            )


CONTEXT = web.AppKey("context", ServerContext)
ARRIVAL = web.RequestKey("arrival", float)
"""When the request came, on the monotonic clock."""
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT_ID = web.RequestKey("client", str)
"""Whose request it is, where keys tell."""
