"""What every route shares: the engine, the configuration, the metrics, the door.

Owns admission: how many requests may be inside. Knows nothing of what they ask.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineInterface, EngineUnavailable
from gllm.frontend.errors import ApiError
from gllm.frontend.metrics import Metrics

STARTING_RETRY = 5
"""Seconds after which to ask a loading engine again."""


@dataclass
class Context:
    """One server's parts."""

    engine: EngineInterface
    config: ServerConfig
    metrics: Metrics
    admitted: int = field(default=0)
    """Requests inside, those among them that the engine has not seen yet."""

    def check_ready(self) -> None:
        """Raises EngineUnavailable unless the engine takes requests."""
        status = self.engine.status()
        match status.state:
            case "ready":
                return
            case "loading":
                raise EngineUnavailable("loading", "the model is loading", STARTING_RETRY)
            case "draining":
                raise EngineUnavailable("draining", "the server is shutting down", STARTING_RETRY)
            case _:
                why = f"the engine is down: {status.cause_of_death}"
                raise EngineUnavailable("dead", why, STARTING_RETRY)

    @contextmanager
    def admit(self, requests: int = 1) -> Iterator[None]:
        """Hold places for requests. Raises EngineUnavailable where there are none."""
        self.check_ready()
        inside = max(self.admitted, self.engine.status().num_requests)
        if inside + requests > self.config.max_num_queued_requests:
            raise EngineUnavailable("full", f"{inside} requests are queued: try again later")
        self.admitted += requests
        try:
            yield
        finally:
            self.admitted -= requests

    def check_model(self, name: str | None) -> None:
        """Raises ApiError for a model that is not served here."""
        if name is not None and name != self.engine.model.name:
            raise ApiError(
                404,
                f"The model `{name}` does not exist.",
                param="model",
                code="model_not_found",
            )


CONTEXT = web.AppKey("context", Context)
ARRIVAL = web.RequestKey("arrival", float)
"""When the request came, on the monotonic clock."""
REQUEST_ID = web.RequestKey("request_id", str)
CLIENT = web.RequestKey("client", str)
"""Whose request it is, where keys tell."""
