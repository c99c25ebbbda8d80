"""Request bodies with one field at its maximum permitted size each, and some beyond it."""

import gzip
import json
from collections.abc import Callable
from typing import NamedTuple

from gllm.options.limits import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_CALLS,
    MAX_JSON_DEPTH,
    MAX_JSON_FIELDS,
    MAX_JSON_NUMBERS,
    MAX_JSON_VALUES,
    MAX_LOGIT_BIASES,
    MAX_LOGPROBS,
    MAX_LOGPROBS_PER_STEP,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_KEY,
    MAX_METADATA_VALUE,
    MAX_PROMPTS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOKENIZE_BYTES,
    MAX_TOOL_BYTES,
    MAX_TOOLS,
)

BODY_BYTES = 8 * 2**20
"""Default of --max-body-bytes."""
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
IDS = 256
"""Token ids below this one are in every vocabulary."""
Json = dict[str, object]


class Case(NamedTuple):
    """A request with one large field."""

    field: str
    """Name of the field and its content, for the table."""
    path: str
    body: Callable[[], bytes]
    is_compressed: bool = False


def as_json(**fields: object) -> Callable[[], bytes]:
    """Return a function that builds a JSON body of these fields."""
    return lambda: json.dumps(fields).encode()


def chat(**fields: object) -> Callable[[], bytes]:
    """Return a function that builds a short chat request with these fields."""
    return as_json(**{**HELLO, **fields})


def message(content: object, role: str = "user") -> Json:
    """Return a chat message."""
    return {"role": role, "content": content}


def filled(begin: bytes, part: bytes, end: bytes) -> Callable[[], bytes]:
    """Return a function that builds a body of the maximum size by repeating `part`."""
    return lambda: begin + part * ((BODY_BYTES - len(begin + end)) // len(part)) + end


def strings(count: int, length: int) -> list[str]:
    """Return `count` different strings of `length` characters."""
    return [f"{number:06d}".ljust(length, "a")[:length] for number in range(count)]


def tools() -> list[Json]:
    """Return the maximum number of tools at their maximum total size."""
    description_length = MAX_TOOL_BYTES // MAX_TOOLS - 300
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "description": "d" * description_length}},
    }
    names = [f"tool_{number}" for number in range(MAX_TOOLS)]
    functions = [{"name": name, "description": "d", "parameters": schema} for name in names]
    return [{"type": "function", "function": function} for function in functions]


def calls() -> list[Json]:
    """Return messages with the maximum number of tool calls and their results."""
    function = {"name": "f", "arguments": json.dumps({"a": "b" * 50})}
    tool_calls = [
        {"id": str(i), "type": "function", "function": function} for i in range(MAX_CALLS)
    ]
    results: list[Json] = [
        {"role": "tool", "tool_call_id": str(i), "content": "c"} for i in range(MAX_CALLS)
    ]
    return [message("Hi"), {**message("", "assistant"), "tool_calls": tool_calls}, *results]


IDS_LISTED = [number % IDS for number in range(MAX_JSON_NUMBERS - 16)]
PARTS = MAX_JSON_VALUES // 5 - 16
"""Maximum parts of a message, five JSON values each: an object, two keys, two strings."""
BLOCKS = [{"type": "text", "text": "a"}] * PARTS
REPEATED = ["Hi there"] * MAX_PROMPTS
LONG = f"`prompt` of /tokenize: {MAX_TOKENIZE_BYTES} bytes"
MANY = f"`prompt`: {MAX_PROMPTS} texts"
SCHEMA = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}}
MESSAGE_PATH, RESPONSE_PATH = "/v1/messages", "/v1/responses"
MESSAGE_PREFIX = b'{"messages":[{"role":"user","content":"'
ONE_USER = as_json(messages=[message("a" * 1900)] * MAX_MESSAGES, max_tokens=4)
COMPRESSED = filled(b'{"messages": "', b"a", b'"}')

CASES = (
    Case("`messages`: text as long as a body", CHAT, filled(MESSAGE_PREFIX, b"The end. ", b'"}]}')),
    Case(
        "`messages`: escaped text as long as a body",
        CHAT,
        filled(MESSAGE_PREFIX, b'\\"[{,', b'"}]}'),
    ),
    Case(
        "`messages`: 80,000 special tokens",
        CHAT,
        filled(MESSAGE_PREFIX, b"<|im_end|>" + b"The end. " * 10, b'"}]}'),
    ),
    Case(f"`messages`: {MAX_MESSAGES}", CHAT, chat(messages=[message("a")] * MAX_MESSAGES)),
    Case(f"`messages`: {PARTS} parts", CHAT, chat(messages=[message(BLOCKS)])),
    Case(f"`messages`: {MAX_CALLS} tool calls", CHAT, chat(messages=calls())),
    Case(
        f"`messages` of /v1/messages: {PARTS} blocks",
        MESSAGE_PATH,
        as_json(messages=[message(BLOCKS)], max_tokens=4),
    ),
    Case(
        f"`messages` of /v1/messages: {MAX_MESSAGES} of one user, compressed",
        MESSAGE_PATH,
        lambda: gzip.compress(
            as_json(messages=[message("a" * 1900)] * MAX_MESSAGES, max_tokens=4)()
        ),
        True,
    ),
    Case(
        f"`input` of /v1/responses: {MAX_MESSAGES} system messages",
        RESPONSE_PATH,
        as_json(input=[message("a" * 1900, "system")] * MAX_MESSAGES),
    ),
    Case(
        f"`input` of /v1/responses: {MAX_MESSAGES} items",
        RESPONSE_PATH,
        as_json(input=[message("a")] * MAX_MESSAGES),
    ),
    Case(
        "`instructions` as long as a body",
        RESPONSE_PATH,
        filled(b'{"input":"Hi","instructions":"', b"The end. ", b'"}'),
    ),
    Case(
        "`metadata`",
        RESPONSE_PATH,
        as_json(
            input="Hi",
            metadata=dict.fromkeys(
                strings(MAX_METADATA, MAX_METADATA_KEY), "v" * MAX_METADATA_VALUE
            ),
        ),
    ),
    Case(f"`tools`: {MAX_TOOLS}, {MAX_TOOL_BYTES} bytes", CHAT, chat(tools=tools())),
    Case("`prompt`: text as long as a body", TEXT, filled(b'{"prompt":"', b"The end. ", b'"}')),
    Case(f"`prompt`: {len(IDS_LISTED)} token ids", TEXT, as_json(prompt=IDS_LISTED)),
    Case(MANY, TEXT, as_json(prompt=REPEATED, max_tokens=1)),
    Case(
        f"`input` of /v1/embeddings: {MAX_PROMPTS} texts", "/v1/embeddings", as_json(input=REPEATED)
    ),
    Case(
        LONG,
        "/tokenize",
        as_json(prompt="The end. " * (MAX_TOKENIZE_BYTES // 9), return_token_strs=True),
    ),
    Case(f"`tokens`: {len(IDS_LISTED)}", "/detokenize", as_json(tokens=IDS_LISTED)),
    Case(
        f"`stop`: {MAX_STOP_STRINGS} of {MAX_STOP_CHARACTERS} characters",
        CHAT,
        chat(stop=strings(MAX_STOP_STRINGS, MAX_STOP_CHARACTERS), n=128),
    ),
    Case(
        f"`stop_token_ids`: {MAX_STOP_TOKEN_IDS}",
        CHAT,
        chat(stop_token_ids=IDS_LISTED[:MAX_STOP_TOKEN_IDS]),
    ),
    Case(
        f"`bad_words`: {MAX_BAD_WORDS} of {MAX_BAD_WORD_CHARACTERS} characters",
        CHAT,
        chat(bad_words=strings(MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)),
    ),
    Case(
        f"`logit_bias`: {MAX_LOGIT_BIASES}",
        CHAT,
        chat(logit_bias={str(i): 1 for i in range(MAX_LOGIT_BIASES)}),
    ),
    Case(
        f"`allowed_token_ids`: {MAX_ALLOWED_TOKEN_IDS}",
        CHAT,
        chat(allowed_token_ids=IDS_LISTED[:MAX_ALLOWED_TOKEN_IDS]),
    ),
    Case(
        f"`n`: {MAX_LOGPROBS_PER_STEP // 4} with `top_logprobs` 3",
        CHAT,
        chat(n=MAX_LOGPROBS_PER_STEP // 4, logprobs=True, top_logprobs=3, max_tokens=64),
    ),
    Case(
        f"`top_logprobs`: {MAX_LOGPROBS}, `n` 24",
        CHAT,
        chat(n=24, logprobs=True, top_logprobs=MAX_LOGPROBS, max_tokens=64),
    ),
    Case("`n`: 128, streamed", CHAT, chat(n=128, stream=True, max_tokens=64)),
    Case(
        "`response_format`: 2,000 properties",
        CHAT,
        chat(
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
        ),
    ),
    Case(
        "`structured_outputs`: a choice of 4,000",
        CHAT,
        chat(structured_outputs={"choice": strings(4000, 12)}),
    ),
    Case(
        "the body: compressed, as long as a body",
        CHAT,
        lambda: gzip.compress(COMPRESSED(), 1),
        True,
    ),
    Case(
        "the body: compressed, eight times as long",
        CHAT,
        lambda: gzip.compress(COMPRESSED() * 8, 1),
        True,
    ),
    Case(f"the body: {MAX_JSON_VALUES} lists", CHAT, chat(odd=[[]] * (MAX_JSON_VALUES - 16))),
    Case("the body: lists alone", CHAT, filled(b'{"odd":[', b"[],", b"1]}")),
    Case("the body: lists within one another", CHAT, filled(b'{"odd":', b"[", b"")),
    Case(
        "the body: as these, behind values",
        CHAT,
        filled(b'{"a":[' + b"[]," * (MAX_JSON_VALUES // 2) + b'1],"odd":', b"[", b""),
    ),
    Case(
        f"the body: {MAX_JSON_DEPTH} lists within one another",
        CHAT,
        chat(odd=json.loads("[" * MAX_JSON_DEPTH + "]" * MAX_JSON_DEPTH)),
    ),
    Case(
        f"the body: {MAX_JSON_FIELDS} fields",
        CHAT,
        chat(**dict.fromkeys(strings(MAX_JSON_FIELDS - 2, 60), 1)),
    ),
    Case("the body: not JSON, at its end", CHAT, filled(b'{"odd":"', b"a", b'",}')),
)
"""Requests that are measured."""
