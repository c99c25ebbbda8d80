"""Deadlines of tickets, of which the due ones are found without a look at the others."""

import math
from heapq import heappop, heappush


class TicketDeadlines:
    """One deadline per ticket, in seconds of the caller's clock."""

    def __init__(self) -> None:
        self._deadlines: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        """Deadlines with their tickets; those that differ from `_deadlines` have been replaced."""

    def set(self, ticket: int, deadline: float) -> None:
        """Replace the deadline of a ticket; infinity removes it."""
        if deadline == math.inf:
            self._deadlines.pop(ticket, None)
        elif self._deadlines.get(ticket) != deadline:
            self._deadlines[ticket] = deadline
            heappush(self._heap, (deadline, ticket))

    def pop_due(self, now: float) -> list[int]:
        """Remove and return the tickets whose deadlines have passed, the earliest one first."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            deadline, ticket = heappop(self._heap)
            if self._deadlines.get(ticket) == deadline:
                del self._deadlines[ticket]
                due.append(ticket)
        return due
