"""Answers of OpenAI's Responses API: items, whole or as numbered events.

Owns the API's shapes. Knows nothing of requests but what an answer repeats of them.
"""

import time
from collections import defaultdict

from gllm.engine.interface import EngineInterface, OutputDelta
from gllm.frontend.answer import JsonObject
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.responses import ResponsesFields
from gllm.frontend.logprobs import chat_logprobs
from gllm.frontend.output_blocks import BlockSplitter, OutputBlock
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.sse import ServerSentEvent
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.output.events import ContentDelta

ID_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc", "custom": "ctc"}
"""What ids of items begin with."""
TEXT_TYPES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "call": "function_call_arguments",
    "custom": "custom_tool_call_input",
}
"""What the text of a block is called."""
INCOMPLETE_REASONS = {"length": "max_output_tokens", "abort": "abort"}
"""Why answers are incomplete, by finish reason."""


class ResponsesWriter:
    """Writes one answer. `name` is in ids where the request does not name itself."""

    def __init__(
        self, engine: EngineInterface, job: PreparedRequest, asked: ResponsesFields, name: str
    ) -> None:
        self._id = asked.request_id or name
        self._model = engine.model.name
        self._tokenizer = engine.tokenizer
        self._created = int(time.time())
        self._params = job.params
        self._asked = asked
        self._number = 0
        self._outputs = ChatOutputParser(job.output)
        self._blocks = BlockSplitter(self)
        self._cut: str | None = None
        """Why the answer is incomplete, where it is."""
        self._pending: list[JsonObject] = []
        """Log-probabilities of tokens since the last text, whose place is the next one."""
        self._logprobs: dict[int, list[JsonObject]] = defaultdict(list)
        """Of the text so far, by block."""

    def opening(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        begun = self._response("in_progress", None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def delta(self, delta: OutputDelta, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        self._pending += self._logprobs_of(delta)
        said, reason = self._outputs.push(delta.index, delta.text, delta.finish_reason)
        events = self._blocks.add(said)
        if reason is not None:
            self._cut = INCOMPLETE_REASONS.get(reason)
            if not self._blocks.all:
                events += self._blocks.add([ContentDelta("")])
            events += self._blocks.finish(reason)
        return events

    def closing(self, tally: UsageCounter) -> list[ServerSentEvent]:
        """As of Writer."""
        response = self._response(self._end_status, tally)
        return [self._event(f"response.{self._end_status}", response=response)]

    def failed(self, error: ApiError) -> list[ServerSentEvent]:
        """As of Writer."""
        events = self._blocks.end("incomplete")
        response = {**self._response("failed", None), **error.body()}
        return [*events, self._event("response.failed", response=response)]

    def whole(self, choices: list[CollectedChoice], tally: UsageCounter) -> JsonObject:
        """As of Writer."""
        (choice,) = choices
        self.delta(choice.as_delta(), tally)
        return self._response(self._end_status, tally)

    def opened(self, block: OutputBlock) -> list[ServerSentEvent]:
        """As of Pen."""
        where = {"output_index": block.index, "item": self._item(block)}
        events = [self._event("response.output_item.added", **where)]
        if not block.is_call:
            part = self._part(block)
            events.append(self._within(block, "response.content_part.added", part=part))
        return events

    def grown(self, block: OutputBlock, text: str) -> list[ServerSentEvent]:
        """As of Pen."""
        told: JsonObject = {}
        if block.kind == "text":
            told["logprobs"], self._pending = self._pending, []
            self._logprobs[block.index] += told["logprobs"]
        return [self._within(block, f"response.{TEXT_TYPES[block.kind]}.delta", delta=text, **told)]

    def closed(self, block: OutputBlock) -> list[ServerSentEvent]:
        """As of Pen."""
        done = f"response.{TEXT_TYPES[block.kind]}.done"
        events = []
        if block.kind == "text" and self._pending:
            events += self.grown(block, "")  # tokens that no text has come of
        if block.kind == "call":
            events += [self._within(block, done, name=block.name, arguments=block.text)]
        elif block.kind == "custom":
            events += [self._within(block, done, input=block.text)]
        else:
            part = self._part(block)
            told = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            events += [
                self._within(block, done, **told),
                self._within(block, "response.content_part.done", part=part),
            ]
        where = {"output_index": block.index, "item": self._item(block)}
        return [*events, self._event("response.output_item.done", **where)]

    @property
    def _end_status(self) -> str:
        """Of an answer that went well."""
        return "incomplete" if self._cut else "completed"

    def _logprobs_of(self, delta: OutputDelta) -> list[JsonObject]:
        if self._params.logprobs is None:
            return []
        told = chat_logprobs(self._tokenizer, delta.logprobs, self._params.logprobs)
        content: list[JsonObject] = told["content"]
        return content

    def _event(self, kind: str, **data: object) -> ServerSentEvent:
        """The next event."""
        event = ServerSentEvent({"type": kind, "sequence_number": self._number, **data}, kind)
        self._number += 1
        return event

    def _within(self, block: OutputBlock, kind: str, **data: object) -> ServerSentEvent:
        """An event within an item."""
        where = {"item_id": self._item_id(block), "output_index": block.index}
        if not block.is_call:
            where["content_index"] = 0
        return self._event(kind, **where, **data)

    def _item_id(self, block: OutputBlock) -> str:
        return f"{ID_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _item(self, block: OutputBlock) -> JsonObject:
        """A block as an item of the output; its content only when that has ended."""
        head = {"id": self._item_id(block), "status": block.status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        if block.kind == "custom":
            call = {"call_id": block.call_id, "name": block.name, "input": block.text}
            return {**head, "type": "custom_tool_call", **call}
        content = [] if block.status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: OutputBlock) -> JsonObject:
        """The content of a block that is no call."""
        part: JsonObject = {"type": TEXT_TYPES[block.kind], "text": block.text}
        if block.kind == "reasoning":
            return part
        return {**part, "annotations": [], "logprobs": list(self._logprobs[block.index])}

    def _response(self, status: str, tally: UsageCounter | None) -> JsonObject:
        """The whole object; with token counts if there is a tally."""
        asked = self._asked
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": self._cut and {"reason": self._cut},
            "model": self._model,
            "output": [self._item(block) for block in self._blocks.all],
            "usage": None if tally is None else responses_usage(tally),
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "temperature": self._params.temperature,
            "top_p": self._params.top_p,
            "top_logprobs": asked.top_logprobs or 0,
            "text": {"format": (asked.text and asked.text.format) or {"type": "text"}},
            "reasoning": {"effort": asked.reasoning and asked.reasoning.effort, "summary": None},
            "tools": asked.tools or [],
            "tool_choice": asked.tool_choice or "auto",
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "truncation": asked.truncation or "disabled",
            "metadata": asked.metadata or {},
            "previous_response_id": None,
            "background": False,
            "store": False,
            "service_tier": "default",
        }


def responses_usage(tally: UsageCounter) -> JsonObject:
    """Token counts. What is written to the prefix cache is not counted apart."""
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tally.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": tally.reasoning_tokens or 0},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }
