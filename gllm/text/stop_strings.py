"""Match stop strings in a stream of text.

Text that may be the start of a stop string is held back, so that no part of a stop string is shown.
"""

import re
from collections.abc import Sequence


class StopStrings:
    """The stop strings of one request, prepared once for the matchers of all its choices."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        by_first: dict[str, list[str]] = {}
        for stop in self._stops:
            by_first.setdefault(stop[0], []).append(stop)
        self._by_first = {char: tuple(stops) for char, stops in by_first.items()}
        # Finds first characters in C; without stop strings a lookahead that always fails.
        self._first = re.compile("|".join(map(re.escape, by_first)) or "(?!)")

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, num_searched: int) -> tuple[int, str] | None:
        """Return the start and the text of the stop string that ends first, None if there is none.

        Of several that end at the same character, the longest counts.

        Args:
            text: The text to search.
            num_searched: Number of characters at the beginning in which no stop string ends.
        """
        matches = []
        for stop in self._stops:
            begin = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        return None if not matches else min(matches)[1:]

    def held_from(self, text: str) -> int:
        """Return the start of the longest suffix of `text` that may begin a stop string.

        `text` contains no complete stop string. Without such a suffix the result is its length.
        """
        begin = 0
        while (match := self._first.search(text, begin)) is not None:
            begin = match.start()
            tail = text[begin:]
            if any(stop.startswith(tail) for stop in self._by_first[text[begin]]):
                return begin
            begin += 1
        return len(text)


class StopMatcher:
    """Matcher that ends a stream of text at the first complete stop string.

    The result does not depend on how the stream is cut into pieces. The start of the held-back text
    only moves forward, so each character costs at most one `str.startswith` per stop string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that can be shown, and the stop string that ends the stream, if any."""
        window = self._held + text
        match = self._stops.find(window, len(self._held))
        if match is not None:
            begin, stop = match
            self._held = ""
            return window[:begin], stop
        cut = self._stops.held_from(window)
        self._held = window[cut:]
        return window[:cut], None

    def finish(self) -> str:
        """End the stream and return the text that was held back."""
        held, self._held = self._held, ""
        return held
