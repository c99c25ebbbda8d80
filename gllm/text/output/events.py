"""What a model's output consists of, besides plain text.

Owns the events that parsers give and the message they add up to. Knows nothing of formats.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any


@dataclass(frozen=True, slots=True)
class Content:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; calls count from 0."""

    index: int
    id: str
    name: str
    is_custom: bool = False
    """Whether it calls a custom tool, whose input is free text."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: pieces of the text of a JSON object, or of a custom tool's
    input."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallBroken:
    """A call that had begun turned out to be none; its whole text follows as content."""

    index: int


Event = Content | Reasoning | CallStart | CallArguments | CallBroken


@dataclass
class Call:
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
class Message:
    """All of an output."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, Call] = field(default_factory=dict)
    """By index; those that broke are missing."""

    def add(self, events: Iterable[Event]) -> None:
        """Append what came."""
        for event in events:
            match event:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallStart(index, call_id, name, is_custom):
                    self.calls[index] = Call(call_id, name, is_custom=is_custom)
                case CallArguments(index, text):
                    self.calls[index].arguments += text
                case CallBroken(index):
                    del self.calls[index]


def merged(events: list[Event]) -> list[Event]:
    """The same events with neighbours of one kind joined."""
    if len(events) < 2:
        return events
    joined: list[Event] = []
    for _, group in groupby(events, _kind):
        several = list(group)
        text = "".join(getattr(event, "text", "") for event in several)
        match several[0]:
            case Content():
                joined.append(Content(text))
            case Reasoning():
                joined.append(Reasoning(text))
            case CallArguments(index):
                joined.append(CallArguments(index, text))
            case _:
                joined += several
    return joined


def _kind(event: Event) -> tuple[type[Event], int]:
    """What is the same in neighbours that can be joined."""
    return type(event), getattr(event, "index", 0)
