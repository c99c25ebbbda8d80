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
from gllm.frontend.fields.body import Count, Int, Int32, ModelBody, Refused, about
from gllm.frontend.fields.structured import ResponseFormat, StructuredOutputs, structured_output

Salt = Annotated[str, Meta(max_length=128)]
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
ParseSpecial = Annotated[
    bool | None,
    about(
        "whether special tokens such as `<|im_end|>` in messages and tools are control tokens; "
        "default false: they are text; in a prompt of completions they always are"
    ),
]
NO_BEAMS = "asks for beam search, which is not done here: n draws several choices"
NOT_DONE = "is not supported by this server with this value"
CHAT_ALONE = "is a field of chat completions"
NO_SEARCH = "asks for a search, which is not done here: only the client runs tools"
OLDER = "is an older name: use structured_outputs"


UNSUPPORTED: Mapping[str, Refused] = {
    "modalities": Refused("asks for an output that is not text", (["text"], [])),
    "audio": Refused("asks for speech, but the output is text only"),
    "prediction": Refused("gives a predicted output, which is not used here"),
    "web_search_options": Refused(NO_SEARCH),
    "documents": Refused("is not given to chat templates here: put texts into messages", ([],)),
    "grammar_lazy": Refused("is not done here: a grammar holds from the first token", (False,)),
    "grammar_triggers": Refused("is not done here: a grammar holds from the first token", ([],)),
}
"""Fields of OpenAI, vLLM and llama.cpp that no endpoint honours."""


class StreamOptions(msgspec.Struct):
    """What a stream carries besides its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Sampling(ModelBody):
    """Fields of every endpoint that generates."""

    temperature: Annotated[
        float | None,
        about(
            "0..2; 0 takes the likeliest token; default: the model's, else 1", minimum=0, maximum=2
        ),
    ] = None
    top_p: Annotated[
        float | None,
        about("(0, 1]: the likeliest tokens of this share", exclusiveMinimum=0, maximum=1),
    ] = None
    top_k: Annotated[
        Int | None, about("so many likeliest tokens; -1 or 0: all", minimum=-1, maximum=INT32_MAX)
    ] = None
    min_p: Annotated[
        float | None,
        about("[0, 1]: no token below this share of the likeliest one's", minimum=0, maximum=1),
    ] = None
    seed: Annotated[
        Int | None,
        about(
            "same seed, same output; by compiled kernels on a CPU whatever else is in the batch, "
            "elsewhere as far as other rows leave the last bits of logits alone"
        ),
    ] = None
    stop_token_ids: Annotated[list[Int32] | None, about("token ids that end the output")] = None
    min_tokens: Annotated[
        Int | None,
        about("0..max_tokens: nothing ends the output before", minimum=0, maximum=INT32_MAX),
    ] = None
    ignore_eos: Annotated[bool | None, about("go on behind the model's own end")] = None
    stream: Annotated[bool | None, about("answer with server-sent events")] = None
    repetition_penalty: Annotated[
        float | None, about("> 0, over prompt and output; 1: none", exclusiveMinimum=0)
    ] = None
    presence_penalty: Annotated[
        float | None, about("[-2, 2], over the output", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None, about("[-2, 2], over the output", minimum=-2, maximum=2)
    ] = None
    logit_bias: Annotated[
        dict[Int32, float] | None,
        about(
            "by token id, [-100, 100], added to logits",
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
    ] = None
    allowed_token_ids: Annotated[list[Int32] | None, about("the only tokens drawn", minItems=1)] = (
        None
    )
    bad_words: Annotated[list[str] | None, about("up to 1024 strings that never come out")] = None
    truncate_prompt_tokens: Annotated[
        Int | None,
        about(
            "keep the prompt's last so many tokens; -1: as many as fit",
            minimum=-1,
            maximum=INT32_MAX,
            **{"not": {"const": 0}},
        ),
    ] = None
    parse_special: ParseSpecial = None
    skip_special_tokens: Annotated[
        bool | None, about("leave special tokens out of the text; default true")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, about("do not cut off what ended the text")
    ] = None
    priority: Annotated[Int32 | None, about("smaller runs earlier; default 0")] = None
    cache_salt: Annotated[
        Salt | None, about("requests share prefixes in the cache only with the same salt")
    ] = None
    request_id: Annotated[
        Id | None, about("names the answer, and the request to /abort; default: X-Request-Id")
    ] = None


class Generation(Sampling):
    """Fields of chat completions and completions."""

    inert: ClassVar[Mapping[str, str]] = {
        "user": "who asks",
        "store": "whether to keep the answer; nothing is kept",
        "metadata": "the client's own",
    }
    refused: ClassVar[Mapping[str, Refused]] = {
        **UNSUPPORTED,
        "suffix": Refused(NOT_DONE, ("",)),
        "guided_json": Refused(OLDER),
        "guided_regex": Refused(OLDER),
        "guided_choice": Refused(OLDER),
        "guided_grammar": Refused(OLDER),
        "tools": Refused(CHAT_ALONE, ([],)),
        "tool_choice": Refused(CHAT_ALONE, ("none", "auto")),
        "parallel_tool_calls": Refused(CHAT_ALONE, (True, False)),
        "functions": Refused(NOT_DONE, ([],)),
        "function_call": Refused(NOT_DONE, ("none", "auto")),
        "reasoning_effort": Refused(CHAT_ALONE),
        "chat_template": Refused("is not taken from requests: the model's own is used"),
        "continue_final_message": Refused(CHAT_ALONE, (False,)),
        "top_logprobs": Refused("is a field of chat completions: logprobs tells how many", (0,)),
        "echo": Refused("is a field of completions", (False,)),
        "use_beam_search": Refused(NO_BEAMS, (False,)),
        "best_of": Refused(NO_BEAMS, (1,)),
        "length_penalty": Refused(NO_BEAMS, (1,)),
        "early_stopping": Refused(NO_BEAMS, (False,)),
    }

    stop: Annotated[
        str | list[str] | None, about("up to 32 strings that end the text, and are cut off it")
    ] = None
    max_tokens: Annotated[
        Count | None, about("most tokens of a choice; default: the rest of the context")
    ] = None
    max_completion_tokens: Annotated[Count | None, about("the newer name of max_tokens")] = None
    n: Annotated[
        Int | None, about("choices, at most --max-choices", minimum=1, maximum=INT32_MAX)
    ] = None
    stream_options: Annotated[
        StreamOptions | None,
        about("include_usage: usage at the end; continuous_usage_stats: usage in every event"),
    ] = None
    return_token_ids: Annotated[bool | None, about("token_ids in every choice")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, about("in log-probabilities of the output, tokens are written as token_id:ID")
    ] = None
    prompt_logprobs: Annotated[
        Int | None,
        about(
            "0..20 likeliest tokens for each token of the prompt; not with stream",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        about("type: text, json_object or json_schema, the last with json_schema.schema"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        about("exactly one of json, regex, choice and grammar (docs/structured-output.md)"),
    ] = None
    grammar: Annotated[
        str | None, about("llama.cpp's field: the same as structured_outputs.grammar")
    ] = None
    json_schema: Annotated[
        dict[str, Any] | None, about("llama.cpp's field: the same as structured_outputs.json")
    ] = None

    def check(self) -> None:
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


def sampling_params(
    fields: Generation, defaults: Mapping[str, float], max_choices: int, **given: Any
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
        structured=structured_output(
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
