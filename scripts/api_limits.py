"""Table of the maximum sizes of request fields in docs/api.md."""

from typing import NamedTuple

from gllm.options import limits


class RequestLimit(NamedTuple):
    """One limit of the API."""

    fields: str
    """Names of the limited fields, in Markdown; empty for the whole body."""
    maximum: int
    unit: str
    """Unit of the limit."""


LIMITS = (
    RequestLimit("", limits.MAX_JSON_VALUES, "strings, lists and objects in a body, keys included"),
    RequestLimit(
        "", limits.MAX_JSON_NUMBERS, "commas between values in a body, so about as many token ids"
    ),
    RequestLimit("", limits.MAX_JSON_FIELDS, "fields of a body"),
    RequestLimit("", limits.MAX_JSON_DEPTH, "lists and objects within one another"),
    RequestLimit(
        "`messages`, `input`",
        limits.MAX_MESSAGES,
        "messages or items, before consecutive ones are merged",
    ),
    RequestLimit("`messages`", limits.MAX_CALLS, "tool calls of one message"),
    RequestLimit("`tools`", limits.MAX_TOOLS, "tools"),
    RequestLimit("`tools`", limits.MAX_TOOL_BYTES, "bytes of JSON"),
    RequestLimit(
        "`tools`", limits.MAX_TOOL_DEPTH, "lists and objects within one another in parameters"
    ),
    RequestLimit("`prompt`, `input` of embeddings", limits.MAX_PROMPTS, "prompts"),
    RequestLimit("`prompt` of /tokenize", limits.MAX_TOKENIZE_BYTES, "bytes in UTF-8"),
    RequestLimit("`tokens`", limits.MAX_JSON_NUMBERS, "token ids"),
    RequestLimit("`stop`, `stop_sequences`", limits.MAX_STOP_STRINGS, "strings"),
    RequestLimit(
        "`stop`, `stop_sequences`", limits.MAX_STOP_CHARACTERS, "characters of each string"
    ),
    RequestLimit("`stop_token_ids`", limits.MAX_STOP_TOKEN_IDS, "token ids"),
    RequestLimit("`bad_words`", limits.MAX_BAD_WORDS, "strings"),
    RequestLimit("`bad_words`", limits.MAX_BAD_WORD_CHARACTERS, "characters of each string"),
    RequestLimit("`logit_bias`", limits.MAX_LOGIT_BIASES, "token ids"),
    RequestLimit("`allowed_token_ids`", limits.MAX_ALLOWED_TOKEN_IDS, "token ids"),
    RequestLimit(
        "`logprobs`, `top_logprobs`, `prompt_logprobs`", limits.MAX_LOGPROBS, "tokens per position"
    ),
    RequestLimit(
        "`n`", limits.MAX_LOGPROBS_PER_STEP, "choices times log-probabilities per position"
    ),
    RequestLimit(
        "`prompt_logprobs`", limits.MAX_PROMPT_LOGPROBS, "prompt tokens times log-probabilities"
    ),
    RequestLimit("`metadata` of responses", limits.MAX_METADATA, "entries"),
    RequestLimit("`metadata` of responses", limits.MAX_METADATA_KEY, "characters of each key"),
    RequestLimit("`metadata` of responses", limits.MAX_METADATA_VALUE, "characters of each value"),
    RequestLimit("`prompt_cache_key`", limits.MAX_SESSION_CHARACTERS, "characters"),
)
"""All limits, in the order of the table in docs/api.md."""


def limits_table() -> str:
    """Return the limits as a table in Markdown."""
    lines = ["| field | largest | of |", "| --- | --- | --- |"]
    lines += [
        f"| {limit.fields or 'the body'} | {limit.maximum:,} | {limit.unit} |" for limit in LIMITS
    ]
    return "\n".join(lines) + "\n"
