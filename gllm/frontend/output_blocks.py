"""An answer as blocks in a row, as newer APIs show it: reasoning, text, tool calls.

Owns where a block ends and the next one begins. Knows nothing of how blocks are written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from gllm.frontend.sse import ServerSentEvent
from gllm.text.output import events as output

BlockKind = Literal["reasoning", "text", "call", "custom"]
"""`custom`: a call of a custom tool, whose text is its input."""
BlockStatus = Literal["in_progress", "completed", "incomplete"]


@dataclass
class OutputBlock:
    """One block, as far as it got."""

    kind: BlockKind
    index: int
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    status: BlockStatus = "in_progress"
    """Incomplete: cut off, or a call that turned out to be none."""

    @property
    def is_call(self) -> bool:
        """Whether it is a call of a tool."""
        return self.kind in ("call", "custom")

    @property
    def text(self) -> str:
        """What it says; of a call: its arguments, the text of a JSON object."""
        return "".join(self.pieces)


class BlockWriter(Protocol):
    """How an API writes blocks to a stream."""

    def opened(self, block: OutputBlock) -> list[ServerSentEvent]:
        """A block without text begins."""

    def grown(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """More of a block's text, which is in the block already."""

    def closed(self, block: OutputBlock) -> list[ServerSentEvent]:
        """A block has ended."""


class BlockSplitter:
    """BlockSplitter on their way through a pen."""

    def __init__(self, pen: BlockWriter) -> None:
        self.all: list[OutputBlock] = []
        self._pen = pen

    def add(self, events: Sequence[output.OutputEvent]) -> list[ServerSentEvent]:
        """What the output's events add to a stream.

        A call that turns out to be none is left out where all of it is among the events; it cannot
        be taken back later.
        """
        written: list[ServerSentEvent] = []
        for event in _without_broken_calls(events):
            match event:
                case output.ContentDelta(text):
                    written += self._text("text", text)
                case output.ReasoningDelta(text):
                    written += self._text("reasoning", text)
                case output.ToolCallStart(_, call_id, name, is_custom):
                    kind: BlockKind = "custom" if is_custom else "call"
                    written += self._begin(OutputBlock(kind, len(self.all), call_id, name))
                case output.ToolCallArgumentsDelta(_, text):
                    written += self._grow(text)
                case output.ToolCallAborted(_):
                    written += self.end("incomplete")
        return written

    def finish(self, reason: str) -> list[ServerSentEvent]:
        """The end of the output. A call that did not break is whole, whatever ended the output."""
        cut = reason in ("length", "abort") and bool(self.all) and not self.all[-1].is_call
        return self.end("incomplete" if cut else "completed")

    def end(self, status: BlockStatus = "completed") -> list[ServerSentEvent]:
        """The end of what is open."""
        if not self.all or self.all[-1].status != "in_progress":
            return []
        self.all[-1].status = status
        return self._pen.closed(self.all[-1])

    def _text(self, kind: BlockKind, text: str) -> list[ServerSentEvent]:
        last = self.all[-1] if self.all else None
        if last is not None and last.kind == kind and last.status == "in_progress":
            return self._grow(text)
        return self._begin(OutputBlock(kind, len(self.all))) + self._grow(text)

    def _begin(self, block: OutputBlock) -> list[ServerSentEvent]:
        written = self.end()
        self.all.append(block)
        return written + self._pen.opened(block)

    def _grow(self, text: str) -> list[ServerSentEvent]:
        block = self.all[-1]
        block.pieces.append(text)
        return self._pen.grown(block, text)


def _without_broken_calls(events: Sequence[output.OutputEvent]) -> Sequence[output.OutputEvent]:
    """The events without those of calls that begin and break among them."""
    if len(events) < 2:
        return events
    begun = {event.index for event in events if isinstance(event, output.ToolCallStart)}
    broken = {event.index for event in events if isinstance(event, output.ToolCallAborted)}
    gone = begun & broken
    return [event for event in events if getattr(event, "index", None) not in gone]
