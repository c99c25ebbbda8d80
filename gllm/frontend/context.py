"""State shared by all routes: engine, configuration, metrics, number of admitted requests."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineInterface, EngineUnavailableError
from gllm.frontend.errors import ApiError
from gllm.frontend.load_window import LoadWindow
from gllm.frontend.metrics import Metrics
from gllm.frontend.response_store import ResponseStore

RETRY_AFTER_SECONDS = 5
"""Retry-After of an engine that is loading, recovering, draining or dead."""
UNAVAILABLE_CAUSES = {
    "loading": "the model is loading",
    "sleeping": "the server sleeps until /wake_up",
    "draining": "the server is shutting down",
}
"""Message of an engine that does not run requests, by its state."""


@dataclass
class ServerContext:
    """State of one HTTP server that all route handlers share, stored in its application."""

    engine: EngineInterface
    config: ServerConfig
    metrics: Metrics
    num_admitted: int = 0
    """Number of requests being handled, including those not yet submitted to the engine."""
    load_window: LoadWindow = field(default_factory=LoadWindow)
    """Recent readings of the engine's counters, from which /v1/loads computes rates."""
    responses: ResponseStore = field(init=False)
    """Responses that later requests refer to."""

    def __post_init__(self) -> None:
        config = self.config
        self.responses = ResponseStore(config.response_store_size, config.response_store_ttl)

    def check_accepting(self) -> None:
        """Raise EngineUnavailableError unless new requests are accepted."""
        if not self.engine.accepts_requests:
            self.check_ready()

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless the engine can run requests."""
        status = self.engine.status()
        match status.state:
            case "ready":
                return
            case "recovering" if status.is_sleeping:
                reason, why = "sleeping", UNAVAILABLE_CAUSES["sleeping"]
            case "recovering" if self.engine.fleet is not None:
                reason, why = "no_engines", status.recovery_cause
            case "recovering" as reason:
                why = f"the engine is recovering: {status.recovery_cause}"
            case "loading" | "sleeping" | "draining" as reason:
                why = UNAVAILABLE_CAUSES[reason]
            case _:
                reason, why = "dead", f"the engine is down: {status.cause_of_death}"
        raise EngineUnavailableError(reason, why, RETRY_AFTER_SECONDS)

    @contextmanager
    def admit(self, num_requests: int = 1) -> Iterator[None]:
        """Count requests towards the limit on queued requests while the block runs.

        Raises:
            EngineUnavailableError: The engine accepts no requests, or the limit is exceeded.
        """
        self.check_accepting()
        num_inside = max(self.num_admitted, self.engine.num_requests)
        if num_inside + num_requests > self.config.max_num_queued_requests:
            raise EngineUnavailableError(
                "full", f"{num_inside} requests are queued: try again later"
            )
        self.num_admitted += num_requests
        try:
            yield
        finally:
            self.num_admitted -= num_requests

    def check_model(self, name: str | None) -> None:
        """Raise ApiError (404) if `name` is not the served model; None is accepted."""
        if name is not None and not self.engine.model.is_named(name):
            raise ApiError(
                404,
                f"The model `{name}` does not exist.",
                param="model",
                code="model_not_found",
            )


CONTEXT = web.AppKey("context", ServerContext)
"""Key of the application's context."""
SERVER_CONFIG = web.AppKey("server_config", ServerConfig)
"""Key of the application's configuration."""
ARRIVAL = web.RequestKey("arrival", float)
"""Arrival time of the request, in seconds of the monotonic clock."""
REQUEST_ID = web.RequestKey("request_id", str)
"""Key of the request's id."""
WARNINGS = web.RequestKey("warnings", list[str])
"""Parts of the request that have no effect, for the header `Warning` of the answer."""
CLIENT_ID = web.RequestKey("client", str)
"""Client of the request, identified by its API key; absent without keys."""
