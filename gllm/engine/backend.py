"""Interface of what computes the requests of an engine: its own pipeline, or a fleet."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from gllm.engine.interface import EngineStatus
from gllm.options.slo import Slo
from gllm.runtime.head.request_client import RequestClient


class Backend(Protocol):
    """Computes requests of token ids for a `TextEngine`."""

    @property
    def client(self) -> RequestClient:
        """Running requests."""

    @property
    def state(self) -> str:
        """Present state: loading, ready, recovering, sleeping, draining or dead."""

    @property
    def died(self) -> asyncio.Event:
        """Set when the backend is dead."""

    def status(self) -> EngineStatus:
        """Return a snapshot of state and counters."""

    def describe(self) -> dict[str, Any]:
        """Return configuration and state as JSON values."""

    @property
    def accepts_requests(self) -> bool:
        """True if requests run, or wait until they can."""

    def check_ready(self) -> None:
        """Raise EngineUnavailableError unless requests run."""

    def check_admission(
        self,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        priority: int,
        cache_salt: str,
        slo: Slo | None,
    ) -> None:
        """Refuse a new request that is not likely to meet its objectives, if that is configured.

        Args:
            prompts: token ids of each prompt.
            max_tokens: most tokens to generate for each; None for as many as fit.
            priority: requests of lower values run first.
            cache_salt: cached prefixes are shared within one salt.
            slo: objectives; None for none.

        Raises:
            OverloadedError: the request is refused.
        """

    async def start(self) -> None:
        """Wait until requests can run. Raises EngineError."""

    async def drain(self, seconds: float) -> None:
        """Reject new requests and wait at most `seconds` for the running ones."""

    async def stop(self) -> None:
        """Stop; running requests end with an error."""

    def set_sleeping(self, is_on: bool) -> None:
        """Refuse new requests, or accept them again; running ones go on."""

    async def reset_prefix_cache(self) -> str:
        """Empty the prefix cache; return the error, empty on success."""

    async def start_profile(self, folder: str) -> str:
        """Start a profile on all stages; return the first error, empty on success."""

    async def stop_profile(self) -> str:
        """Stop the profile on all stages; return the first error, empty on success."""
