"""Split the reasoning section off an output and count its tokens.

Whitespace on both sides of a tag belongs neither to the reasoning nor to the answer.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gllm.text.output.events import OutputEvent, ReasoningDelta
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink, TrailingSpaceFilter


@dataclass(frozen=True)
class ReasoningTags:
    """Opening and closing tag of the reasoning section in the outputs of a model family."""

    name: str
    """Value of --reasoning-parser."""
    opening: str
    closing: str
    markers: tuple[str, ...] = ()
    """Parts of the tags that may be special tokens; empty if these are the tags themselves."""
    shown: tuple[str, ...] = ()
    """Texts of the chat templates that use these tags; empty for the tags."""
    answer_tags: tuple[str, str] | None = None
    """Tags around the answer behind the section, which are no content."""
    efforts: Mapping[str, str] | None = None
    """Value of the template's `reasoning_effort` for each value in requests that the model can
    follow; None if the template receives it unchanged."""

    @property
    def tokens(self) -> tuple[str, str]:
        """The special tokens with which the section begins and ends."""
        opening, closing = self.markers or (self.opening, self.closing)
        return opening, closing

    def are_used_by(self, template: str) -> bool:
        """Return True if the source of a chat template contains a text that shows the tags."""
        return any(text in template for text in self.shown or (self.opening, self.closing))

    def are_opened_by(self, prompt: str) -> bool:
        """Return True if a prompt ends with the opening tag."""
        return prompt.rstrip().endswith(self.opening)

    def are_open_in(self, text: str) -> bool:
        """Return True if a text ends inside a reasoning section."""
        return text.rfind(self.opening) > text.rfind(self.closing)


class ReasoningSplitter:
    """Splits a streamed output into reasoning, as events, and the answer, which goes to a sink.

    Only a reasoning section at the beginning is recognized.

    Args:
        tags: Tags of the reasoning section.
        starts_in_reasoning: The text begins inside the reasoning section.
        answer: Receives the text after the reasoning section.
        keeps_leading_space: The text continues reasoning that has begun elsewhere.
    """

    def __init__(
        self,
        tags: ReasoningTags,
        starts_in_reasoning: bool,
        answer: TextSink,
        keeps_leading_space: bool = False,
    ) -> None:
        self.events: list[OutputEvent] = []
        self._tags = tags
        self._starts_in_reasoning = starts_in_reasoning
        self._answer = answer
        self._keeps_leading_space = keeps_leading_space
        self._reasoning = TrailingSpaceFilter(lambda text: self.events.append(ReasoningDelta(text)))

    def parse(self, reader: TextReader) -> ParserCoroutine[None]:
        """Parse the whole output."""
        reader.start_recording()
        is_opened = yield from reader.consume_next(self._tags.opening)
        before = reader.stop_recording()
        if is_opened or self._starts_in_reasoning:
            if self._keeps_leading_space and not is_opened:
                self._reasoning.push(before)
            else:
                yield from reader.skip_space()
            if (yield from reader.consume_until((self._tags.closing,), self._reasoning.push)):
                yield from reader.skip_space()
                yield from self._parse_tagged_answer(reader)
        else:
            self._answer(before)
        yield from reader.consume_rest(self._answer)

    def _parse_tagged_answer(self, reader: TextReader) -> ParserCoroutine[None]:
        """Parse an answer between tags, if there is one; a closing tag ends it."""
        if self._tags.answer_tags is None:
            return
        opening, closing = self._tags.answer_tags
        if not (yield from reader.consume_any(opening)):
            return
        yield from reader.skip_space()
        text = TrailingSpaceFilter(self._answer)
        if (yield from reader.consume_until((closing,), text.push)):
            text.drop()
        else:
            text.flush()


class ReasoningCounter(Protocol):
    """Counter of the reasoning tokens in the output of one choice, markers included."""

    num_tokens: int

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""


class ChannelTokenCounter:
    """Counts the reasoning tokens of one choice whose output is messages in channels.

    A reasoning message counts from the marker of its channel to that of its end.

    Args:
        header_markers: Token ids of the markers with which a header begins.
        text_marker: Token id of the marker between header and text.
        end_markers: Token ids of the markers behind a text.
        decode: Returns the bytes of a token.
        starts_in_reasoning: The output begins inside the reasoning.
    """

    def __init__(
        self,
        header_markers: Collection[int],
        text_marker: int,
        end_markers: Collection[int],
        decode: Callable[[int], bytes],
        starts_in_reasoning: bool,
    ) -> None:
        self.num_tokens = 0
        self._header_markers = header_markers
        self._text_marker = text_marker
        self._end_markers = end_markers
        self._decode = decode
        self._is_inside = starts_in_reasoning
        self._header: list[int] = []
        """Tokens of the header that is being read; empty in a text."""

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        for token in token_ids:
            if self._header or token in self._header_markers:
                self._add_to_header(token)
            elif self._is_inside:
                self.num_tokens += 1
                self._is_inside = token not in self._end_markers

    def _add_to_header(self, token: int) -> None:
        self._is_inside = False
        self._header.append(token)
        if token != self._text_marker:
            return
        if b"analysis" in b"".join(map(self._decode, self._header)):
            self._is_inside = True
            self.num_tokens += len(self._header)
        self._header.clear()


class ReasoningTokenCounter:
    """Counts the reasoning tokens in the output of one choice, tags included.

    Args:
        opening: Token id of the opening tag.
        closing: Token id of the closing tag.
        starts_in_reasoning: The output begins inside the reasoning section.
        is_blank: Returns True if a token is nothing but whitespace.
    """

    def __init__(
        self,
        opening: int,
        closing: int,
        starts_in_reasoning: bool,
        is_blank: Callable[[int], bool],
    ) -> None:
        self.num_tokens = 0
        self._opening = opening
        self._closing = closing
        self._is_inside = starts_in_reasoning
        self._is_blank = is_blank
        self._is_finished = False

    def add(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        for token in token_ids:
            if self._is_finished:
                return
            if not self._is_inside and not self._is_blank(token):
                self._is_inside = token == self._opening
                self._is_finished = not self._is_inside
            self.num_tokens += self._is_inside
            if self._is_inside and token == self._closing:
                self._is_finished = True
