"""Requests on their way to an engine, which its latest statistics do not include yet."""

SETTLE_SECONDS = 0.05
"""Age from which a request is in the statistics that arrive: the time of both ways and of the
engine's next report on a network between two machines."""


class SentRequests:
    """Requests that this router has sent to one engine and that `stats` do not include yet."""

    def __init__(self) -> None:
        self._requests: dict[int, tuple[float, int]] = {}
        """Time of sending and uncached prompt tokens by wire id, in order of sending."""
        self.num_sent_tokens = 0
        """Their uncached prompt tokens."""

    @property
    def num_sent(self) -> int:
        """Number of requests."""
        return len(self._requests)

    def on_sent(self, wire_id: int, num_tokens: int, now: float) -> None:
        """Add a request with its uncached prompt tokens."""
        self.on_output(wire_id)
        self._requests[wire_id] = now, num_tokens
        self.num_sent_tokens += num_tokens

    def on_output(self, wire_id: int) -> None:
        """Remove a request that has output or has ended; others are ignored."""
        if request := self._requests.pop(wire_id, None):
            self.num_sent_tokens -= request[1]

    def on_stats(self, now: float) -> None:
        """Remove the requests that statistics include if they arrive now."""
        for wire_id, (sent_at, _) in list(self._requests.items()):
            if now - sent_at < SETTLE_SECONDS:
                return
            self.on_output(wire_id)
