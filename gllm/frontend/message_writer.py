"""Answers of Anthropic's Messages API: content blocks, whole or as events.

Owns the API's shapes. Knows nothing of requests.
"""

import json

from gllm.engine.interface import Delta, EngineInterface
from gllm.frontend.answer import Json
from gllm.frontend.blocks import Block, Blocks
from gllm.frontend.collect import Choice, Tally
from gllm.frontend.errors import ApiError
from gllm.frontend.run import Job
from gllm.frontend.sse import Event
from gllm.text.chat.output_parser import ChatOutputParser

DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""How an increment of a block is written: its type, and the name of its text."""
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""What finish reasons are called; others have no name of this API's own."""


class MessageWriter:
    """Writes one answer. `name` is in ids where the request does not name itself."""

    def __init__(self, engine: EngineInterface, job: Job, name: str) -> None:
        self._head = {
            "id": f"msg_{job.fields.request_id or name}",
            "type": "message",
            "role": "assistant",
            "model": engine.model.name,
        }
        self._outputs = ChatOutputParser(job.output)
        self._blocks = Blocks(self)
        self._begun = False
        self._ending: Json = {}

    def opening(self, tally: Tally) -> list[Event]:
        """As of Writer. The beginning tells what was cached, which the first delta brings."""
        return []

    def delta(self, delta: Delta, tally: Tally) -> list[Event]:
        """As of Writer."""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            ending = {"stop_reason": None, "stop_sequence": None}
            message: Json = {**self._head, "content": [], **ending, "usage": usage(tally)}
            events += [_event("message_start", message=message), _event("ping")]
        said, reason = self._outputs.push(delta.index, delta.text, delta.finish_reason)
        events += self._blocks.add(said)
        if reason is not None:
            events += self._blocks.finish(reason)
            self._ending = _ending(reason, delta.stop_reason)
        return events

    def closing(self, tally: Tally) -> list[Event]:
        """As of Writer."""
        ended = _event("message_delta", delta=self._ending, usage=usage(tally))
        return [ended, _event("message_stop")]

    def failed(self, error: ApiError) -> list[Event]:
        """As of Writer."""
        return [_event("error", **error.body())]

    def whole(self, choices: list[Choice], tally: Tally) -> Json:
        """As of Writer."""
        (choice,) = choices
        self.delta(choice.as_delta(), tally)
        content = [_written(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._ending, "usage": usage(tally)}

    def opened(self, block: Block) -> list[Event]:
        """As of Pen."""
        return [_event("content_block_start", index=block.index, content_block=_written(block))]

    def grown(self, block: Block, text: str) -> list[Event]:
        """As of Pen."""
        kind, name = DELTAS[block.kind]
        delta = {"type": kind, name: text}
        return [_event("content_block_delta", index=block.index, delta=delta)]

    def closed(self, block: Block) -> list[Event]:
        """As of Pen."""
        return [_event("content_block_stop", index=block.index)]


def usage(tally: Tally) -> Json:
    """Token counts: those of the prompt that were cached are not among the input's."""
    thought = tally.reasoning_tokens
    details = {"output_tokens_details": {"thinking_tokens": thought}}
    return {
        "input_tokens": tally.prompt_tokens - tally.cached_tokens,
        "cache_read_input_tokens": tally.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": tally.completion_tokens,
        **({} if thought is None else details),
    }


def _event(kind: str, **data: object) -> Event:
    return Event({"type": kind, **data}, kind)


def _written(block: Block) -> Json:
    """A block as far as it got."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            called = {"id": block.call_id, "name": block.name, "input": _object(block.text)}
            return {"type": "tool_use", **called}


def _object(text: str) -> Json:
    """A JSON object; empty for one that was cut off."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(reason: str, stop: int | str | None) -> Json:
    """Why an answer ended."""
    sequence = stop if isinstance(stop, str) and reason == "stop" else None
    told = REASONS.get(reason, reason) if sequence is None else "stop_sequence"
    return {"stop_reason": told, "stop_sequence": sequence}
