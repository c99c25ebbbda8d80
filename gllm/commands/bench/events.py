"""What an OpenAI-compatible server streams: events, and the tokens in them.

Owns the reading of server-sent events and of the two endpoints' chunks. Knows nothing of sockets
and clocks.
"""

from typing import Any

import msgspec

DONE = b"[DONE]"


class Delta(msgspec.Struct):
    """An increment of a conversation."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        return self.content or self.reasoning or self.reasoning_content or ""


class Choice(msgspec.Struct):
    """What one chunk brings for a choice, at either endpoint."""

    text: str | None = None
    delta: Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def shown(self) -> str:
        """The increment's text."""
        return self.text or (self.delta.text if self.delta else "")

    @property
    def tokens(self) -> int:
        """Tokens in this increment: of ids as many as there are; of text, unknown, taken as one."""
        if self.token_ids:
            return len(self.token_ids)
        return int(bool(self.shown or (self.delta and self.delta.tool_calls)))


class Usage(msgspec.Struct):
    """The server's own count."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Chunk(msgspec.Struct):
    """One event."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


class EventReader:
    """Cuts bytes, however they come, into the data of events.

    Every `data:` line is an event: these servers put no line break into their JSON.
    """

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The events that `data` completes."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_message(error: Any) -> str:
    """What a server says of an error, in whatever form it says it."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(error)
