"""Answers of Anthropic's Messages API: content blocks, whole or as events.

Owns the API's shapes. Knows nothing of requests.
"""

import json

from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.frontend.answer import JsonObject
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.errors import ApiError
from gllm.frontend.output_blocks import BlockSplitter, OutputBlock
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.output_parser import ChatOutputParser

DELTA_TYPES = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""How an increment of a block is written: its type, and the name of its text."""
STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
"""What finish reasons are called; others have no name of this API's own."""


class MessagesWriter:
    """Writes one answer. `name` is in ids where the request does not name itself."""

    def __init__(self, engine: EngineInterface, job: PreparedRequest, name: str) -> None:
        self._head = {
            "id": f"msg_{job.fields.request_id or name}",
            "type": "message",
            "role": "assistant",
            "model": engine.model.name,
        }
        self._outputs = ChatOutputParser(job.output)
        self._blocks = BlockSplitter(self)
        self._begun = False
        self._ending: JsonObject = {}

    def opening(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer. The beginning tells what was cached, which the first delta brings."""
        return []

    def delta(self, delta: OutputDelta, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        events: list[ServerSentEvent] = []
        if not self._begun:
            self._begun = True
            ending = {"stop_reason": None, "stop_sequence": None}
            message: JsonObject = {
                **self._head,
                "content": [],
                **ending,
                "usage": messages_usage(tally),
            }
            events += [_event("message_start", message=message), _event("ping")]
        said, reason = self._outputs.push(delta.index, delta.text, delta.finish_reason)
        events += self._blocks.add(said)
        if reason is not None:
            events += self._blocks.finish(reason)
            self._ending = _ending(reason, delta.stop_reason)
        return events

    def closing(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        ended = _event("message_delta", delta=self._ending, usage=messages_usage(tally))
        return [ended, _event("message_stop")]

    def failed(self, error: ApiError) -> list[ServerSentEvent]:
        """As of Writer."""
        return [_event("error", **error.body())]

    def whole(self, choices: list[CollectedChoice], tally: UsageCounter) -> JsonObject:
        """As of Writer."""
        (choice,) = choices
        self.delta(choice.as_delta(), tally)
        content = [_written(block) for block in self._blocks.all]
        return {**self._head, "content": content, **self._ending, "usage": messages_usage(tally)}

    def opened(self, block: OutputBlock) -> list[ServerSentEvent]:
        """As of Pen."""
        return [_event("content_block_start", index=block.index, content_block=_written(block))]

    def grown(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """As of Pen."""
        kind, name = DELTA_TYPES[block.kind]
        delta = {"type": kind, name: text}
        return [_event("content_block_delta", index=block.index, delta=delta)]

    def closed(self, block: OutputBlock) -> list[ServerSentEvent]:
        """As of Pen."""
        return [_event("content_block_stop", index=block.index)]


def messages_usage(tally: UsageCounter) -> JsonObject:
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


def _event(kind: str, **data: object) -> ServerSentEvent:
    return ServerSentEvent({"type": kind, **data}, kind)


def _written(block: OutputBlock) -> JsonObject:
    """A block as far as it got."""
    match block.kind:
        case "text":
            return {"type": "text", "text": block.text}
        case "reasoning":
            return {"type": "thinking", "thinking": block.text, "signature": ""}
        case _:
            called = {"id": block.call_id, "name": block.name, "input": _object(block.text)}
            return {"type": "tool_use", **called}


def _object(text: str) -> JsonObject:
    """A JSON object; empty for one that was cut off."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _ending(reason: str, stop: int | str | None) -> JsonObject:
    """Why an answer ended."""
    sequence = stop if isinstance(stop, str) and reason == "stop" else None
    told = STOP_REASONS.get(reason, reason) if sequence is None else "stop_sequence"
    return {"stop_reason": told, "stop_sequence": sequence}
