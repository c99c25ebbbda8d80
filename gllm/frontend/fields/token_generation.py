"""Request fields of POST /inference/v1/generate: token ids in, token ids out, as in vLLM.

`convert_to_completion` returns the fields of the completion for the same request.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from gllm.config.sampling import SamplingParams, StructuredOutput
from gllm.frontend.fields.base import (
    Int32,
    JsonObject,
    ModelRequestFields,
    UnsupportedField,
    doc,
)
from gllm.frontend.fields.completions import CompletionFields
from gllm.frontend.fields.generation import (
    SAMPLING_PARAM_NAMES,
    CacheSalt,
    Priority,
    RequestIdField,
    Seconds,
    Session,
    StreamOptions,
)
from gllm.frontend.fields.parsing import parse_fields, rename_error_fields

SAMPLING_NAMES = frozenset(
    {
        *(name for name in SAMPLING_PARAM_NAMES if name != "truncate_prompt_tokens"),
        "n",
        "stop",
        "stop_token_ids",
        "allowed_token_ids",
        "bad_words",
        "max_tokens",
        "logprobs",
        "prompt_logprobs",
        "structured_outputs",
        "response_format",
    }
)
"""Members of `sampling_params` that have an effect. Their names and types are those of completions,
so that vLLM's SamplingParams fit."""


class GenerateFields(ModelRequestFields):
    """Request body of POST /inference/v1/generate, which takes and returns token ids."""

    required_fields: ClassVar[tuple[str, ...]] = ("token_ids", "sampling_params")
    unsupported_fields: ClassVar[Mapping[str, UnsupportedField]] = {
        "features": UnsupportedField("is not supported: the model reads text only", ({},)),
    }

    token_ids: Annotated[list[Int32] | None, doc("token ids of the prompt", minItems=1)] = None
    sampling_params: Annotated[
        dict[str, Any] | None,
        doc(
            f"object of {', '.join(sorted(SAMPLING_NAMES))}, each as in completions; max_tokens: "
            "default: the rest of the context; other members have no effect"
        ),
    ] = None
    stream: Annotated[bool | None, doc("answer with server-sent events")] = None
    stream_options: Annotated[StreamOptions | None, doc("as in completions")] = None
    priority: Priority = None
    cache_salt: Annotated[CacheSalt | None, doc("as in completions")] = None
    request_id: RequestIdField = None
    slo_ttft: Annotated[Seconds | None, doc("as in completions")] = None
    slo_tpot: Annotated[Seconds | None, doc("as in completions")] = None
    prompt_cache_key: Annotated[Session | None, doc("as in completions")] = None
    kv_transfer_params: Annotated[
        dict[str, Any] | None, doc("as in completions; only for routers")
    ] = None


TOP_LEVEL_NAMES = frozenset(GenerateFields.__struct_fields__) - {"token_ids", "sampling_params"}
CLIENT_FIELD_NAMES: Mapping[str, str] = {
    **{
        name: "sampling_params"
        for name in (
            *SAMPLING_NAMES,
            *CompletionFields.__struct_fields__,
            *CompletionFields.unsupported_fields,
            "params",
        )
        if name not in TOP_LEVEL_NAMES
    },
    "prompt": "token_ids",
}
"""Fields of this API for fields of completions, where the names differ."""


def convert_to_completion(fields: GenerateFields) -> CompletionFields:
    """Convert a request of /inference/v1/generate to completion fields, without the prompt.

    Raises:
        FieldError: A member of `sampling_params` is invalid; the error names `sampling_params`.
    """
    members = fields.sampling_params or {}
    values = {name: members[name] for name in SAMPLING_NAMES if members.get(name) is not None}
    values |= {
        name: getattr(fields, name)
        for name in TOP_LEVEL_NAMES - {"model", "stream_options"}
        if getattr(fields, name) is not None
    }
    with rename_error_fields(CLIENT_FIELD_NAMES):
        # `prompt` is required, but the token ids need no second check.
        completion = parse_fields({**values, "prompt": ""}, CompletionFields)
        completion.stream_options = fields.stream_options
        completion.validate()
    return completion


def sampling_params_to_json(params: SamplingParams, max_tokens: int) -> JsonObject:
    """Return SamplingParams as the JSON object `sampling_params` of /inference/v1/generate.

    Args:
        params: Sampling parameters, including the model's defaults and the output grammar of a
            chat.
        max_tokens: Maximum number of output tokens if the parameters have none.
    """
    values: JsonObject = {
        name: getattr(params, name) for name in SAMPLING_PARAM_NAMES if name in SAMPLING_NAMES
    }
    # Keys of a JSON object are strings.
    values["logit_bias"] = {str(token): bias for token, bias in params.logit_bias.items()} or None
    allowed = params.allowed_token_ids
    return values | {
        "n": params.n,
        "stop": list(params.stop),
        "stop_token_ids": list(params.stop_token_ids),
        "allowed_token_ids": None if allowed is None else list(allowed),
        "bad_words": list(params.bad_words),
        "max_tokens": params.max_tokens or max_tokens,
        "logprobs": params.logprobs,
        "prompt_logprobs": params.prompt_logprobs,
        **_constraint(params.structured),
    }


def _constraint(structured: StructuredOutput | None) -> JsonObject:
    """Return the member of `sampling_params` with the constraint on the output."""
    if structured is None:
        return {"structured_outputs": None}
    if structured.strict:
        # vLLM's field cannot say that objects are closed.
        schema = {"name": "output", "schema": structured.json, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}
    choice = None if structured.choice is None else list(structured.choice)
    members = {
        "json": structured.json,
        "regex": structured.regex,
        "choice": choice,
        "grammar": structured.grammar,
    }
    return {"structured_outputs": {k: v for k, v in members.items() if v is not None}}
