"""Parse the choices of a chat request into content, reasoning, tool calls and finish reasons."""

from collections.abc import Callable

from gllm.text.output.events import (
    AssistantMessage,
    ContentDelta,
    OutputEvent,
    ToolCallAborted,
    ToolCallStart,
)
from gllm.text.output.families import harmony
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.reasoning import ChannelTokenCounter, ReasoningCounter, ReasoningTokenCounter
from gllm.text.tokenizer import Tokenizer


class ChatOutputParser:
    """Parses the outputs of all choices of a chat request, streamed (`push`) or whole (`parse`)."""

    def __init__(self, output_format: OutputFormat) -> None:
        self._format = output_format
        self.is_plain_text = (
            output_format.reasoning_tags is None and output_format.tool_call_format is None
        )
        """True if all text is content, because there are neither tools nor reasoning."""
        self._parsers: dict[int, OutputParser] = {}
        self._calls: dict[int, set[int]] = {}
        """Indices of tool calls that were not aborted, by choice."""

    def push(
        self, index: int, text: str, finish_reason: str | None
    ) -> tuple[list[OutputEvent], str | None]:
        """Parse new text of a choice; return its events and, at the end, the finish reason.

        Args:
            index: index of the choice.
            text: new text of the choice.
            finish_reason: reason of its end; None while it continues.
        """
        if self.is_plain_text:
            return [ContentDelta(text)] if text else [], finish_reason
        if index not in self._parsers:
            self._parsers[index] = OutputParser(self._format)
        parser = self._parsers[index]
        events = parser.push(text)
        if finish_reason is not None:
            events += parser.finish()
        calls = self._calls.setdefault(index, set())
        for event in events:
            if isinstance(event, ToolCallStart):
                calls.add(event.index)
            elif isinstance(event, ToolCallAborted):
                calls.discard(event.index)
        return events, _finish_reason(finish_reason, bool(calls))

    def parse(self, text: str, finish_reason: str | None) -> tuple[AssistantMessage, str | None]:
        """Parse the whole text of a choice; return the message and the finish reason."""
        parser, message = OutputParser(self._format), AssistantMessage()
        message.apply(parser.push(text))
        message.apply(parser.finish())
        return message, _finish_reason(finish_reason, bool(message.tool_calls))


def _finish_reason(reason: str | None, has_calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and has_calls else reason


def create_reasoning_counter_factory(
    tokenizer: Tokenizer, output_format: OutputFormat
) -> Callable[[], ReasoningCounter] | None:
    """Return a function that creates a counter of reasoning tokens for one choice.

    Returns:
        None if the reasoning tags are not single tokens of the vocabulary: reasoning tokens cannot
            be counted then.
    """
    if output_format.reasoning_tags is None:
        return None
    if output_format.has_channels:
        return _create_channel_counter_factory(tokenizer, output_format.starts_in_reasoning)
    opening, closing = map(tokenizer.token_to_id, output_format.reasoning_tags.tokens)
    if opening is None or closing is None:
        return None

    def is_blank(token: int) -> bool:
        return not tokenizer.token_bytes(token).strip()

    return lambda: ReasoningTokenCounter(
        opening, closing, output_format.starts_in_reasoning, is_blank
    )


def _create_channel_counter_factory(
    tokenizer: Tokenizer, starts_in_reasoning: bool
) -> Callable[[], ReasoningCounter] | None:
    """Return a function that creates a counter for outputs in harmony's format."""
    headers, ends = (
        [token for marker in markers if (token := tokenizer.token_to_id(marker)) is not None]
        for markers in ((harmony.START, harmony.CHANNEL), harmony.ENDS)
    )
    text = tokenizer.token_to_id(harmony.MESSAGE)
    if text is None:
        return None
    return lambda: ChannelTokenCounter(
        headers, text, ends, tokenizer.token_bytes, starts_in_reasoning
    )
