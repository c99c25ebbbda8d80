"""An answer as blocks in a row, as newer APIs show it: reasoning, text, tool calls.

Owns where a block ends and the next one begins. Knows nothing of how blocks are written.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from gllm.frontend.sse import Event
from gllm.text.output import events as output

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """One block, as far as it got."""

    kind: Kind
    index: int
    text: str = ""
    """Of a call: its arguments, the text of a JSON object."""
    call_id: str = ""
    name: str = ""
    broken: bool = False
    """A call that turned out to be none."""


class Pen(Protocol):
    """How an API writes blocks to a stream."""

    def opened(self, block: Block) -> list[Event]:
        """A block without text begins."""

    def grown(self, block: Block, text: str) -> list[Event]:
        """More of a block's text, which is in the block already."""

    def closed(self, block: Block) -> list[Event]:
        """A block is complete."""


class Blocks:
    """Blocks on their way through a pen."""

    def __init__(self, pen: Pen) -> None:
        self.all: list[Block] = []
        self._pen = pen
        self._open = False

    def add(self, events: Iterable[output.Event]) -> list[Event]:
        """What the output's events add to a stream.

        A call that turns out to be none cannot be taken back: its block ends as it is.
        """
        written: list[Event] = []
        for event in events:
            match event:
                case output.Content(text):
                    written += self._text("text", text)
                case output.Reasoning(text):
                    written += self._text("reasoning", text)
                case output.CallStart(_, call_id, name):
                    written += self._begin(Block("call", len(self.all), "", call_id, name))
                case output.CallArguments(_, text):
                    written += self._grow(text)
                case output.CallBroken(_):
                    self.all[-1].broken = True
                    written += self.end()
        return written

    def end(self) -> list[Event]:
        """Close what is open."""
        was_open, self._open = self._open, False
        return self._pen.closed(self.all[-1]) if was_open else []

    def _text(self, kind: Kind, text: str) -> list[Event]:
        written: list[Event] = []
        if not self._open or self.all[-1].kind != kind:
            written += self._begin(Block(kind, len(self.all)))
        return written + self._grow(text)

    def _begin(self, block: Block) -> list[Event]:
        written = self.end()
        self.all.append(block)
        self._open = True
        return written + self._pen.opened(block)

    def _grow(self, text: str) -> list[Event]:
        block = self.all[-1]
        block.text += text
        return self._pen.grown(block, text)


def blocks_of(message: output.Message) -> list[Block]:
    """A finished output as blocks."""
    blocks: list[Block] = []
    if message.reasoning:
        blocks.append(Block("reasoning", 0, message.reasoning))
    if message.content:
        blocks.append(Block("text", len(blocks), message.content))
    for call in message.calls.values():
        blocks.append(Block("call", len(blocks), call.arguments, call.id, call.name))
    return blocks
