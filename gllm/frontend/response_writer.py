"""Answers of OpenAI's Responses API: items, whole or as numbered events.

Owns the API's shapes. Knows nothing of requests but what an answer repeats of them.
"""

import time
from collections import defaultdict

from aiohttp import web

from gllm.engine_api import Delta
from gllm.frontend.answer import Job, Json
from gllm.frontend.blocks import Block, Blocks, blocks_of
from gllm.frontend.collect import Choice, Tally
from gllm.frontend.context import CONTEXT, REQUEST_ID
from gllm.frontend.errors import ApiError
from gllm.frontend.fields.responses import ResponseFields
from gllm.frontend.logprobs import chat_logprobs
from gllm.frontend.sse import Event
from gllm.text.output.events import Content, Message

PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
"""What ids of items begin with."""
TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""What the text of a block is called."""


class ResponseWriter:
    """Writes one answer."""

    def __init__(self, request: web.Request, job: Job, asked: ResponseFields) -> None:
        engine = request.app[CONTEXT].engine
        self._id = asked.request_id or request[REQUEST_ID]
        self._model = engine.model.name
        self._tokenizer = engine.tokenizer
        self._created = int(time.time())
        self._params = job.params
        self._asked = asked
        self._number = 0
        self._blocks = Blocks(self)
        self._finish: str | None = None
        self._pending: list[Json] = []
        """Log-probabilities of text that comes next."""
        self._logprobs: dict[int, list[Json]] = defaultdict(list)
        """Of the text so far, by block."""

    def opening(self, tally: Tally) -> list[Event]:
        """As of Writer."""
        begun = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
        ]

    def delta(self, delta: Delta, tally: Tally) -> list[Event]:
        """As of Writer."""
        self._pending += self._logprobs_of(delta)
        events = self._blocks.add([Content(delta.text)] if delta.text else [])
        if delta.finish_reason is not None:
            self._finish = delta.finish_reason
            if not self._blocks.all:
                events += self._blocks.add([Content("")])
            events += self._blocks.end()
        return events

    def closing(self, tally: Tally) -> list[Event]:
        """As of Writer."""
        response = self._response(self._status, self._blocks.all, tally)
        return [self._event(f"response.{self._status}", response=response)]

    def failed(self, error: ApiError) -> list[Event]:
        """As of Writer."""
        self._finish = "error"
        response = self._response("failed", self._blocks.all, None)
        return [self._event("response.failed", response={**response, **error.body()})]

    def whole(self, choices: list[Choice], tally: Tally) -> Json:
        """As of Writer."""
        (choice,) = choices
        self._finish = choice.finish_reason
        blocks = blocks_of(Message(choice.text)) or [Block("text", 0)]
        for block in blocks:
            if block.kind == "text":
                self._logprobs[block.index] = self._logprobs_of(choice)
        return self._response(self._status, blocks, tally)

    def opened(self, block: Block) -> list[Event]:
        """As of Pen."""
        item = self._item(block, "in_progress")
        events = [self._event("response.output_item.added", output_index=block.index, item=item)]
        if block.kind != "call":
            part = self._part(block)
            events.append(self._within(block, "response.content_part.added", part=part))
        return events

    def grown(self, block: Block, text: str) -> list[Event]:
        """As of Pen."""
        told: Json = {}
        if block.kind == "text":
            told["logprobs"], self._pending = self._pending, []
            self._logprobs[block.index] += told["logprobs"]
        return [self._within(block, f"response.{TEXTS[block.kind]}.delta", delta=text, **told)]

    def closed(self, block: Block) -> list[Event]:
        """As of Pen."""
        done = f"response.{TEXTS[block.kind]}.done"
        if block.kind == "call":
            events = [self._within(block, done, name=block.name, arguments=block.text)]
        else:
            part = self._part(block)
            told = {name: value for name, value in part.items() if name in ("text", "logprobs")}
            events = [
                self._within(block, done, **told),
                self._within(block, "response.content_part.done", part=part),
            ]
        item = self._item(block, self._status)
        event = self._event("response.output_item.done", output_index=block.index, item=item)
        return [*events, event]

    @property
    def _status(self) -> str:
        """Of what ends here."""
        return "completed" if self._finish in (None, "stop") else "incomplete"

    def _logprobs_of(self, part: Delta | Choice) -> list[Json]:
        if self._params.logprobs is None:
            return []
        told = chat_logprobs(self._tokenizer, part.logprobs, self._params.logprobs)
        content: list[Json] = told["content"]
        return content

    def _event(self, kind: str, **data: object) -> Event:
        """The next event."""
        event = Event({"type": kind, "sequence_number": self._number, **data}, kind)
        self._number += 1
        return event

    def _within(self, block: Block, kind: str, **data: object) -> Event:
        """An event within an item."""
        where = {"item_id": self._item_id(block), "output_index": block.index}
        if block.kind != "call":
            where["content_index"] = 0
        return self._event(kind, **where, **data)

    def _item_id(self, block: Block) -> str:
        return f"{PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _item(self, block: Block, status: str) -> Json:
        """A block as an item of the output."""
        status = "incomplete" if block.broken else status
        head = {"id": self._item_id(block), "status": status}
        if block.kind == "call":
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {**head, "type": "function_call", **call}
        content = [] if status == "in_progress" else [self._part(block)]
        if block.kind == "reasoning":
            return {**head, "type": "reasoning", "summary": [], "content": content}
        return {**head, "type": "message", "role": "assistant", "content": content}

    def _part(self, block: Block) -> Json:
        """The content of a block that is no call."""
        part: Json = {"type": TEXTS[block.kind], "text": block.text}
        if block.kind == "reasoning":
            return part
        return {**part, "annotations": [], "logprobs": list(self._logprobs[block.index])}

    def _response(self, status: str, blocks: list[Block], tally: Tally | None) -> Json:
        """The whole object. Only the last item can be incomplete."""
        asked, finish = self._asked, self._finish
        output = [self._item(block, "completed") for block in blocks[:-1]]
        output += [self._item(block, self._status) for block in blocks[-1:]]
        ended = status in ("completed", "incomplete")
        return {
            "id": f"resp_{self._id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": int(time.time()) if status == "completed" else None,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if finish == "length" else None,
            "model": self._model,
            "output": output,
            "usage": usage(tally) if ended and tally is not None else None,
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


def usage(tally: Tally) -> Json:
    """Token counts. What is written to the prefix cache is not counted apart."""
    return {
        "input_tokens": tally.prompt_tokens,
        "input_tokens_details": {"cached_tokens": tally.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": tally.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tally.prompt_tokens + tally.completion_tokens,
    }
