"""Times at which a router places the requests that wait for an engine, and their order.

A request that arrives is placed at once, unless the policy collects requests for a heartbeat or has
found no engine with room; then it waits for the next round. A round offers all waiting requests to
the policy, one after the other. The router and simulated clusters use the same object.
"""

from math import inf


class PlacementRounds:
    """Decides which arrivals wait for the next round of placements. Time is an argument.

    A heartbeat begins with the first request after the end of the last one, so that a request is
    placed at once if none was placed for that long. Source: "Aladdin" (arXiv 2405.06856), which
    places the requests of a heartbeat together, longest prompts first.

    Args:
        heartbeat_seconds: least time between two rounds; 0: every request is placed at its arrival.
        waits_for_room: requests wait until an engine has room, in order: while the first of them
            waits, later ones are not placed.
    """

    def __init__(self, heartbeat_seconds: float = 0.0, waits_for_room: bool = False) -> None:
        self.heartbeat_seconds = heartbeat_seconds
        self.waits_for_room = waits_for_room
        self.num_held = 0
        """New requests that have waited for a round although there were engines."""
        self._begun_at = -inf
        self._is_full = False

    @property
    def next_time(self) -> float:
        """Time from which a heartbeat may begin, in seconds."""
        return self._begun_at + self.heartbeat_seconds

    def holds(self, has_waiting: bool, now: float) -> bool:
        """Return True if a request that arrives now has to wait for the next round.

        Args:
            has_waiting: True if other requests wait.
            now: time in seconds.
        """
        return (self._is_full and has_waiting) or now < self.next_time

    def begin(self, now: float) -> None:
        """Begin a round: all waiting requests, or one that has just arrived, are being placed."""
        self._begun_at = now
        self._is_full = False

    def on_unplaced(self) -> bool:
        """Note that no engine takes the first request; return True if later ones have to wait."""
        self._is_full = self.waits_for_room
        return self._is_full

    def rank(self, priority: int, num_prompt_tokens: int, arrival: float) -> tuple[float, ...]:
        """Return the place of a request in a round; smaller ones are placed first.

        Args:
            priority: requests of lower values are placed first.
            num_prompt_tokens: tokens to prefill; in a heartbeat longer prompts are placed first,
                as best fit needs.
            arrival: time in seconds.
        """
        if self.heartbeat_seconds:
            return priority, -num_prompt_tokens, arrival
        return priority, arrival
