"""Events of a parsed output (content, reasoning, tool calls) and the message they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Event of a parsed output: further text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Event of a parsed output: further text of the reasoning section."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """Event of a parsed output: a tool call starts. `index` numbers the calls from 0."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """True if the tool is a custom tool, whose input is free text."""


@dataclass(frozen=True, slots=True)
class ToolCallArgumentsDelta:
    """Event of a parsed output: further text of a tool call's arguments.

    It is a part of a JSON object, or of the free text for a custom tool.
    """

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallAborted:
    """Event of a parsed output: a started tool call is invalid; its text follows as content."""

    index: int


OutputEvent = (
    ContentDelta | ReasoningDelta | ToolCallStart | ToolCallArgumentsDelta | ToolCallAborted
)


@dataclass
class ToolCall:
    """A complete tool call in an assistant message: id, function name and arguments."""

    id: str
    name: str
    arguments: str = ""
    """Text of a JSON object, or the input of a custom tool."""
    is_custom: bool = False
    """True if the tool is a custom tool, whose input is free text."""

    def to_dict(self) -> dict[str, Any]:
        """Return the call as an entry of `tool_calls` of chat completions."""
        if self.is_custom:
            body = {"name": self.name, "input": self.arguments}
            return {"id": self.id, "type": "custom", "custom": body}
        body = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": body}


@dataclass
class AssistantMessage:
    """Assistant message made from a whole parsed output: content, reasoning and tool calls."""

    content: str = ""
    reasoning: str = ""
    tool_calls: dict[int, ToolCall] = field(default_factory=dict)
    """Tool calls by index, without the aborted ones."""

    def apply(self, events: Iterable[OutputEvent]) -> None:
        """Add the deltas and tool calls of events to the message."""
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
    """Merge consecutive deltas of the same kind, and of the same tool call, into one each."""
    if len(events) < 2:
        return events
    merged: list[OutputEvent] = []
    for _, group in groupby(events, lambda event: (type(event), getattr(event, "index", 0))):
        neighbors = list(group)
        text = "".join(getattr(event, "text", "") for event in neighbors)
        match neighbors[0]:
            case ContentDelta():
                merged.append(ContentDelta(text))
            case ReasoningDelta():
                merged.append(ReasoningDelta(text))
            case ToolCallArgumentsDelta(index):
                merged.append(ToolCallArgumentsDelta(index, text))
            case _:
                merged += neighbors
    return merged
