"""Compaction of a conversation: the prompt for the summary, and the answer.

A compacted conversation has the user's messages unchanged, followed by one item with the model's
summary of everything else. The server stores nothing: the item contains the summary.
"""

import time

from gllm.frontend.answer import JsonObject
from gllm.frontend.choices import CollectedChoice, UsageCounter
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.response_items import encode_summary
from gllm.frontend.request_run import PreparedRequest
from gllm.frontend.response_schemas import CompactionResponse
from gllm.frontend.responses_writer import responses_usage
from gllm.text.chat.output_parser import ChatOutputParser

SUMMARY_PROMPT = (
    "Summarize the conversation above, so that it can go on without it: facts, decisions, results "
    "of tool calls, and what is left to do. Answer with the summary alone."
)
"""Last message of the chat, which requests the summary."""


class CompactionWriter:
    """WholeAnswerWriter of a chat whose last message is SUMMARY_PROMPT.

    Args:
        request: The chat.
        default_id: Id of the answer.
    """

    def __init__(self, request: PreparedRequest, default_id: str) -> None:
        assert isinstance(request.fields, ChatCompletionFields), (
            "the conversation was converted to a chat"
        )
        self._parser = ChatOutputParser(request.output_format)
        conversation = request.fields.messages[:-1]
        self._users = [message["content"] for message in conversation if message["role"] == "user"]
        self._id = default_id

    def build_answer(
        self, choices: list[CollectedChoice], usage: UsageCounter
    ) -> CompactionResponse:
        """Return the compacted conversation as input items."""
        message, _ = self._parser.parse(choices[0].text, choices[0].finish_reason)
        item = {
            "id": f"cmp_{self._id}",
            "type": "compaction",
            "encrypted_content": encode_summary(message.content),
        }
        return CompactionResponse(
            id=f"resp_{self._id}",
            object="response.compaction",
            created_at=int(time.time()),
            output=[*(self._user(i, text) for i, text in enumerate(self._users)), item],
            usage=responses_usage(usage),
        )

    def _user(self, index: int, text: str) -> JsonObject:
        """Return a user message as an item."""
        return {
            "id": f"msg_{self._id}_{index}",
            "type": "message",
            "role": "user",
            "status": "completed",
            "content": [{"type": "input_text", "text": text}],
        }
