"""LiteLLM against a scripted server: `python -m tests.clients.scripted`, then pytest this file.

The providers are openai, hosted_vllm and anthropic. docs/clients.md has the commands.
"""

import json
import os

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")

import litellm
import pydantic
import pytest

URL = os.environ.get("GLLM_URL", "http://127.0.0.1:8471")
REASONING_URL = os.environ.get("GLLM_REASONING_URL", "http://127.0.0.1:8472")
NAME = "fake/model"
DEFAULT = "Hello wörld 🎉, how are you?"
PROVIDERS = {"openai": "/v1", "hosted_vllm": "/v1", "anthropic": ""}
ARGUMENTS = {"city": "Rome", "days": 3}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer"}},
    "required": ["city"],
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}},
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    },
]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
)

providers = pytest.mark.parametrize("provider", PROVIDERS)
streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def user(text):
    return [{"role": "user", "content": text}]


def say(text):
    return user(f"Answer exactly: {text}")


def ask(provider, stream=False, url=URL, **fields):
    """A completion, put together by the client where it is streamed."""
    fields = {"messages": user("Hi"), "max_tokens": 500, "num_retries": 0, **fields}
    answer = litellm.completion(
        model=f"{provider}/{NAME}",
        api_base=url + PROVIDERS[provider],
        api_key="none",
        stream=stream,
        **fields,
    )
    if stream:
        answer = litellm.stream_chunk_builder(list(answer), messages=fields["messages"])
    return answer


@providers
@streams
def test_a_chat(provider, stream):
    answer = ask(provider, stream)
    assert answer.choices[0].message.content == DEFAULT
    assert answer.choices[0].finish_reason == "stop"


@providers
def test_usage(provider):
    usage = ask(provider).usage
    assert usage.prompt_tokens > 0
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@providers
@streams
def test_a_limit(provider, stream):
    assert ask(provider, stream, max_tokens=4).choices[0].finish_reason == "length"


@providers
@streams
def test_stop(provider, stream):
    answer = ask(provider, stream, stop=["how"])
    assert answer.choices[0].message.content.strip() == "Hello wörld 🎉,"


@providers
def test_a_system_message(provider):
    messages = [{"role": "system", "content": "Be brief."}, *say("Yes.")]
    assert ask(provider, messages=messages).choices[0].message.content == "Yes."


@providers
def test_sampling(provider):
    answer = ask(provider, temperature=0.5, top_p=0.9)
    assert answer.choices[0].message.content == DEFAULT


@providers
@streams
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
def test_a_call(provider, stream, choice):
    answer = ask(provider, stream, messages=say(CALL), tools=TOOLS, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "tool_calls"


@providers
@streams
def test_a_result(provider, stream):
    first = ask(provider, messages=say(CALL), tools=TOOLS).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": "sunny"}
    messages = [*user("How is the weather?"), first.model_dump(), result, *say("Sunny.")]
    answer = ask(provider, stream, messages=messages, tools=TOOLS)
    assert answer.choices[0].message.content == "Sunny."


@providers
@streams
@pytest.mark.parametrize("strict", [None, True])
def test_a_schema(provider, stream, strict):
    value = '{"city":"Rome","days":3}'
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": strict}}
    if provider == "anthropic":
        # It has the answer called as a tool, which the script has to be then.
        text = CALL.replace("get_weather", "json_tool_call")
        answer = ask(provider, stream, messages=say(text), response_format=form)
    else:
        answer = ask(provider, stream, messages=say(value), response_format=form)
    assert json.loads(answer.choices[0].message.content) == ARGUMENTS


class Answer(pydantic.BaseModel):
    tags: set[str]
    counts: dict[str, int]


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@streams
def test_a_model_of_pydantic(provider, stream):
    value = '{"tags":["a"],"counts":{}}'
    answer = ask(provider, stream, messages=say(value), response_format=Answer)
    assert Answer.model_validate_json(answer.choices[0].message.content).tags == {"a"}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_json_object(provider):
    answer = ask(provider, response_format={"type": "json_object"})
    assert isinstance(json.loads(answer.choices[0].message.content), dict)


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_the_older_functions(provider):
    functions = [TOOLS[0]["function"]]
    answer = ask(provider, messages=say(CALL), functions=functions, function_call="auto")
    message = answer.choices[0].message
    function = message.function_call or message.tool_calls[0].function
    assert json.loads(function.arguments) == ARGUMENTS


@providers
@streams
def test_reasoning(provider, stream):
    script = say("<think>\nhm\n</think>\nSo.")
    answer = ask(provider, stream, url=REASONING_URL, messages=script)
    message = answer.choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "So.")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
@pytest.mark.parametrize("effort", ["none", "low", "high"])
def test_reasoning_effort(provider, effort):
    options = {"reasoning_effort": effort, "allowed_openai_params": ["reasoning_effort"]}
    assert ask(provider, **options).choices[0].message.content == DEFAULT


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_logprobs(provider):
    answer = ask(provider, logprobs=True, top_logprobs=2)
    assert len(answer.choices[0].logprobs.content[0].top_logprobs) == 2


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_several_choices(provider):
    assert len(ask(provider, n=2).choices) == 2


def test_fields_of_vllm():
    answer = ask("hosted_vllm", extra_body={"top_k": 5, "structured_outputs": {"choice": ["yes"]}})
    assert answer.choices[0].message.content == "yes"


@providers
@streams
def test_a_prompt_that_is_too_long(provider, stream):
    with pytest.raises(litellm.ContextWindowExceededError):
        ask(provider, stream, messages=user("x y " * 3000))


@providers
@streams
def test_errors_are_its_own_kinds(provider, stream):
    with pytest.raises(litellm.BadRequestError) as caught:
        ask(provider, stream, temperature=9)
    assert "temperature" in str(caught.value)


def test_a_model_that_is_not_there():
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(
            model="openai/other",
            api_base=f"{URL}/v1",
            api_key="none",
            messages=user("Hi"),
            num_retries=0,
        )


@streams
def test_a_text_completion(stream):
    answer = litellm.text_completion(
        model=f"text-completion-openai/{NAME}",
        api_base=f"{URL}/v1",
        api_key="none",
        prompt="Hi",
        max_tokens=50,
        stream=stream,
    )
    chunks = list(answer) if stream else [answer]
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == DEFAULT


def test_embeddings():
    answer = litellm.embedding(
        model=f"openai/{NAME}",
        api_base=f"{URL}/v1",
        api_key="none",
        input=["a", "b"],
        encoding_format="float",
    )
    assert [len(row["embedding"]) for row in answer.data] == [8, 8]


@streams
def test_responses(stream):
    answer = litellm.responses(
        model=f"openai/{NAME}", api_base=f"{URL}/v1", api_key="none", input="Hi", stream=stream
    )
    if stream:
        *_, last = list(answer)
        answer = last.response
    assert answer.output[0].content[0].text == DEFAULT
