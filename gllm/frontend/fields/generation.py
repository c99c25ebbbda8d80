"""What all endpoints that generate have in common: how to sample, when to end, what to stream.

Owns these fields and the way from them to SamplingParams. Knows nothing of prompts and messages.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from gllm.config.field_types import FieldError
from gllm.config.limits import MAX_LOGPROBS, MAX_LOGPROBS_PER_STEP
from gllm.config.options import INT32_MAX
from gllm.config.sampling import SamplingParams
from gllm.frontend.fields.base import (
    Int32,
    Int64,
    ModelRequestFields,
    PositiveInt,
    UnsupportedField,
    doc,
)
from gllm.frontend.fields.structured import (
    ResponseFormat,
    StructuredOutputs,
    parse_structured_output,
)

CacheSalt = Annotated[str, Meta(max_length=128)]
RequestId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
ParseSpecial = Annotated[
    bool | None,
    doc(
        "whether special tokens such as `<|im_end|>` in messages and tools are control tokens; "
        "default false: they are text; in a prompt of completions they always are"
    ),
]
NO_BEAMS = "asks for beam search, which is not done here: n draws several choices"
NOT_DONE = "is not supported by this server with this value"
CHAT_ALONE = "is a field of chat completions"
NO_SEARCH = "asks for a search, which is not done here: only the client runs tools"
OLDER = "is an older name: use structured_outputs"


UNSUPPORTED: Mapping[str, UnsupportedField] = {
    "modalities": UnsupportedField("asks for an output that is not text", (["text"], [])),
    "audio": UnsupportedField("asks for speech, but the output is text only"),
    "prediction": UnsupportedField("gives a predicted output, which is not used here"),
    "web_search_options": UnsupportedField(NO_SEARCH),
    "documents": UnsupportedField(
        "is not given to chat templates here: put texts into messages", ([],)
    ),
    "grammar_lazy": UnsupportedField(
        "is not done here: a grammar holds from the first token", (False,)
    ),
    "grammar_triggers": UnsupportedField(
        "is not done here: a grammar holds from the first token", ([],)
    ),
}
"""Fields of OpenAI, vLLM and llama.cpp that no endpoint honours."""


class StreamOptions(msgspec.Struct):
    """What a stream carries besides its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ModelRequestFields):
    """Fields of every endpoint that generates."""

    temperature: Annotated[
        float | None,
        doc(
            "0..2; 0 takes the likeliest token; default: the model's, else 1", minimum=0, maximum=2
        ),
    ] = None
    top_p: Annotated[
        float | None,
        doc("(0, 1]: the likeliest tokens of this share", exclusiveMinimum=0, maximum=1),
    ] = None
    top_k: Annotated[
        Int64 | None, doc("so many likeliest tokens; -1 or 0: all", minimum=-1, maximum=INT32_MAX)
    ] = None
    min_p: Annotated[
        float | None,
        doc("[0, 1]: no token below this share of the likeliest one's", minimum=0, maximum=1),
    ] = None
    seed: Annotated[
        Int64 | None,
        doc(
            "same seed, same output; by compiled kernels on a CPU whatever else is in the batch, "
            "elsewhere as far as other rows leave the last bits of logits alone"
        ),
    ] = None
    stop_token_ids: Annotated[list[Int32] | None, doc("token ids that end the output")] = None
    min_tokens: Annotated[
        Int64 | None,
        doc("0..max_tokens: nothing ends the output before", minimum=0, maximum=INT32_MAX),
    ] = None
    ignore_eos: Annotated[bool | None, doc("go on behind the model's own end")] = None
    stream: Annotated[bool | None, doc("answer with server-sent events")] = None
    repetition_penalty: Annotated[
        float | None, doc("> 0, over prompt and output; 1: none", exclusiveMinimum=0)
    ] = None
    presence_penalty: Annotated[
        float | None, doc("[-2, 2], over the output", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None, doc("[-2, 2], over the output", minimum=-2, maximum=2)
    ] = None
    logit_bias: Annotated[
        dict[Int32, float] | None,
        doc(
            "by token id, [-100, 100], added to logits",
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
    ] = None
    allowed_token_ids: Annotated[list[Int32] | None, doc("the only tokens drawn", minItems=1)] = (
        None
    )
    bad_words: Annotated[list[str] | None, doc("up to 1024 strings that never come out")] = None
    truncate_prompt_tokens: Annotated[
        Int64 | None,
        doc(
            "keep the prompt's last so many tokens; -1: as many as fit",
            minimum=-1,
            maximum=INT32_MAX,
            **{"not": {"const": 0}},
        ),
    ] = None
    parse_special: ParseSpecial = None
    skip_special_tokens: Annotated[
        bool | None, doc("leave special tokens out of the text; default true")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, doc("do not cut off what ended the text")
    ] = None
    priority: Annotated[Int32 | None, doc("smaller runs earlier; default 0")] = None
    cache_salt: Annotated[
        CacheSalt | None, doc("requests share prefixes in the cache only with the same salt")
    ] = None
    request_id: Annotated[
        RequestId | None, doc("names the answer, and the request to /abort; default: X-Request-Id")
    ] = None


class BaseCompletionFields(SamplingFields):
    """Fields of chat completions and completions."""

    ignored_fields: ClassVar[Mapping[str, str]] = {
        "user": "who asks",
        "store": "whether to keep the answer; nothing is kept",
        "metadata": "the client's own",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **UNSUPPORTED,
        "suffix": UnsupportedField(NOT_DONE, ("",)),
        "guided_json": UnsupportedField(OLDER),
        "guided_regex": UnsupportedField(OLDER),
        "guided_choice": UnsupportedField(OLDER),
        "guided_grammar": UnsupportedField(OLDER),
        "tools": UnsupportedField(CHAT_ALONE, ([],)),
        "tool_choice": UnsupportedField(CHAT_ALONE, ("none", "auto")),
        "parallel_tool_calls": UnsupportedField(CHAT_ALONE, (True, False)),
        "functions": UnsupportedField(NOT_DONE, ([],)),
        "function_call": UnsupportedField(NOT_DONE, ("none", "auto")),
        "reasoning_effort": UnsupportedField(CHAT_ALONE),
        "chat_template": UnsupportedField("is not taken from requests: the model's own is used"),
        "continue_final_message": UnsupportedField(CHAT_ALONE, (False,)),
        "top_logprobs": UnsupportedField(
            "is a field of chat completions: logprobs tells how many", (0,)
        ),
        "echo": UnsupportedField("is a field of completions", (False,)),
        "use_beam_search": UnsupportedField(NO_BEAMS, (False,)),
        "best_of": UnsupportedField(NO_BEAMS, (1,)),
        "length_penalty": UnsupportedField(NO_BEAMS, (1,)),
        "early_stopping": UnsupportedField(NO_BEAMS, (False,)),
    }

    stop: Annotated[
        str | list[str] | None, doc("up to 32 strings that end the text, and are cut off it")
    ] = None
    max_tokens: Annotated[
        PositiveInt | None, doc("most tokens of a choice; default: the rest of the context")
    ] = None
    max_completion_tokens: Annotated[PositiveInt | None, doc("the newer name of max_tokens")] = None
    n: Annotated[
        Int64 | None, doc("choices, at most --max-choices", minimum=1, maximum=INT32_MAX)
    ] = None
    stream_options: Annotated[
        StreamOptions | None,
        doc("include_usage: usage at the end; continuous_usage_stats: usage in every event"),
    ] = None
    return_token_ids: Annotated[bool | None, doc("token_ids in every choice")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("in log-probabilities of the output, tokens are written as token_id:ID")
    ] = None
    prompt_logprobs: Annotated[
        Int64 | None,
        doc(
            "0..20 likeliest tokens for each token of the prompt; not with stream",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        doc("type: text, json_object or json_schema, the last with json_schema.schema"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        doc("exactly one of json, regex, choice and grammar (docs/structured-output.md)"),
    ] = None
    grammar: Annotated[
        str | None, doc("llama.cpp's field: the same as structured_outputs.grammar")
    ] = None
    json_schema: Annotated[
        dict[str, Any] | None, doc("llama.cpp's field: the same as structured_outputs.json")
    ] = None

    def validate(self) -> None:
        """Raises FieldError for fields that do not go together."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is only allowed with stream")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "prompt_logprobs is not allowed with stream")


PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields that SamplingParams has by the same name and type."""


def to_sampling_params(
    fields: BaseCompletionFields, defaults: Mapping[str, float], max_choices: int, **given: Any
) -> SamplingParams:
    """How to sample; `defaults` stand for what is unset, `given` for fields that each endpoint
    reads in its own way. Raises FieldError."""
    n = 1 if fields.n is None else fields.n
    if n > max_choices:
        raise FieldError("n", f"n is {n}, but this server allows at most {max_choices}")
    plain = {name: getattr(fields, name) for name in PLAIN}
    params = SamplingParams(
        **{**defaults, **{name: value for name, value in plain.items() if value is not None}},
        n=n,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=_tuple(fields.allowed_token_ids),
        bad_words=tuple(fields.bad_words or ()),
        structured=parse_structured_output(
            fields.response_format, fields.structured_outputs, fields.grammar, fields.json_schema
        ),
        **given,
    )
    _check_logprobs(n, params.logprobs)
    return params


def _check_logprobs(n: int, top: int | None) -> None:
    """Raise FieldError if each step would return very many log-probabilities."""
    count = 0 if top is None else n * (top + 1)
    if count > MAX_LOGPROBS_PER_STEP:
        raise FieldError(
            "n",
            f"n {n} with {top} likeliest tokens and the sampled one at each position are {count} "
            f"log-probabilities per step, but at most {MAX_LOGPROBS_PER_STEP} are allowed",
        )


def _tuple(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return tuple(stop or ())
