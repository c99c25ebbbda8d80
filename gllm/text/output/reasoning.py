"""What a model thinks before it answers.

Owns the tags of the families, and the split at them. Whitespace at both sides of a tag belongs to
nobody. Knows nothing of what an answer holds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gllm.text.output.events import OutputEvent, ReasoningDelta
from gllm.text.output.reader import (
    ParserCoroutine,
    TextReader,
    TextSink,
    TrailingSpaceFilter,
)


@dataclass(frozen=True)
class ReasoningTags:
    """What encloses the reasoning of a family's models."""

    name: str
    opening: str
    closing: str

    def written_by(self, template: str) -> bool:
        """Whether a chat template, given by its source, shows these tags."""
        return self.opening in template or self.closing in template

    def left_open(self, prompt: str) -> bool:
        """Whether a prompt ends where reasoning has just begun."""
        return prompt.rstrip().endswith(self.opening)

    def left_within(self, text: str) -> bool:
        """Whether a text that is to be continued ends somewhere in reasoning."""
        return text.rfind(self.opening) > text.rfind(self.closing)


REASONING_TAGS = {
    tags.name: tags
    for tags in (
        ReasoningTags("think", "<think>", "</think>"),
        ReasoningTags("mistral", "[THINK]", "[/THINK]"),
    )
}
"""Families by name, in the order in which they are looked for."""


class ReasoningSplitter:
    """Reasoning into events, what follows into a sink. Reasoning can only be at the beginning.

    within: whether the text begins in the middle of it.
    """

    def __init__(self, tags: ReasoningTags, within: bool, answer: TextSink) -> None:
        self.events: list[OutputEvent] = []
        self._tags = tags
        self._within = within
        self._answer = answer
        self._thought = TrailingSpaceFilter(lambda text: self.events.append(ReasoningDelta(text)))

    def split(self, reader: TextReader) -> ParserCoroutine[None]:
        """The parser."""
        reader.keep()
        yield from reader.space()
        opened = yield from reader.starts(self._tags.opening)
        before = reader.kept()
        if opened or self._within:
            yield from reader.space()
            if (yield from reader.until((self._tags.closing,), self._thought.push)):
                yield from reader.space()
        else:
            self._answer(before)
        yield from reader.rest(self._answer)


class ReasoningTokenCounter:
    """Counts the tokens of reasoning, the tags among them.

    opening, closing: the tags' token ids. within: whether the output begins in the middle of it.
    is_blank: whether a token is nothing but whitespace.
    """

    def __init__(
        self, opening: int, closing: int, within: bool, is_blank: Callable[[int], bool]
    ) -> None:
        self.count = 0
        self._opening = opening
        self._closing = closing
        self._within = within
        self._is_blank = is_blank
        self._over = False

    def add(self, token_ids: Sequence[int]) -> None:
        """The next tokens of the output."""
        for token in token_ids:
            if self._over:
                return
            if not self._within and not self._is_blank(token):
                self._within = token == self._opening
                self._over = not self._within
            self.count += self._within
            if self._within and token == self._closing:
                self._over = True
