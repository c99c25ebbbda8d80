"""Functions that send to an attached engine, for the client of a router."""

from collections.abc import Callable

from gllm.messages.requests import AbortSequences, SubmitRequest
from gllm.router.dispatch_target import KvPeer
from gllm.router.engine_record import EngineRecord
from gllm.runtime.head.request_client import SendFunction
from gllm.runtime.messaging.engine_link import EngineLink


def request_sender(
    link: EngineLink, record: EngineRecord, clock: Callable[[], float]
) -> SendFunction:
    """Return the function that sends requests to an engine, and counts them as its load.

    Args:
        link: session with the engine.
        record: load of the engine.
        clock: returns the time in seconds.
    """

    def send(message: SubmitRequest | AbortSequences) -> None:
        link.send(message)
        if isinstance(message, SubmitRequest):
            record.on_submitted(message, clock())
        else:
            record.on_aborted(message)

    return send


def kv_peer(link: EngineLink) -> KvPeer:
    """Return an engine's part in hand-offs, with its endpoint as announced last."""
    return KvPeer(
        link.announce.run,
        lambda: link.announce.kv_endpoint,
        link.send,
        lambda: link.announce.kv_digest,
        link.announce.accepts_prefetches,
    )
