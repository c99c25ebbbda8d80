"""OpenAI's client for Python: chats, completions, embeddings, models and errors."""

import json
from enum import Enum
from typing import Annotated, Any, Literal, get_args

import openai
import pydantic
import pytest
from openai.types import ReasoningEffort

from tests.support.http.client_probes import MODEL, say, user, write_json
from tests.support.http.scripted_server import DEFAULT

pytestmark = pytest.mark.asyncio(loop_scope="module")
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


async def chat(ai: openai.AsyncOpenAI, stream: bool, **fields: Any) -> Any:
    """Return the first choice, put together by the client where it is streamed."""
    fields = {"model": MODEL, "messages": user("Hi"), **fields}
    if not stream:
        return (await ai.chat.completions.create(**fields)).choices[0]
    async with ai.chat.completions.stream(**fields) as events:
        return (await events.get_final_completion()).choices[0]


@STREAMS
async def test_a_chat(ai, stream):
    choice = await chat(ai, stream)
    assert (choice.message.content, choice.finish_reason) == (DEFAULT, "stop")
    assert choice.message.role == "assistant"


async def test_usage_of_a_stream(ai):
    options = {"include_usage": True}
    chunks = [
        chunk
        async for chunk in await ai.chat.completions.create(
            model=MODEL, messages=user("Hi"), stream=True, stream_options=options
        )
    ]
    whole = await ai.chat.completions.create(model=MODEL, messages=user("Hi"))
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])


SAMPLING = [
    {"temperature": 0, "top_p": 0.5, "seed": 7},
    {"frequency_penalty": 1, "presence_penalty": -1, "logit_bias": {"7": 5}},
    {"user": "u", "store": False, "metadata": {"a": "b"}, "service_tier": "auto"},
    {"parallel_tool_calls": False, "prompt_cache_key": "k", "safety_identifier": "s"},
    {"verbosity": "low"},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1}},
]


@STREAMS
@pytest.mark.parametrize("fields", SAMPLING, ids=lambda one: "-".join(one))
async def test_fields_that_change_no_script(ai, stream, fields):
    assert (await chat(ai, stream, **fields)).message.content == DEFAULT


@STREAMS
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_a_limit(ai, stream, field):
    if stream:
        with pytest.raises(openai.LengthFinishReasonError) as caught:
            await chat(ai, stream, **{field: 4})
        choice = caught.value.completion.choices[0]
    else:
        choice = await chat(ai, stream, **{field: 4})
    assert choice.finish_reason == "length"
    assert choice.message.content is not None
    assert choice.message.content[:3] == DEFAULT[:3]
    assert len(choice.message.content) < len(DEFAULT)


@STREAMS
async def test_stop(ai, stream):
    choice = await chat(ai, stream, stop=["how", "never"])
    assert (choice.message.content, choice.finish_reason) == ("Hello wörld 🎉, ", "stop")


@STREAMS
async def test_logprobs(ai, stream):
    choice = await chat(ai, stream, logprobs=True, top_logprobs=2)
    tokens = choice.logprobs.content
    assert all(len(entry.top_logprobs) == 2 for entry in tokens)
    assert b"".join(bytes(entry.bytes) for entry in tokens).decode() == DEFAULT


async def test_several_choices(ai):
    answer = await ai.chat.completions.create(model=MODEL, messages=user("Hi"), n=3)
    assert [choice.message.content for choice in answer.choices] == [DEFAULT] * 3


@STREAMS
async def test_roles_and_parts(ai, stream):
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}], "name": "Ann"},
        {"role": "assistant", "content": [{"type": "text", "text": "Hello."}]},
        *say("Yes."),
    ]
    assert (await chat(ai, stream, messages=messages)).message.content == "Yes."


@STREAMS
@pytest.mark.parametrize("effort", [one for one in get_args(get_args(ReasoningEffort)[0]) if one])
async def test_reasoning_effort(ai, stream, effort):
    assert (await chat(ai, stream, reasoning_effort=effort)).message.content == DEFAULT


@STREAMS
async def test_reasoning(reasoning_ai, stream):
    script = say("<think>\nhm\n</think>\nSo.")
    message = (await chat(reasoning_ai, stream, messages=script)).message
    assert (message.content, message.reasoning_content) == ("So.", "hm")


@STREAMS
async def test_json_object(ai, stream):
    choice = await chat(ai, stream, response_format={"type": "json_object"})
    assert isinstance(json.loads(choice.message.content), dict)


class Color(Enum):
    RED = "red"
    GREEN = "green"


class Part(pydantic.BaseModel):
    kind: Literal["part"]
    weight: Annotated[float, pydantic.Field(ge=0, le=9)]


class Everything(pydantic.BaseModel):
    """What Python's types become: references, unions, sets, maps, bounds and patterns."""

    color: Color
    colors: set[Color]
    tags: Annotated[set[str], pydantic.Field(max_length=2)]
    count: Annotated[int, pydantic.Field(multiple_of=5, ge=0, le=50)]
    code: Annotated[str, pydantic.Field(pattern="^[A-Z]{2}$")]
    maybe: Part | None
    pair: tuple[Literal[1], bool]
    parts: Annotated[list[Part], pydantic.Field(min_length=1, max_length=2)]


VALUE = Everything.model_validate(
    {
        "color": "red",
        "colors": ["green"],
        "tags": ["a"],
        "count": 15,
        "code": "AB",
        "maybe": None,
        "pair": [1, True],
        "parts": [{"kind": "part", "weight": 1.5}],
    }
)


@STREAMS
@pytest.mark.parametrize("script", [None, VALUE.model_dump(mode="json")], ids=["any", "given"])
async def test_a_parsed_answer(ai, stream, script):
    messages = user("Hi") if script is None else say(write_json(script))
    fields = {"model": MODEL, "messages": messages, "response_format": Everything}
    if stream:
        async with ai.chat.completions.stream(**fields) as events:
            answer = await events.get_final_completion()
    else:
        answer = await ai.chat.completions.parse(**fields)
    parsed = answer.choices[0].message.parsed
    assert isinstance(parsed, Everything)
    assert script is None or parsed == VALUE


SCHEMAS: list[tuple[dict[str, Any], Any]] = [
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, [2, 1]),
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, ["a"]),
    (
        {"propertyNames": {"type": "string"}, "additionalProperties": {"type": "integer"}},
        {"a": 1},
    ),
    ({"propertyNames": {"pattern": "^[a-z]$"}, "additionalProperties": False}, {}),
    ({"patternProperties": {"^x_": {"type": "null"}}, "additionalProperties": False}, {"x_": None}),
    ({"type": "number", "multipleOf": 0.5}, 1.5),
    ({"properties": {"a": {"not": {}}, "b": {"type": "null"}}}, {"b": None}),
]


@STREAMS
@pytest.mark.parametrize("strict", [None, True])
@pytest.mark.parametrize(("schema", "value"), SCHEMAS, ids=lambda one: str(one)[:40])
async def test_keywords_of_a_schema(ai, stream, strict, schema, value):
    whole = {"type": "object", "properties": {"value": schema}, "required": ["value"]}
    schema = {"name": "answer", "schema": whole, "strict": strict}
    choice = await chat(
        ai,
        stream,
        messages=say(write_json({"value": value})),
        response_format={"type": "json_schema", "json_schema": schema},
    )
    assert json.loads(choice.message.content) == {"value": value}


async def test_a_keyword_that_is_not_enforced_is_named(ai):
    schema = {"type": "object", "if": {"required": ["a"]}}
    with pytest.raises(openai.BadRequestError, match="'if'") as caught:
        await ai.chat.completions.create(
            model=MODEL,
            messages=user("Hi"),
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
    assert caught.value.param == "response_format"


@STREAMS
async def test_a_completion(ai, stream):
    asked = {"model": MODEL, "prompt": ["a", "b"], "max_tokens": 64}
    if stream:
        texts = ["", ""]
        async for chunk in await ai.completions.create(stream=True, **asked):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
    else:
        texts = [choice.text for choice in (await ai.completions.create(**asked)).choices]
    assert texts == [DEFAULT] * 2


async def test_the_echo_of_a_completion(ai):
    asked = {"model": MODEL, "prompt": [9, 8, 7], "max_tokens": 1, "logprobs": 1, "echo": True}
    told = (await ai.completions.create(**asked)).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == 4
    assert told.token_logprobs[0] is None


@pytest.mark.parametrize("fields", [{}, {"encoding_format": "float"}, {"dimensions": 3}])
async def test_embeddings(ai, fields):
    answer = await ai.embeddings.create(model=MODEL, input=["a", "b"], **fields)
    assert [len(row.embedding) for row in answer.data] == [fields.get("dimensions", 8)] * 2


async def test_models(ai):
    assert [model.id async for model in ai.models.list()] == [MODEL]
    assert (await ai.models.retrieve(MODEL)).id == MODEL
    with pytest.raises(openai.NotFoundError):
        await ai.models.retrieve("other")


@STREAMS
async def test_a_prompt_that_is_too_long(ai, stream):
    with pytest.raises(openai.BadRequestError, match="maximum context length") as caught:
        await chat(ai, stream, messages=user("x y " * 3000))
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "messages"


@STREAMS
async def test_errors_name_the_field(ai, stream):
    with pytest.raises(openai.BadRequestError) as caught:
        await chat(ai, stream, temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        await chat(ai, stream, model="other")


async def test_headers(ai):
    raw = await ai.chat.completions.with_raw_response.create(model=MODEL, messages=user("Hi"))
    assert raw.headers["x-request-id"]
    assert raw.parse()._request_id == raw.headers["x-request-id"]
