"""Compaction of a conversation: what the model is asked, and the answer's shape.

A compacted conversation is the user's messages as they were, followed by one item that carries the
model's summary of all the rest. The server keeps nothing: the item holds the summary itself.
"""

import time

from gllm.frontend.answer import JsonObject
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.response_items import encode_summary
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.responses_writer import responses_usage
from gllm.text.chat.output_parser import ChatOutputParser

SUMMARY_PROMPT = (
    "Summarize the conversation above, so that it can go on without it: facts, decisions, results "
    "of tool calls, and what is left to do. Answer with the summary alone."
)
"""The last message of the chat that brings a summary."""


class CompactionWriter:
    """Writes the answer to a chat whose last message is SUMMARY_PROMPT. `name` is in ids."""

    def __init__(self, job: PreparedRequest, name: str) -> None:
        assert isinstance(job.fields, ChatCompletionFields), (
            "the conversation was converted to a chat"
        )
        self._outputs = ChatOutputParser(job.output_format)
        conversation = job.fields.messages[:-1]
        self._users = [one["content"] for one in conversation if one["role"] == "user"]
        self._name = name

    def build_answer(self, choices: list[CollectedChoice], usage: UsageCounter) -> JsonObject:
        """Return the compacted conversation as input items."""
        message, _ = self._outputs.parse(choices[0].text, choices[0].finish_reason)
        item = {
            "id": f"cmp_{self._name}",
            "type": "compaction",
            "encrypted_content": encode_summary(message.content),
        }
        return {
            "id": f"resp_{self._name}",
            "object": "response.compaction",
            "created_at": int(time.time()),
            "output": [*(self._user(i, text) for i, text in enumerate(self._users)), item],
            "usage": responses_usage(usage),
        }

    def _user(self, index: int, text: str) -> JsonObject:
        """Return a message of the user as an item."""
        return {
            "id": f"msg_{self._name}_{index}",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }
