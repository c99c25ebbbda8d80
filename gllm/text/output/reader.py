"""A text that is still being written, for parsers that read it as if it were whole.

Owns the waiting: a parser is a generator that yields where it needs text that is not there yet.
What it decides can depend on the text alone, never on how the text was cut into pieces. Knows
nothing of formats.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
ParserCoroutine = Generator[None, None, T]
"""A parser, or a part of one: waits at every yield, and returns what it found."""
TextSink = Callable[[str], object]
"""Takes text."""

SPACE = re.compile(r"\s+")


def discard(text: str) -> None:
    """A sink for what nobody needs."""


class TrailingSpaceFilter:
    """Passes text on, but whitespace only once something follows it."""

    def __init__(self, sink: TextSink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def push(self, text: str) -> None:
        """More text."""
        shown = text.rstrip()
        if shown:
            self._sink("".join([*self._space, shown]))
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])

    def drop(self) -> None:
        """Nothing follows the whitespace so far."""
        self._space.clear()

    def flush(self) -> None:
        """Pass it on nevertheless."""
        if self._space:
            self._sink("".join(self._space))
            self._space.clear()


class TextReader:
    """The text from where the parser stands. At the end there is nothing more to wait for."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._ended = False
        self._kept: list[str] | None = None

    def feed(self, text: str) -> None:
        """More text is there."""
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come."""
        self._ended = True

    def keep(self, already: str = "") -> None:
        """Remember what is taken from here on, behind what was taken just before."""
        self._kept = [already]

    def kept(self) -> str:
        """All that was taken since `keep`, which ends with this."""
        kept, self._kept = self._kept or [], None
        return "".join(kept)

    def take(self, count: int) -> str:
        """Go on by so many characters, which have to be there."""
        taken = self._text[self._at : self._at + count]
        self._at += count
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def peek(self) -> ParserCoroutine[str]:
        """The next character, empty at the end."""
        while self._at == len(self._text) and not self._ended:
            yield
        return self._text[self._at : self._at + 1]

    def word(self, pattern: re.Pattern[str], sink: TextSink) -> ParserCoroutine[None]:
        """Take characters while they match. The pattern is one kind of character, any number."""
        while True:
            yield from self.peek()
            found = pattern.match(self._text, self._at)
            if found is None:
                return
            sink(self.take(found.end() - self._at))

    def space(self) -> ParserCoroutine[None]:
        """Take whitespace."""
        yield from self.word(SPACE, discard)

    def starts(self, *texts: str) -> ParserCoroutine[str]:
        """Take the first of the texts that comes next; empty where none does."""
        for text in texts:
            while True:
                there = self._text[self._at : self._at + len(text)]
                if there == text:
                    return self.take(len(text))
                if self._ended or not text.startswith(there):
                    break
                yield
        return ""

    def until(self, stops: tuple[str, ...], sink: TextSink) -> ParserCoroutine[str]:
        """Take the text up to the first of the stops, and that stop, which is returned; empty where
        the end came first. No stop may be the beginning of another one."""
        while True:
            found = _any_of(stops).search(self._text, self._at)
            if found:
                sink(self.take(found.start() - self._at))
                return self.take(len(found[0]))
            held = 0 if self._ended else max(self._begun(stop) for stop in stops)
            sink(self.take(len(self._text) - self._at - held))
            if self._ended:
                return ""
            yield

    def rest(self, sink: TextSink) -> ParserCoroutine[None]:
        """Take all that comes."""
        while (yield from self.peek()):
            sink(self.take(len(self._text) - self._at))

    def _begun(self, stop: str) -> int:
        """Characters at the end that may be the beginning of the stop."""
        longest = min(len(self._text) - self._at, len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if self._text.endswith(stop[:n])), 0)


@cache
def _any_of(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, stops)))
