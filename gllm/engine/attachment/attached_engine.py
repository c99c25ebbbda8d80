"""Interface of the engine that serves the requests of routers."""

from collections.abc import Callable
from typing import Protocol

from gllm.messages.handoff import HandoffCommand
from gllm.runtime.head.client import EngineClient
from gllm.runtime.head.kv_events import KvEventSource


class AttachedEngine(Protocol):
    """An engine as sessions with routers see it; `gllm.runtime.head.supervisor` implements it."""

    @property
    def client(self) -> EngineClient:
        """Running requests and the latest figures."""

    @property
    def kv_events(self) -> KvEventSource:
        """Changes of the prefix cache."""

    @property
    def state(self) -> str:
        """loading, ready, recovering, sleeping, draining or dead."""

    @property
    def state_cause(self) -> str:
        """Reason of the death or of the running recovery; otherwise empty."""

    @property
    def is_recovery_overdue(self) -> bool:
        """True if requests no longer wait for the end of the running recovery."""

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""

    def send_kv_command(self, message: HandoffCommand) -> None:
        """Pass a command about KV blocks on; it is dropped while no driver has any."""

    def add_change_listener(self, listener: Callable[[], None]) -> None:
        """Call a function after each event that may change the state."""
