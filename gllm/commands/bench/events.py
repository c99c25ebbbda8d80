"""Chunks of the streams of OpenAI's completion endpoints."""

from typing import Any

import msgspec


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
