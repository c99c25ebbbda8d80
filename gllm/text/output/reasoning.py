"""Split the reasoning section off an output and count its tokens.

Whitespace on both sides of a tag belongs neither to the reasoning nor to the answer.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gllm.text.output.events import OutputEvent, ReasoningDelta
from gllm.text.output.reader import ParserCoroutine, TextReader, TextSink, TrailingSpaceFilter


@dataclass(frozen=True)
class ReasoningTags:
    """Opening and closing tag of the reasoning section in the outputs of a model family."""

    name: str
    """Value of --reasoning-parser."""
    opening: str
    closing: str

    def are_used_by(self, template: str) -> bool:
        """Return True if the source of a chat template contains one of the tags."""
        return self.opening in template or self.closing in template

    def are_opened_by(self, prompt: str) -> bool:
        """Return True if a prompt ends with the opening tag."""
        return prompt.rstrip().endswith(self.opening)

    def are_open_in(self, text: str) -> bool:
        """Return True if a text ends inside a reasoning section."""
        return text.rfind(self.opening) > text.rfind(self.closing)


REASONING_TAGS = {
    "think": ReasoningTags("think", "<think>", "</think>"),
    "mistral": ReasoningTags("mistral", "[THINK]", "[/THINK]"),
}
"""Tags by name, in the order in which `auto` looks for them."""


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
        else:
            self._answer(before)
        yield from reader.consume_rest(self._answer)


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
