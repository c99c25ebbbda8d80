"""Parse server-sent events and the chunks of OpenAI's completion endpoints."""

from typing import Any

import msgspec

DONE = b"[DONE]"


class StreamDelta(msgspec.Struct):
    """Delta of a chat completion chunk."""

    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None

    @property
    def text(self) -> str:
        """Content or reasoning, whichever the delta carries."""
        return self.content or self.reasoning or self.reasoning_content or ""


class StreamChoice(msgspec.Struct):
    """One choice in a chunk, of either endpoint."""

    text: str | None = None
    delta: StreamDelta | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None

    @property
    def output_text(self) -> str:
        """Text of the chunk."""
        return self.text or (self.delta.text if self.delta else "")

    @property
    def num_tokens(self) -> int:
        """Number of token ids; 1 if the chunk has text but no ids."""
        if self.token_ids:
            return len(self.token_ids)
        return int(bool(self.output_text or (self.delta and self.delta.tool_calls)))


class StreamUsage(msgspec.Struct):
    """Token counts of the server."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class StreamChunk(msgspec.Struct):
    """One event of the stream."""

    choices: list[StreamChoice] = []
    usage: StreamUsage | None = None
    error: Any = None


class EventReader:
    """Split a byte stream into the data of server-sent events.

    Every `data:` line is one event, because these servers put no line break into their JSON.
    """

    def __init__(self) -> None:
        self._incomplete_line = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add received bytes and return the data of the events that they complete."""
        lines = (self._incomplete_line + data).split(b"\n")
        self._incomplete_line = lines.pop()
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def error_message(error: Any) -> str:
    """Return the message of an error object in any of the common forms."""
    if isinstance(error, dict):
        inner = error.get("error", error)
        return str(inner.get("message", inner)) if isinstance(inner, dict) else str(inner)
    return str(error)
