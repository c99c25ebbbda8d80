"""What a model's output consists of, besides plain text.

Owns the events that parsers give and the message they add up to. Knows nothing of formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A tool call begins; calls count from 0."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """Whether it calls a custom tool, whose input is free text."""


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """More of a call's arguments: pieces of the text of a JSON object, or of a custom tool's
    input."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallAborted:
    """A call that had begun turned out to be none; its whole text follows as content."""

    index: int


OutputEvent = (
    ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArgumentsDelta | ToolCallAborted
)


@dataclass
class ToolCall:
    """A tool call."""

    id: str
    name: str
    arguments: str = ""
    """The text of a JSON object, or a custom tool's input."""
    is_custom: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` of chat completions."""
        if self.is_custom:
            body = {"name": self.name, "input": self.arguments}
            return {"id": self.id, "type": "custom", "custom": body}
        body = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": body}


@dataclass
class AssistantMessage:
    """All of an output."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, ToolCall] = field(default_factory=dict)
    """By index; those that broke are missing."""

    def apply(self, events: Iterable[OutputEvent]) -> None:
        """Append what came."""
        for event in events:
            match event:
                case ContentDelta(text):
                    self.content += text
                case ReasoningDelta(text):
                    self.reasoning += text
                case ToolCallStart(index, call_id, name, is_custom):
                    self.tool_calls[index] = ToolCall(call_id, name, is_custom=is_custom)
                case ToolCallArgumentsDelta(index, text):
                    self.tool_calls[index].arguments += text
                case ToolCallAborted(index):
                    del self.tool_calls[index]


def merge_events(events: list[OutputEvent]) -> list[OutputEvent]:
    """The same events with neighbours of one kind joined."""
    if len(events) < 2:
        return events
    joined: list[OutputEvent] = []
    for _, group in groupby(events, _kind):
        several = list(group)
        text = "".join(getattr(event, "text", "") for event in several)
        match several[0]:
            case ContentDelta():
                joined.append(ContentDelta(text))
            case ReasoningDelta():
                joined.append(ReasoningDelta(text))
            case ToolCallArgumentsDelta(index):
                joined.append(ToolCallArgumentsDelta(index, text))
            case _:
                joined += several
    return joined


def _kind(event: OutputEvent) -> tuple[type[OutputEvent], int]:
    """What is the same in neighbours that can be joined."""
    return type(event), getattr(event, "index", 0)
