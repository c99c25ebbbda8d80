"""POST /v1/chat/completions.

Owns the endpoint's shape. Knows nothing of how answers are streamed.
"""

from aiohttp import web

from gllm.engine.interface import OutputDelta
from gllm.frontend.answer import JsonObject, send_answer
from gllm.frontend.chat_request import prepare_chat_request
from gllm.frontend.choice_writer import ChoiceWriter
from gllm.frontend.choices import CollectedChoice
from gllm.frontend.context import CONTEXT
from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.parsing import read_fields
from gllm.frontend.logprobs import chat_logprobs, prompt_logprobs
from gllm.frontend.message_json import MessageDeltaWriter, message_to_json
from gllm.frontend.request_run import PreparedRequest
from gllm.text.chat.output_parser import ChatOutputParser
from gllm.text.tokenizer import Tokenizer


async def create_chat_completion(request: web.Request) -> web.StreamResponse:
    """An assistant's answer to the messages."""
    context = request.app[CONTEXT]
    fields = await read_fields(request, ChatCompletionFields)
    context.check_model(fields.model)
    with context.admit():
        job = await prepare_chat_request(context, fields)
        shape = ChatChoiceFormat(context.engine.tokenizer, job)
        return await send_answer(request, context, job, ChoiceWriter(request, job, shape))


class ChatChoiceFormat:
    """Choices as messages and their increments."""

    prefix = "chatcmpl-"
    answer_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, tokenizer: Tokenizer, job: PreparedRequest) -> None:
        self._tokenizer = tokenizer
        self._outputs = ChatOutputParser(job.output_format)
        self._legacy = isinstance(job.fields, ChatCompletionFields) and bool(job.fields.functions)
        self._writers: dict[int, MessageDeltaWriter] = {}
        self._top = job.params.logprobs
        self._as_ids = bool(job.fields.return_tokens_as_token_ids)
        self._prompt_top = job.params.prompt_logprobs
        """How many likeliest tokens are told with each token of the output and of the prompt, None
        for no log-probabilities."""

    @property
    def is_plain_text(self) -> bool:
        """As of Shape."""
        return self._outputs.is_plain_text and self._top is None

    def start_choices(self, index: int) -> list[JsonObject]:
        """The role comes first, with an empty text."""
        return [_piece(index, {"role": "assistant", "content": ""}, None)]

    def delta_choices(self, delta: OutputDelta, token_ids: bool) -> list[JsonObject]:
        """What is said, then the end, each by itself; what is of tokens goes with the first."""
        ids = {"token_ids": delta.token_ids} if token_ids else {}
        logprobs = self._logprobs(delta)
        events, reason = self._outputs.push(delta.index, delta.text, delta.finish_reason)
        writer = self._writers.get(delta.index)
        if writer is None:
            writer = self._writers[delta.index] = MessageDeltaWriter(self._legacy)
        told = [made for made in map(writer.event_to_json, events) if made is not None]
        if not told and reason is None and (ids.get("token_ids") or logprobs):
            told = [{"content": ""}]
        pieces = []
        for made in told:
            pieces.append({**_piece(delta.index, made, logprobs), **ids})
            ids, logprobs = {"token_ids": []} if token_ids else {}, None
        if reason is not None:
            end = {"finish_reason": self._reason(reason), "stop_reason": delta.stop_reason}
            pieces.append({**_piece(delta.index, {}, logprobs), **end, **ids})
        return pieces

    def whole_choice(self, choice: CollectedChoice) -> JsonObject:
        """A message."""
        message, reason = self._outputs.parse(choice.text, choice.finish_reason)
        return {
            "index": choice.index,
            "message": message_to_json(message, self._legacy),
            "logprobs": self._logprobs(choice),
            "finish_reason": self._reason(reason),
            "stop_reason": choice.stop_reason,
        }

    def extra_fields(self, choices: list[CollectedChoice]) -> JsonObject:
        """The prompt's log-probabilities."""
        if self._prompt_top is None:
            return {}
        entries = choices[0].prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(self._tokenizer, entries, self._prompt_top)}

    def _reason(self, reason: str | None) -> str | None:
        return "function_call" if self._legacy and reason == "tool_calls" else reason

    def _logprobs(self, part: OutputDelta | CollectedChoice) -> JsonObject | None:
        if self._top is None or not part.logprobs:
            return None
        return chat_logprobs(self._tokenizer, part.logprobs, self._top, self._as_ids)


def _piece(index: int, delta: JsonObject, logprobs: JsonObject | None) -> JsonObject:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
