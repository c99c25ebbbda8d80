"""Group streamed output into consecutive blocks of reasoning, text and tool calls.

The Responses API and the Messages API stream their output as such blocks. Each API writes its own
JSON by a `BlockWriter`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gllm.frontend.sse import ServerSentEvent
from gllm.text.output import events as output

BlockKind = Literal["reasoning", "text", "call", "custom"]
"""`custom`: a call of a custom tool, whose text is the tool's input."""
BlockStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass
class OutputBlock:
    """A block of streamed output: consecutive text, reasoning, or one tool call.

    The Responses API and the Messages API divide their output into such blocks.
    """

    kind: BlockKind
    index: int
    """Position among the blocks of the response."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool; empty for other blocks."""
    texts: list[str] = field(default_factory=list)
    """Text deltas received so far."""
    status: BlockStatus = "in_progress"
    """`incomplete`: truncated, or a tool call whose text is not a valid call."""

    @property
    def is_call(self) -> bool:
        """True for a call of a tool."""
        return self.kind in ("call", "custom")

    @property
    def text(self) -> str:
        """Text of the block; for a function call its arguments, the text of a JSON object."""
        return "".join(self.texts)


class BlockWriter(Protocol):
    """Interface that writes output blocks as stream events of the Responses or Messages API."""

    def start_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that start a block, which has no text yet."""

    def extend_block(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """Return the events for more text of a block; the block already contains this text."""

    def end_block(self, block: OutputBlock) -> list[ServerSentEvent]:
        """Return the events that end a block."""


class BlockSplitter:
    """Groups the parsed output of a choice into blocks of text, reasoning and tool calls.

    Args:
        writer: Writes the blocks as server-sent events.
    """

    def __init__(self, writer: BlockWriter) -> None:
        self.blocks: list[OutputBlock] = []
        """All blocks of the answer; only the last one can be in progress."""
        self._writer = writer

    def push(self, events: Sequence[output.OutputEvent]) -> list[ServerSentEvent]:
        """Add parsed output; return the server-sent events to stream.

        A call that starts and aborts within `events` is left out. A call that has been streamed
        cannot be removed; it ends as incomplete.
        """
        written: list[ServerSentEvent] = []
        for event in _drop_aborted_calls(events):
            match event:
                case output.ContentDelta(text):
                    written += self._push_text("text", text)
                case output.ReasoningDelta(text):
                    written += self._push_text("reasoning", text)
                case output.ToolCallStart(_, call_id, name, is_custom):
                    kind: BlockKind = "custom" if is_custom else "call"
                    written += self._start(OutputBlock(kind, len(self.blocks), call_id, name))
                case output.ToolCallArgumentsDelta(_, text):
                    written += self._extend(text)
                case output.ToolCallAborted(_):
                    written += self.end_block("incomplete")
        return written

    def finish(self, finish_reason: str) -> list[ServerSentEvent]:
        """End the last block at the end of the output; return its server-sent events.

        The parser aborts an incomplete call itself, so a call in progress is complete here whatever
        the finish reason.
        """
        is_cut_off = (
            finish_reason in ("length", "abort")
            and bool(self.blocks)
            and not self.blocks[-1].is_call
        )
        return self.end_block("incomplete" if is_cut_off else "completed")

    def end_block(self, status: BlockStatus = "completed") -> list[ServerSentEvent]:
        """End the block in progress, if there is one, and return its last events."""
        if not self.blocks or self.blocks[-1].status != "in_progress":
            return []
        self.blocks[-1].status = status
        return self._writer.end_block(self.blocks[-1])

    def _push_text(self, kind: BlockKind, text: str) -> list[ServerSentEvent]:
        last = self.blocks[-1] if self.blocks else None
        if last is not None and last.kind == kind and last.status == "in_progress":
            return self._extend(text)
        return self._start(OutputBlock(kind, len(self.blocks))) + self._extend(text)

    def _start(self, block: OutputBlock) -> list[ServerSentEvent]:
        written = self.end_block()
        self.blocks.append(block)
        return written + self._writer.start_block(block)

    def _extend(self, text: str) -> list[ServerSentEvent]:
        block = self.blocks[-1]
        block.texts.append(text)
        return self._writer.extend_block(block, text)


def _drop_aborted_calls(events: Sequence[output.OutputEvent]) -> Sequence[output.OutputEvent]:
    """Return the events without those of calls that both start and abort among them."""
    if len(events) < 2:
        return events
    started = {event.index for event in events if isinstance(event, output.ToolCallStart)}
    aborted = {event.index for event in events if isinstance(event, output.ToolCallAborted)}
    dropped = started & aborted
    return [event for event in events if getattr(event, "index", None) not in dropped]
