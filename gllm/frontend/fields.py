"""What the fields of a request mean: which are honoured, which do nothing, which are refused.

Owns the schemas of request bodies and their reading. Knows nothing of engines and of answers.
"""

import json
import logging
import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web
from msgspec import Meta

from gllm.config import INT32_MAX, MAX_LOGPROBS, FieldError, SamplingParams
from gllm.frontend.errors import ApiError

log = logging.getLogger(__name__)

MAX_PROMPTS = 1024
"""Prompts of one completions request; also the least bound on all its choices."""
COMPLETION_TOKENS = 16
"""max_tokens of a completions request that names none."""

Int = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Meta(ge=-(2**31), le=INT32_MAX)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
CountOrZero = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Salt = Annotated[str, Meta(max_length=128)]
Id = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9._:-]{1,128}\Z")]


class StreamOptions(msgspec.Struct):
    """What a stream carries besides its choices."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class TemplateOptions(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """The variables of a chat template that a client may set."""

    enable_thinking: bool | None = None
    thinking: bool | None = None


class Common(msgspec.Struct):
    """Fields of both endpoints that are honoured. None: unset, as null is."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int32] | None = None
    min_tokens: Int | None = None
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    ignore_eos: bool | None = None
    n: Int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int32, float] | None = None
    allowed_token_ids: list[Int32] | None = None
    bad_words: list[str] | None = None
    prompt_logprobs: Int | None = None
    truncate_prompt_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int32 | None = None
    cache_salt: Salt | None = None
    request_id: Id | None = None


class ChatFields(Common):
    """POST /v1/chat/completions."""

    messages: Any = None
    """Checked by the chat template."""
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None


class CompletionFields(Common):
    """POST /v1/completions."""

    prompt: Any = None
    """A string, a list of strings, token ids, or a list of lists of token ids."""
    max_tokens: CountOrZero | None = None
    """0 only with echo."""
    logprobs: Int | None = None
    echo: bool | None = None

    @property
    def generates(self) -> bool:
        """Whether any output is asked for."""
        return self.max_completion_tokens is not None or self.max_tokens != 0


Fields = TypeVar("Fields", bound=Common)

INERT = frozenset({"user", "store", "metadata", "parallel_tool_calls"})
"""Accepted without effect, whatever they hold."""

OFF_VALUES: dict[str, tuple[object, ...]] = {
    "suffix": ("",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "reasoning_effort": (),
    "chat_template": (),
    "continue_final_message": (False,),
    # Each is a field of the other endpoint.
    "top_logprobs": (0,),
    "echo": (False,),
}
"""Known fields that are not implemented, each with the values, besides null, that ask nothing."""

BEAM_SEARCH: dict[str, tuple[object, ...]] = {
    "use_beam_search": (False,),
    "best_of": (1,),
    "length_penalty": (1,),
    "early_stopping": (False,),
}
"""Fields of beam search, each with the values, besides null, that ask for none."""

PLAIN = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "min_tokens", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias"),
    *("truncate_prompt_tokens", "skip_special_tokens", "include_stop_str_in_output"),
)
"""Fields that SamplingParams has by the same name and type."""

MAX_DEPTH = 100
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
"""A JSON string or a bracket."""


async def read_fields(request: web.Request, schema: type[Fields]) -> Fields:
    """The fields of a request's body. Raises FieldError and ApiError."""
    try:
        body = await request.read()
    except web.RequestPayloadError as error:
        raise ApiError(400, f"the body cannot be read: {error}") from error
    values = parse_object(body)
    _refuse_unbuilt(values, schema)
    try:
        fields = msgspec.convert(values, schema, str_keys=True)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error
    if fields.stream_options is not None and not fields.stream:
        raise FieldError("stream_options", "stream_options is only allowed with stream")
    if fields.prompt_logprobs is not None and fields.stream:
        raise FieldError("prompt_logprobs", "prompt_logprobs is not allowed with stream")
    known = {*schema.__struct_fields__, *INERT, *OFF_VALUES, *BEAM_SEARCH}
    unknown = sorted(values.keys() - known)
    if unknown:
        log.warning("fields without meaning here were ignored: %.500r", unknown)
    return fields


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises FieldError naming the field that is no JSON, ApiError without one."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        culprit = _culprit(body)
        if culprit is not None:
            raise FieldError(culprit, f"{culprit} holds what JSON has no value for") from error
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(values, dict):
        raise ApiError(400, "the body has to be a JSON object", code="invalid_json")
    return values


def sampling_params(
    fields: Common, defaults: Mapping[str, float], max_choices: int, **given: Any
) -> SamplingParams:
    """How to sample; `defaults` stand for what is unset, `given` for fields that each endpoint
    reads in its own way. Raises FieldError."""
    n = 1 if fields.n is None else fields.n
    if n > max_choices:
        raise FieldError("n", f"n is {n}, but this server allows at most {max_choices}")
    plain = {name: getattr(fields, name) for name in PLAIN}
    return SamplingParams(
        **{**defaults, **{name: value for name, value in plain.items() if value is not None}},
        n=n,
        stop=_stop_strings(fields.stop),
        stop_token_ids=tuple(fields.stop_token_ids or ()),
        allowed_token_ids=_tuple(fields.allowed_token_ids),
        bad_words=tuple(fields.bad_words or ()),
        **given,
    )


def chat_top_logprobs(fields: ChatFields) -> int | None:
    """How many likeliest tokens a chat wants told, None for no log-probabilities."""
    top = fields.top_logprobs or 0
    if not 0 <= top <= MAX_LOGPROBS:
        raise FieldError("top_logprobs", f"top_logprobs is {top}, not in 0..{MAX_LOGPROBS}")
    if top and not fields.logprobs:
        raise FieldError("top_logprobs", "top_logprobs is only allowed with logprobs")
    return top if fields.logprobs else None


def parse_prompts(prompt: object, most: int) -> list[str] | list[list[int]]:
    """The prompts of a completions request, all of one kind. Raises FieldError."""
    rule = "prompt has to be a string, a list of strings, token ids, or a list of token ids' lists"
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise FieldError("prompt", rule)
    if type(prompt[0]) is int:
        prompt = [prompt]
    if len(prompt) > most:
        raise FieldError("prompt", f"prompt has {len(prompt)} prompts, at most {most} are allowed")
    try:
        if isinstance(prompt[0], str):
            return msgspec.convert(prompt, list[str])
        return msgspec.convert(prompt, list[list[Int32]])
    except msgspec.ValidationError as error:
        raise FieldError("prompt", f"{rule}: {error}") from error


def _tuple(ids: list[int] | None) -> tuple[int, ...] | None:
    return None if ids is None else tuple(ids)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if isinstance(stop, str):
        return (stop,) if stop else ()
    return tuple(stop or ())


def _refuse_unbuilt(values: dict[str, Any], schema: type[Common]) -> None:
    """Raises FieldError for a field that asks for what this server does not do."""
    for fields, why in (
        (OFF_VALUES, "is not supported by this server with this value"),
        (BEAM_SEARCH, "asks for beam search, which is not done here: n draws several choices"),
    ):
        for name, off in fields.items():
            value = values.get(name)
            unknown = name not in schema.__struct_fields__
            if unknown and value is not None and not any(_same(value, rest) for rest in off):
                raise FieldError(name, f"{name} {why}")


def _same(value: object, other: object) -> bool:
    """Equality that tells False from 0."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


def _named(message: str) -> FieldError:
    """msgspec's complaint with the field in front, which is where its path begins."""
    what, _, path = message.partition(" - at `")
    name = re.split(r"\W", path.partition("$.")[2], maxsplit=1)[0]
    return FieldError(name, f"{name}: {what}")


def _culprit(body: bytes) -> str | None:
    """The field whose value keeps a body from being JSON; None where that is not to be told."""
    try:
        loose = json.loads(body, parse_int=_lenient_int)
    except RecursionError:
        return _deepest_field(body)
    except ValueError:
        return None
    if not isinstance(loose, dict):
        return None
    for name, value in loose.items():
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError):
            return str(name)
    return None


def _deepest_field(body: bytes) -> str | None:
    """The first field whose value nests deeper than any request has to."""
    depth, name = 0, None
    for found in _TOKEN.finditer(body):
        token = found[0]
        if token in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                return None if name is None else name.decode("utf-8", "replace")
        elif token in b"]}":
            depth -= 1
        elif depth == 1:
            name = token[1:-1]
    return None


def _lenient_int(digits: str) -> float:
    """An integer, or infinity for one that Python itself refuses to read."""
    return int(digits) if len(digits) < 400 else math.inf
