"""Stop strings over a stream of text.

Owns which text is safe to show: what may be the start of a stop string is held back, so that
nothing of one leaks. Knows nothing of tokens.
"""

from collections.abc import Sequence


class _Needle:
    """One stop string and how much of it the text's end matches (Knuth, Morris and Pratt)."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        self._borders = [0] * len(text)
        for i in range(1, len(text)):
            self._borders[i] = self._step(self._borders[i - 1], text[i])

    def _step(self, matched: int, char: str) -> int:
        """Characters of the needle matched after one more character."""
        while matched and self.text[matched] != char:
            matched = self._borders[matched - 1]
        return matched + (self.text[matched] == char)

    def feed(self, text: str) -> int | None:
        """Characters of `text` up to the end of the first match, None without one."""
        if not self.matched and self.text[0] not in text:
            return None
        for i, char in enumerate(text):
            self.matched = self._step(self.matched, char)
            if self.matched == len(self.text):
                return i + 1
        return None


class StopMatcher:
    """Cuts a stream at the first stop string that is complete; at a tie the longest counts.

    What comes out does not depend on how the stream is cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._needles = [_Needle(stop) for stop in stops]
        self._held = ""

    def push(self, text: str) -> tuple[str, str | None]:
        """Text that may be shown, and the stop string that is complete now, which ends it."""
        held = self._held + text
        hits = [(needle.feed(text), needle.text) for needle in self._needles]
        ends = [(end, -len(stop), stop) for end, stop in hits if end is not None]
        if ends:
            end, _, stop = min(ends)
            self._held = ""
            return held[: len(held) - len(text) + end - len(stop)], stop
        hold = max((needle.matched for needle in self._needles), default=0)
        cut = len(held) - hold
        self._held = held[cut:]
        return held[:cut], None

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held
