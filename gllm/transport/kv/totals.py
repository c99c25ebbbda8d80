"""Counters of an engine's transfers of KV blocks."""

from dataclasses import dataclass


@dataclass
class KvTransferTotals:
    """Counters over all generations."""

    num_fetched: int = 0
    """Fetches that have got all bytes."""
    num_failed: int = 0
    """Other fetches: their tokens are computed."""
    num_bytes: int = 0
    """Bytes that fetches have got, failed ones too."""
    seconds: float = 0.0
    """Total duration of the fetches that have got all bytes."""
    num_served: int = 0
    """Tickets under which blocks were served."""
    num_pushed: int = 0
    """Tickets that were served from the begin of the prefill on."""
