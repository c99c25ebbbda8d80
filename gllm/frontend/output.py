"""What the choices of a chat say, while they say it: content, reasoning, tool calls.

Owns one parser for each choice, and how a choice has ended. Every endpoint with messages writes
what comes out of here. Knows nothing of the endpoints' shapes.
"""

from collections.abc import Callable

from gllm.engine.interface import Delta
from gllm.frontend.collect import Choice
from gllm.text.output.events import CallBroken, CallStart, Content, Event, Message
from gllm.text.output.parser import OutputFormat, OutputParser
from gllm.text.output.reasoning import ReasoningCounter
from gllm.text.tokenizer import Tokenizer


class Outputs:
    """The choices of one request."""

    def __init__(self, form: OutputFormat) -> None:
        self._form = form
        self.is_plain = form.reasoning is None and form.calls is None
        """All that is said is content."""
        self._parsers: dict[int, OutputParser] = {}
        self._calls: dict[int, set[int]] = {}
        """Indices of good calls by choice."""

    def take(self, delta: Delta) -> tuple[list[Event], str | None]:
        """What a delta brings, and the finish reason where it is a choice's last one."""
        if self.is_plain:
            return [Content(delta.text)] if delta.text else [], delta.finish_reason
        if delta.index not in self._parsers:
            self._parsers[delta.index] = OutputParser(self._form)
        parser = self._parsers[delta.index]
        events = parser.push(delta.text)
        if delta.finish_reason is not None:
            events += parser.finish()
        calls = self._calls.setdefault(delta.index, set())
        for event in events:
            if isinstance(event, CallStart):
                calls.add(event.index)
            elif isinstance(event, CallBroken):
                calls.discard(event.index)
        return events, _ending(delta.finish_reason, bool(calls))

    def whole(self, choice: Choice) -> tuple[Message, str | None]:
        """All that a finished choice says, and its finish reason."""
        parser, message = OutputParser(self._form), Message()
        message.add(parser.push(choice.text))
        message.add(parser.finish())
        return message, _ending(choice.finish_reason, bool(message.calls))


def _ending(reason: str | None, calls: bool) -> str | None:
    return "tool_calls" if reason == "stop" and calls else reason


def reasoning_counter(
    tokenizer: Tokenizer, form: OutputFormat
) -> Callable[[], ReasoningCounter] | None:
    """Makes what counts a choice's tokens of reasoning; None where they cannot be told apart, the
    tags being no single tokens."""
    if form.reasoning is None:
        return None
    opening = tokenizer.token_id(form.reasoning.opening)
    closing = tokenizer.token_id(form.reasoning.closing)
    if opening is None or closing is None:
        return None

    def is_blank(token: int) -> bool:
        return not tokenizer.token_bytes(token).strip()

    return lambda: ReasoningCounter(opening, closing, form.within, is_blank)
