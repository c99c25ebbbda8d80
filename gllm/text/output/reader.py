"""Reader over text that is still being generated, for parsers written as if all of it were there.

A parser is a generator that yields where it needs text that has not arrived. Its decisions depend
on the text alone, never on how the text is cut into pieces.
"""

import re
from collections.abc import Callable, Generator
from functools import cache
from typing import TypeVar

T = TypeVar("T")
ParserCoroutine = Generator[None, None, T]
"""A parser or a part of one: yields while it waits for text, and returns its result."""
TextSink = Callable[[str], object]
"""Function that receives text."""

SPACE = re.compile(r"\s+")


def discard(text: str) -> None:
    """Ignore a text: the sink for text that is not used."""


class TrailingSpaceFilter:
    """Writes text to a sink, but buffers trailing whitespace until other text follows."""

    def __init__(self, sink: TextSink) -> None:
        self._sink = sink
        self._space: list[str] = []

    def push(self, text: str) -> None:
        """Write text to the sink, except trailing whitespace."""
        visible = text.rstrip()
        if visible:
            self._sink("".join([*self._space, visible]))
            self._space.clear()
        if len(visible) < len(text):
            self._space.append(text[len(visible) :])

    def drop(self) -> None:
        """Discard the buffered whitespace."""
        self._space.clear()

    def flush(self) -> None:
        """Write the buffered whitespace to the sink."""
        if self._space:
            self._sink("".join(self._space))
            self._space.clear()


class TextReader:
    """Buffer of streamed text that incremental parsers read and consume from its start.

    After `close`, parsers no longer wait for more text.
    """

    def __init__(self) -> None:
        self._text = ""
        self._position = 0
        self._is_closed = False
        self._recorded: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text to the buffer."""
        self._text = self._text[self._position :] + text
        self._position = 0

    def close(self) -> None:
        """End the text."""
        self._is_closed = True

    def start_recording(self, consumed: str = "") -> None:
        """Start recording the text that is consumed.

        Args:
            consumed: Text consumed just before, with which the record begins.
        """
        self._recorded = [consumed]

    def stop_recording(self) -> str:
        """Return the text consumed since `start_recording`."""
        recorded, self._recorded = self._recorded or [], None
        return "".join(recorded)

    def consume(self, count: int) -> str:
        """Consume and return `count` characters, which must be in the buffer."""
        text = self._text[self._position : self._position + count]
        self._position += count
        if self._recorded is not None:
            self._recorded.append(text)
        return text

    def peek(self) -> ParserCoroutine[str]:
        """Return the next character without consuming it; empty at the end of the text."""
        while self._position == len(self._text) and not self._is_closed:
            yield
        return self._text[self._position : self._position + 1]

    def consume_while(self, pattern: re.Pattern[str], sink: TextSink) -> ParserCoroutine[None]:
        """Consume characters while they match a pattern.

        Args:
            pattern: One class of characters, any number of them.
            sink: Receives the characters.
        """
        while True:
            yield from self.peek()
            match = pattern.match(self._text, self._position)
            if match is None:
                return
            sink(self.consume(match.end() - self._position))

    def read_while(self, pattern: re.Pattern[str]) -> ParserCoroutine[str]:
        """Consume characters while they match a class of characters, and return them."""
        pieces: list[str] = []
        yield from self.consume_while(pattern, pieces.append)
        return "".join(pieces)

    def skip_space(self) -> ParserCoroutine[None]:
        """Consume whitespace."""
        yield from self.consume_while(SPACE, discard)

    def consume_next(self, *texts: str) -> ParserCoroutine[str]:
        """Skip whitespace, then consume and return the first of the texts that follows it.

        Returns:
            The text; empty if none follows. The whitespace is consumed in any case.
        """
        yield from self.skip_space()
        return (yield from self.consume_any(*texts))

    def consume_any(self, *texts: str) -> ParserCoroutine[str]:
        """Consume and return the first of the texts that matches; empty if none does."""
        for text in texts:
            while True:
                available = self._text[self._position : self._position + len(text)]
                if available == text:
                    return self.consume(len(text))
                if self._is_closed or not text.startswith(available):
                    break
                yield
        return ""

    def consume_until(self, stops: tuple[str, ...], sink: TextSink) -> ParserCoroutine[str]:
        """Consume the text up to and including the first stop.

        Args:
            stops: Texts to stop at; none may be the beginning of another one.
            sink: Receives the text before the stop.

        Returns:
            The stop; empty if the text ended before one.
        """
        while True:
            match = _any_of(stops).search(self._text, self._position)
            if match:
                sink(self.consume(match.start() - self._position))
                return self.consume(len(match[0]))
            num_held = 0 if self._is_closed else max(map(self._num_begun, stops))
            sink(self.consume(len(self._text) - self._position - num_held))
            if self._is_closed:
                return ""
            yield

    def consume_rest(self, sink: TextSink) -> ParserCoroutine[None]:
        """Consume all remaining text."""
        while (yield from self.peek()):
            sink(self.consume(len(self._text) - self._position))

    def _num_begun(self, stop: str) -> int:
        """Return the number of characters at the end that may be the beginning of a stop."""
        longest = min(len(self._text) - self._position, len(stop) - 1)
        return next((n for n in range(longest, 0, -1) if self._text.endswith(stop[:n])), 0)


@cache
def _any_of(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, stops)))
