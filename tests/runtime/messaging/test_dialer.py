"""Log of a dialer: each cause for which there is no session is said at once."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from gllm.recovery.backoff import Backoff
from gllm.runtime.messaging.connection_pool import Dialer, PeerConnection

CAUSES = ["connection refused", "connection refused", "the node secrets differ"]


async def resolve(host: str, port: int) -> list[str]:
    return [f"10.0.0.1:{port}"]


async def test_a_wrong_secret_is_said_at_once_after_another_cause(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    causes = iter([*CAUSES, *CAUSES])
    has_ended = asyncio.Event()

    def dial(
        address: str, num_failures: int, on_end: Callable[[str, bool], None]
    ) -> PeerConnection:
        cause = next(causes, "")
        if cause:
            on_end(cause, False)
        else:
            has_ended.set()
        return PeerConnection(address, lambda message: None, 0.0)

    backoff = Backoff(first_seconds=0.0, max_seconds=0.0)
    dialer = Dialer("router:29700", dial, resolve, backoff, lambda address: None)
    dialer.start()
    async with asyncio.timeout(10):
        await has_ended.wait()
    await dialer.stop()
    assert [record.getMessage() for record in caplog.records] == [
        f"no session with router:29700: {cause}; trying again" for cause in CAUSES[1:]
    ]
