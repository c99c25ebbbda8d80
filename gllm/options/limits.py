"""Maximum sizes of request fields, checked before any work on a request.

docs/api.md has the table. `gllm.config.server` has the limits that flags set,
`gllm.text.grammar.sources.structured_output` those of grammars. docs/benchmarks/frontend-gaps.md
has the time for which a request of each size blocks the event loop.
"""

from collections.abc import Collection, Iterable

from gllm.options.field_types import FieldError as FieldError

MAX_STOP_STRINGS = 32
"""Entries of `stop`."""
MAX_STOP_CHARACTERS = 1024
"""Characters of a stop string."""
MAX_STOP_TOKEN_IDS = 4096
"""Entries of `stop_token_ids`."""
MAX_BAD_WORDS = 1024
"""Entries of `bad_words`."""
MAX_BAD_WORD_CHARACTERS = 256
"""Characters of a bad word."""
MAX_LOGIT_BIASES = 4096
"""Entries of `logit_bias`."""
MAX_ALLOWED_TOKEN_IDS = 2**16
"""Entries of `allowed_token_ids`."""
MAX_LOGPROBS = 20
"""Most likely tokens returned per position."""
MAX_LOGPROBS_PER_STEP = 512
"""Choices times log-probabilities per position."""
MAX_PROMPT_LOGPROBS = 2**18
"""Prompt tokens times log-probabilities per position."""
MAX_MESSAGES = 4096
"""Messages of a chat."""
MAX_CALLS = 128
"""Tool calls of a message."""
MAX_TOOLS = 128
"""Entries of `tools`."""
MAX_TOOL_BYTES = 2**19
"""Bytes of `tools` as JSON."""
MAX_TOOL_DEPTH = 64
"""Nesting depth of a tool's parameters."""
MAX_PROMPTS = 1024
"""Prompts of a request."""
MAX_METADATA = 16
"""Entries of `metadata`."""
MAX_METADATA_KEY = 64
"""Characters of a metadata key."""
MAX_METADATA_VALUE = 512
"""Characters of a metadata value."""
MAX_SESSION_CHARACTERS = 1024
"""Characters of the name of a session."""
MAX_TOKENIZE_BYTES = 2**20
"""Bytes of a text to tokenize, in UTF-8."""
MAX_JSON_DEPTH = 100
"""Nesting depth of a body."""
MAX_JSON_FIELDS = 1024
"""Fields of a body."""
MAX_JSON_VALUES = 2**16
"""Strings, lists and objects of a body, including keys."""
MAX_JSON_NUMBERS = 2**18
"""Commas between values of a body, about its number of token ids."""


SAMPLING_SIZES: dict[str, tuple[int, int | None]] = {
    "stop": (MAX_STOP_STRINGS, MAX_STOP_CHARACTERS),
    "bad_words": (MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS),
    "stop_token_ids": (MAX_STOP_TOKEN_IDS, None),
    "logit_bias": (MAX_LOGIT_BIASES, None),
    "allowed_token_ids": (MAX_ALLOWED_TOKEN_IDS, None),
}
"""Maximum number of entries of a field of SamplingParams, and of characters of an entry."""


def check_size(param: str, values: Collection[object], largest: int, unit: str = "entries") -> None:
    """Raise FieldError if a field has more items than allowed.

    Args:
        param: Name of the field.
        values: Its items.
        largest: Largest allowed number.
        unit: Noun for the items in the error message.
    """
    if len(values) > largest:
        raise FieldError(
            param, f"{param} has {len(values)} {unit}, but at most {largest} are allowed"
        )


def check_lengths(param: str, strings: Iterable[str], largest: int) -> None:
    """Raise FieldError if any of a field's strings has more characters than allowed.

    Args:
        param: Name of the field.
        strings: Its strings.
        largest: Largest allowed number of characters.
    """
    longest = max(map(len, strings), default=0)
    if longest > largest:
        raise FieldError(
            param,
            f"{param} has a string of {longest} characters, but at most {largest} are allowed",
        )


def check_sampling_sizes(params: object) -> None:
    """Raise FieldError if a list, mapping or string in SamplingParams exceeds its maximum size.

    Maxima are those of SAMPLING_SIZES.
    """
    for name, (count, length) in SAMPLING_SIZES.items():
        values = getattr(params, name)
        if not values:
            continue
        check_size(name, values, count)
        if length is not None:
            check_lengths(name, values, length)
