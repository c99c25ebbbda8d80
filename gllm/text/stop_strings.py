"""Stop strings over a stream of text.

Owns which text is safe to show: what may be the start of a stop string is held back, so that
nothing of one leaks. Knows nothing of tokens.
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
        # Scans for the first characters in C; a lookahead that always fails where there are none.
        self._first = re.compile("|".join(map(re.escape, by_first)) or "(?!)")

    def __bool__(self) -> bool:
        return bool(self._stops)

    def find(self, text: str, num_searched: int) -> tuple[int, str] | None:
        """Return the stop string that is complete first and where it begins, None without one.

        If several end at the same character, the longest counts. num_searched: characters at the
        beginning of `text` in which no stop string ends.
        """
        hits = []
        for stop in self._stops:
            begin = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if begin >= 0:
                hits.append((begin + len(stop), begin, stop))
        return None if not hits else min(hits)[1:]

    def held_from(self, text: str) -> int:
        """Return where the longest end of `text` begins that may be the start of a stop string.

        `text` holds no complete stop string. The length of `text` stands for no such end.
        """
        begin = 0
        while (found := self._first.search(text, begin)) is not None:
            begin = found.start()
            tail = text[begin:]
            if any(stop.startswith(tail) for stop in self._by_first[text[begin]]):
                return begin
            begin += 1
        return len(text)


class StopMatcher:
    """Cuts a stream at the first stop string that is complete; at a tie the longest counts.

    What comes out does not depend on how the stream is cut into pieces. The beginning of what is
    held back only moves forward, so a stream takes one comparison per character and stop string at
    most, made by `str.startswith`.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that is complete now, which ends it."""
        window = self._held + text
        hit = self._stops.find(window, len(self._held))
        if hit is not None:
            begin, stop = hit
            self._held = ""
            return window[:begin], stop
        cut = self._stops.held_from(window)
        self._held = window[cut:]
        return window[:cut], None

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
