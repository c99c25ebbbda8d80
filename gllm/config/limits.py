"""Largest sizes that a request may have, checked before any work on it.

docs/api.md has the table. `gllm.config` has the limits that flags set, and
`gllm.grammar.sources.structured_output` those of grammars.
docs/benchmarks/frontend-gaps.md shows for how long a request of each size keeps the event loop from
other requests.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

from gllm.config.field_types import FieldError as FieldError

MAX_STOP_STRINGS = 32
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 4096
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_CHARACTERS = 256
MAX_LOGIT_BIASES = 4096
MAX_ALLOWED_TOKEN_IDS = 2**16
MAX_LOGPROBS = 20
"""Most likeliest tokens that are returned for one position of a text."""
MAX_LOGPROBS_PER_STEP = 512
MAX_PROMPT_LOGPROBS = 2**18
MAX_MESSAGES = 4096
MAX_CALLS = 128
MAX_TOOLS = 128
MAX_TOOL_BYTES = 2**19
MAX_TOOL_DEPTH = 64
MAX_PROMPTS = 1024
MAX_METADATA = 16
MAX_METADATA_KEY = 64
MAX_METADATA_VALUE = 512
MAX_TOKENIZE_BYTES = 2**20
MAX_JSON_DEPTH = 100
MAX_JSON_FIELDS = 1024
MAX_JSON_VALUES = 2**16
MAX_JSON_NUMBERS = 2**18


SAMPLING_SIZES: dict[str, tuple[int, int | None]] = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, None),
    "logit_bias": (MAX_LOGIT_BIASES, None),
    "allowed_token_ids": (MAX_ALLOWED_TOKEN_IDS, None),
}
"""Most entries of a field of SamplingParams, and most characters of each where they are strings."""


class RequestLimit(NamedTuple):
    """One limit of the API."""

    fields: str
    """Their names, in Markdown; empty for the whole body."""
    largest: int
    unit: str
    """What is counted."""


LIMITS = (
    RequestLimit("", MAX_JSON_VALUES, "strings, lists and objects in a body, keys included"),
    RequestLimit(
        "", MAX_JSON_NUMBERS, "commas between values in a body, so about as many token ids"
    ),
    RequestLimit("", MAX_JSON_FIELDS, "fields of a body"),
    RequestLimit("", MAX_JSON_DEPTH, "lists and objects within one another"),
    RequestLimit("`messages`, `input`", MAX_MESSAGES, "messages"),
    RequestLimit("`messages`", MAX_CALLS, "tool calls of one message"),
    RequestLimit("`tools`", MAX_TOOLS, "tools"),
    RequestLimit("`tools`", MAX_TOOL_BYTES, "bytes of JSON"),
    RequestLimit("`tools`", MAX_TOOL_DEPTH, "lists and objects within one another in parameters"),
    RequestLimit("`prompt`, `input` of embeddings", MAX_PROMPTS, "prompts"),
    RequestLimit("`prompt` of /tokenize", MAX_TOKENIZE_BYTES, "bytes in UTF-8"),
    RequestLimit("`tokens`", MAX_JSON_NUMBERS, "token ids"),
    RequestLimit("`stop`, `stop_sequences`", MAX_STOP_STRINGS, "strings"),
    RequestLimit("`stop`, `stop_sequences`", MAX_STOP_CHARACTERS, "characters of each string"),
    RequestLimit("`stop_token_ids`", MAX_STOP_TOKEN_IDS, "token ids"),
    RequestLimit("`bad_words`", MAX_BAD_WORDS, "strings"),
    RequestLimit("`bad_words`", MAX_BAD_WORD_CHARACTERS, "characters of each string"),
    RequestLimit("`logit_bias`", MAX_LOGIT_BIASES, "token ids"),
    RequestLimit("`allowed_token_ids`", MAX_ALLOWED_TOKEN_IDS, "token ids"),
    RequestLimit(
        "`logprobs`, `top_logprobs`, `prompt_logprobs`", MAX_LOGPROBS, "tokens per position"
    ),
    RequestLimit("`n`", MAX_LOGPROBS_PER_STEP, "choices times log-probabilities per position"),
    RequestLimit("`prompt_logprobs`", MAX_PROMPT_LOGPROBS, "prompt tokens times log-probabilities"),
    RequestLimit("`metadata` of responses", MAX_METADATA, "entries"),
    RequestLimit("`metadata` of responses", MAX_METADATA_KEY, "characters of each key"),
    RequestLimit("`metadata` of responses", MAX_METADATA_VALUE, "characters of each value"),
)
"""All of them, for docs/api.md."""


def limits_table() -> str:
    """Return the limits as a table in Markdown."""
    lines = ["| field | largest | of |", "| --- | --- | --- |"]
    lines += [f"| {one.fields or 'the body'} | {one.largest:,} | {one.unit} |" for one in LIMITS]
    return "\n".join(lines) + "\n"


def check_size(param: str, values: Collection[object], largest: int, unit: str = "entries") -> None:
    """Raise FieldError if a field holds more than the largest number of values."""
    if len(values) > largest:
        raise FieldError(
            param, f"{param} has {len(values)} {unit}, but at most {largest} are allowed"
        )


def check_lengths(param: str, strings: Iterable[str], largest: int) -> None:
    """Raise FieldError if one of a field's strings is longer than the largest length."""
    longest = max(map(len, strings), default=0)
    if longest > largest:
        raise FieldError(
            param,
            f"{param} has a string of {longest} characters, but at most {largest} are allowed",
        )


def check_sampling_sizes(params: object) -> None:
    """Raise FieldError if a field of SamplingParams is larger than its limit."""
    for name, (count, length) in SAMPLING_SIZES.items():
        values = getattr(params, name)
        if not values:
            continue
        check_size(name, values, count)
        if length is not None:
            check_lengths(name, values, length)
