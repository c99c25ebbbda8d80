"""Find the request that an AddEvent after a restart continues.

Sequence ids are new for each submission, so requests are recognized by their contents and arrival.
"""

from collections import defaultdict
from collections.abc import Iterable

from gllm.observability.step_log import AddEvent

RequestContents = tuple[tuple[int, ...], int, tuple[int, ...], int, str]
"""Fields of a request that every submission repeats."""


class ResumedRequestFinder:
    """The requests that were unfinished when a generation ended."""

    def __init__(self, unfinished: Iterable[AddEvent]) -> None:
        self._unfinished: dict[RequestContents, list[AddEvent]] = defaultdict(list)
        for add in unfinished:
            self._unfinished[_contents(add)].append(add)

    def pop_original(self, add: AddEvent) -> AddEvent | None:
        """Return the first submission of a request and forget it; None for a new request.

        Among requests of equal contents it is the one that arrived closest to the same time.
        """
        if not add.age_seconds:
            return None
        candidates = [
            original for original in self._unfinished[_contents(add)] if add.n <= original.n
        ]
        if not candidates:
            return None
        arrival = arrival_time(add)
        original = min(candidates, key=lambda candidate: abs(arrival_time(candidate) - arrival))
        self._unfinished[_contents(add)].remove(original)
        return original


def arrival_time(add: AddEvent) -> float:
    """Return the time at which a request arrived, which is earlier than the event if it waited."""
    return add.time - add.age_seconds


def _contents(add: AddEvent) -> RequestContents:
    return tuple(add.prompt), add.max_tokens, tuple(add.stop_ids), add.priority, add.cache_salt
