"""Request fields that the endpoints for text generation share, and their `SamplingParams`."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.frontend.context import ServerContext
from gllm.frontend.fields.base import (
    Int32,
    Int64,
    ModelRequestFields,
    PositiveInt,
    UnsupportedField,
    doc,
)
from gllm.options.field_types import FieldError
from gllm.options.limits import MAX_LOGPROBS, MAX_LOGPROBS_PER_STEP, MAX_SESSION_CHARACTERS
from gllm.options.options import INT32_MAX


class JsonSchemaFormat(msgspec.Struct):
    """`json_schema` object of a response format: the JSON Schema that the output has to satisfy."""

    schema: dict[str, Any] | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """True: objects whose schema lists no properties have none; listed ones are always the only
    ones."""


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`response_format` of OpenAI's APIs: free text, any JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """`structured_outputs` of vLLM's API: a constraint on the output; exactly one member is set."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


def _parse_response_format(response_format: ResponseFormat) -> StructuredOutput | None:
    """Return the constraint of a response format. Raises FieldError."""
    json_schema = response_format.json_schema
    schema = None if json_schema is None else json_schema.schema
    if response_format.type == "json_schema" and schema is None:
        message = "response_format.json_schema.schema is missing, but type json_schema requires it"
        raise FieldError("response_format", message)
    if response_format.type != "json_schema" and schema is not None:
        message = (
            f"response_format.json_schema.schema is not allowed with type {response_format.type}: "
            "use type json_schema"
        )
        raise FieldError("response_format", message)
    if response_format.type == "text":
        return None
    if json_schema is None or schema is None:
        return StructuredOutput(json={"type": "object"}, param="response_format")
    strict = bool(json_schema.strict)
    return StructuredOutput(json=schema, param="response_format", strict=strict)


CacheSalt = Annotated[str, Meta(max_length=128)]
Session = Annotated[str, Meta(max_length=MAX_SESSION_CHARACTERS)]
Seconds = Annotated[float, Meta(gt=0)]
Port = Annotated[int, Meta(ge=1, le=65535)]
Room = Annotated[int, Meta(ge=0, le=2**63 - 1)]
RequestId = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]
Priority = Annotated[
    Int32 | None, doc("requests with smaller values are scheduled first; default 0")
]
CacheSaltField = Annotated[
    CacheSalt | None, doc("requests share prefix cache blocks only with requests of the same salt")
]
RequestIdField = Annotated[
    RequestId | None, doc("id of the answer, and of the request for /abort; default: X-Request-Id")
]
ParseSpecial = Annotated[
    bool | None,
    doc(
        "true: special tokens such as `<|im_end|>` in messages and tools become control tokens; "
        "false (default): they are plain text. Prompts of completions always parse them"
    ),
]

BEAM_SEARCH_REASON = "selects beam search, which is not supported: use n to sample several choices"
SPEECH_REASON = "requests speech, but the models generate text only"
WEB_SEARCH_REASON = "requests a web search, but only the client can run tools"
CHAT_ONLY_REASON = "is only supported by chat completions"
VALUE_REASON = "is not supported with this value"
OLD_NAME_REASON = "is an old name that is not supported: use structured_outputs"
LAZY_GRAMMAR_REASON = "is not supported: a grammar applies from the first token"

COMMON_UNSUPPORTED_FIELDS: Mapping[str, UnsupportedField] = {
    "modalities": UnsupportedField("requests an output that is not text", (["text"], [])),
    "audio": UnsupportedField(SPEECH_REASON),
    "prediction": UnsupportedField("is not supported: predicted outputs are not used"),
    "web_search_options": UnsupportedField(WEB_SEARCH_REASON),
    "documents": UnsupportedField("is not supported: put the texts into messages", ([],)),
    "grammar_lazy": UnsupportedField(LAZY_GRAMMAR_REASON, (False,)),
    "grammar_triggers": UnsupportedField(LAZY_GRAMMAR_REASON, ([],)),
}
"""Fields of OpenAI, vLLM and llama.cpp that no endpoint supports."""


class StreamOptions(msgspec.Struct):
    """`stream_options`: token counts at the end of a stream or in every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(ModelRequestFields):
    """Fields common to all endpoints that generate text, such as sampling parameters."""

    temperature: Annotated[
        float | None,
        doc(
            "sampling temperature in [0, 2]; 0 selects the most likely token; default: the model's "
            "own, else 1",
            minimum=0,
            maximum=2,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        doc(
            "in (0, 1]: sample from the most likely tokens whose probabilities sum up to this",
            exclusiveMinimum=0,
            maximum=1,
        ),
    ] = None
    top_k: Annotated[
        Int64 | None,
        doc(
            "sample from this number of most likely tokens; -1 and 0: from all",
            minimum=-1,
            maximum=INT32_MAX,
        ),
    ] = None
    min_p: Annotated[
        float | None,
        doc(
            "in [0, 1]: exclude tokens whose probability is below this fraction of the highest one",
            minimum=0,
            maximum=1,
        ),
    ] = None
    seed: Annotated[
        Int64 | None,
        doc(
            "random seed: equal requests with equal seeds have equal outputs. With the compiled "
            "CPU kernels this holds in any batch; elsewhere other requests in the batch may change "
            "the last bits of the logits"
        ),
    ] = None
    stop_token_ids: Annotated[list[Int32] | None, doc("token ids that end the output")] = None
    min_tokens: Annotated[
        Int64 | None,
        doc(
            "in [0, max_tokens]: number of tokens before which nothing ends the output",
            minimum=0,
            maximum=INT32_MAX,
        ),
    ] = None
    ignore_eos: Annotated[bool | None, doc("continue after the model's end-of-sequence token")] = (
        None
    )
    stream: Annotated[bool | None, doc("answer with server-sent events")] = None
    repetition_penalty: Annotated[
        float | None,
        doc("above 0; applies to tokens of prompt and output; 1: no penalty", exclusiveMinimum=0),
    ] = None
    presence_penalty: Annotated[
        float | None, doc("in [-2, 2]; applies to tokens of the output", minimum=-2, maximum=2)
    ] = None
    frequency_penalty: Annotated[
        float | None, doc("in [-2, 2]; applies to tokens of the output", minimum=-2, maximum=2)
    ] = None
    logit_bias: Annotated[
        dict[Int32, float] | None,
        doc(
            "map from token ids to values in [-100, 100] that are added to the logits",
            additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
        ),
    ] = None
    allowed_token_ids: Annotated[
        list[Int32] | None, doc("token ids that may be sampled; no others are", minItems=1)
    ] = None
    bad_words: Annotated[
        list[str] | None, doc("up to 1024 strings that the output must not contain")
    ] = None
    truncate_prompt_tokens: Annotated[
        Int64 | None,
        doc(
            "keep this number of tokens at the end of the prompt; -1: as many as fit",
            minimum=-1,
            maximum=INT32_MAX,
            **{"not": {"const": 0}},
        ),
    ] = None
    parse_special: ParseSpecial = None
    skip_special_tokens: Annotated[
        bool | None, doc("omit special tokens from the text; default true")
    ] = None
    include_stop_str_in_output: Annotated[
        bool | None, doc("keep the stop string at the end of the text")
    ] = None
    priority: Priority = None
    cache_salt: CacheSaltField = None
    slo_ttft: Annotated[
        Seconds | None,
        doc(
            "objective of the time to the first token, in seconds: routers prefer engines that are "
            "predicted to meet it, and may shed requests that none can; default: --slo-ttft"
        ),
    ] = None
    slo_tpot: Annotated[
        Seconds | None,
        doc("objective of the mean time per further token, in seconds; default: --slo-tpot"),
    ] = None
    prompt_cache_key: Annotated[
        Session | None,
        doc(
            "name of the session: routers prefer the engine of its earlier requests; default: the "
            "headers `x-session-token`, `x-session-id`, `X-Dynamo-Session-ID`"
        ),
    ] = None
    request_id: RequestIdField = None


class HandoffFields(SamplingFields):
    """Fields for disaggregated prefill under the routers of vLLM and SGLang.

    The router sends a request to one engine for the prefill and to another for the decode.
    """

    kv_transfer_params: Annotated[
        dict[str, Any] | None,
        doc(
            "vLLM's hand-off between engines: with do_remote_decode the answer has the "
            "kv_transfer_params for the engine that decodes; only for routers, see "
            "docs/disaggregation.md"
        ),
    ] = None
    bootstrap_host: Annotated[
        str | list[str] | None,
        doc("SGLang's hand-off between engines: host of the prefill engine; only for routers"),
    ] = None
    bootstrap_port: Annotated[
        Port | list[Port | None] | None, doc("HTTP port of the prefill engine; only for routers")
    ] = None
    bootstrap_room: Annotated[
        Room | list[Room] | None, doc("random number of the hand-off; only for routers")
    ] = None

    @property
    def is_remote_decode(self) -> bool:
        """True if vLLM's router wants only the prefill here: it has set max_tokens to 1."""
        params = self.kv_transfer_params
        return params is not None and params.get("do_remote_decode") is True


class BaseCompletionFields(HandoffFields):
    """Fields common to chat completions and completions."""

    ignored_fields: ClassVar[Mapping[str, str]] = {
        "user": "identifies the end user",
        "store": "requests that the answer is stored; only those of /v1/responses are",
        "metadata": "holds labels for the client's own use",
    }
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        **COMMON_UNSUPPORTED_FIELDS,
        "regex": UnsupportedField("is SGLang's name: use structured_outputs.regex"),
        "ebnf": UnsupportedField(
            "is SGLang's name: use structured_outputs.grammar, in the syntax of "
            "docs/structured-output.md"
        ),
        "n_predict": UnsupportedField("is llama.cpp's name: use max_tokens", (-1,)),
        "suffix": UnsupportedField(VALUE_REASON, ("",)),
        "guided_json": UnsupportedField(OLD_NAME_REASON),
        "guided_regex": UnsupportedField(OLD_NAME_REASON),
        "guided_choice": UnsupportedField(OLD_NAME_REASON),
        "guided_grammar": UnsupportedField(OLD_NAME_REASON),
        "tools": UnsupportedField(CHAT_ONLY_REASON, ([],)),
        "tool_choice": UnsupportedField(CHAT_ONLY_REASON, ("none", "auto")),
        "parallel_tool_calls": UnsupportedField(CHAT_ONLY_REASON, (True, False)),
        "functions": UnsupportedField(VALUE_REASON, ([],)),
        "function_call": UnsupportedField(VALUE_REASON, ("none", "auto")),
        "reasoning_effort": UnsupportedField(CHAT_ONLY_REASON),
        "chat_template": UnsupportedField("is not supported: the model's own template is used"),
        "continue_final_message": UnsupportedField(CHAT_ONLY_REASON, (False,)),
        "top_logprobs": UnsupportedField(f"{CHAT_ONLY_REASON}: set logprobs to the number", (0,)),
        "echo": UnsupportedField("is only supported by completions", (False,)),
        "use_beam_search": UnsupportedField(BEAM_SEARCH_REASON, (False,)),
        "best_of": UnsupportedField(BEAM_SEARCH_REASON, (1,)),
        "length_penalty": UnsupportedField(BEAM_SEARCH_REASON, (1,)),
        "early_stopping": UnsupportedField(BEAM_SEARCH_REASON, (False,)),
    }

    stop: Annotated[
        str | list[str] | None,
        doc("up to 32 strings that end the text and are removed from it"),
    ] = None
    max_tokens: Annotated[
        PositiveInt | None,
        doc("maximum number of output tokens per choice; default: the rest of the context"),
    ] = None
    max_completion_tokens: Annotated[
        PositiveInt | None, doc("newer name of max_tokens, which it overrides")
    ] = None
    n: Annotated[
        Int64 | None,
        doc("number of choices, at most --max-choices", minimum=1, maximum=INT32_MAX),
    ] = None
    stream_options: Annotated[
        StreamOptions | None,
        doc(
            "include_usage: token counts at the end of the stream; continuous_usage_stats: in "
            "every event"
        ),
    ] = None
    return_token_ids: Annotated[bool | None, doc("add token_ids to every choice")] = None
    return_tokens_as_token_ids: Annotated[
        bool | None, doc("write tokens in the log-probabilities of the output as token_id:ID")
    ] = None
    prompt_logprobs: Annotated[
        Int64 | None,
        doc(
            "in [0, 20]: number of most likely tokens to return per prompt token; not with stream",
            minimum=0,
            maximum=MAX_LOGPROBS,
        ),
    ] = None
    response_format: Annotated[
        ResponseFormat | None,
        doc("type: text, json_object, or json_schema with json_schema.schema"),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        doc("exactly one of json, regex, choice and grammar (docs/structured-output.md)"),
    ] = None
    grammar: Annotated[str | None, doc("llama.cpp's name of structured_outputs.grammar")] = None
    json_schema: Annotated[
        dict[str, Any] | None, doc("llama.cpp's name of structured_outputs.json")
    ] = None

    def validate(self) -> None:
        """Check rules that involve several fields. Raises FieldError."""
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "stream_options is only allowed with stream true")
        if self.prompt_logprobs is not None and self.stream:
            raise FieldError("prompt_logprobs", "prompt_logprobs is not allowed with stream true")


SAMPLING_PARAM_NAMES = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name in SamplingParams.__dataclass_fields__
    and name not in ("stop_token_ids", "allowed_token_ids", "bad_words")
)
"""Fields that SamplingParams has with the same name and type."""


def parse_structured_output(fields: BaseCompletionFields) -> StructuredOutput | None:
    """Return the constraint that a request sets on its output, such as a JSON Schema or a regex.

    Returns None if there is no constraint.

    Raises:
        FieldError: A value is invalid, or more than one field sets a constraint.
    """
    constraints: list[StructuredOutput] = []
    if fields.response_format is not None:
        constraint = _parse_response_format(fields.response_format)
        constraints += [] if constraint is None else [constraint]
    if (options := fields.structured_outputs) is not None:
        choice = None if options.choice is None else tuple(options.choice)
        constraints.append(
            StructuredOutput(
                options.json, options.regex, choice, options.grammar, "structured_outputs"
            )
        )
    if fields.grammar:
        constraints.append(StructuredOutput(grammar=fields.grammar, param="grammar"))
    if fields.json_schema is not None:
        constraints.append(StructuredOutput(json=fields.json_schema, param="json_schema"))
    if len(constraints) > 1:
        first, second = (constraint.param for constraint in constraints[:2])
        raise FieldError(second, f"{second} is not allowed together with {first}")
    return constraints[0] if constraints else None


def to_sampling_params(
    fields: BaseCompletionFields,
    context: ServerContext,
    *,
    logprobs: int | None,
    max_tokens: int | None = None,
) -> SamplingParams:
    """Convert the fields of a request to the engine's SamplingParams.

    Fields that are None get the value of the model's generation_config.json, if it has one.

    Args:
        fields: The parsed request body.
        context: State of the server, for the model's defaults and the limit on `n`.
        logprobs: Number of most likely tokens to return per output token; None: no
            log-probabilities.
        max_tokens: Maximum number of output tokens per choice; None: the value in `fields`.

    Raises:
        FieldError: A value is not allowed.
    """
    defaults, max_choices = context.engine.model.defaults, context.config.max_choices
    n = 1 if fields.n is None else fields.n
    if n > max_choices:
        raise FieldError("n", f"n is {n}, but this server allows at most {max_choices}")
    values = {name: getattr(fields, name) for name in SAMPLING_PARAM_NAMES}
    if fields.is_remote_decode and fields.min_tokens is not None:
        # It is the limit of the whole output, but max_tokens that of the prefill.
        values["min_tokens"] = min(fields.min_tokens, 1)
    stop, allowed = fields.stop, fields.allowed_token_ids
    params = SamplingParams(
        **{**defaults, **{name: value for name, value in values.items() if value is not None}},
        n=n,
        stop=tuple(filter(None, [stop]) if isinstance(stop, str) else stop or ()),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=None if allowed is None else tuple(allowed),
        bad_words=tuple(fields.bad_words or ()),
        structured=parse_structured_output(fields),
        max_tokens=max_tokens or fields.max_completion_tokens or fields.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
    )
    num_logprobs = 0 if params.logprobs is None else n * (params.logprobs + 1)
    if num_logprobs > MAX_LOGPROBS_PER_STEP:
        raise FieldError(
            "n",
            f"n {n} with {params.logprobs} most likely tokens and the sampled token per position "
            f"is {num_logprobs} log-probabilities per step, but at most {MAX_LOGPROBS_PER_STEP} "
            "are allowed",
        )
    return params
