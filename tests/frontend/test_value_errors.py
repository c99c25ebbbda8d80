"""Errors of fields name the path, the value received and the values allowed."""

import pytest

from gllm.frontend.fields.chat import ChatCompletionFields
from gllm.frontend.fields.messages import MessagesFields
from gllm.frontend.fields.messages import convert_messages_to_chat as convert_messages
from gllm.frontend.fields.parsing import parse_fields
from gllm.frontend.fields.responses import ResponsesFields
from gllm.frontend.fields.responses import convert_responses_to_chat as convert_responses
from gllm.options.field_types import FieldError

MESSAGE = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens is 0, but has to be `int` >= 1"),
        ({"temperature": "x"}, 'temperature is "x", but has to be `float`'),
        ({"stream": [1]}, "stream is a list, but has to be `bool`"),
        ({"stop": ["a", True]}, "stop[1] is true, but has to be `str`"),
        ({"stop_token_ids": [10**5000]}, "stop_token_ids[0] is a very large number, but has to be"),
        ({"logit_bias": {"x": 1}}, "a key of logit_bias has to be `int`"),
        ({"logit_bias": {"1": "x"}}, "logit_bias[...] is of type `str`, but has to be `float`"),
        (
            {"response_format": {"type": "c"}},
            'response_format.type is "c", but has to be one of json_object, json_schema, text',
        ),
        ({"response_format": {}}, "response_format: Object missing required field `type`"),
        ({"reasoning_effort": "huge"}, 'reasoning_effort is "huge", but has to be one of high, '),
    ],
)
def test_chat_completions(fields, message):
    with pytest.raises(FieldError) as caught:
        parse_fields({"messages": MESSAGE, **fields}, ChatCompletionFields)
    assert str(caught.value).startswith(message)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("schema", "name"),
    [(ChatCompletionFields, "messages"), (ResponsesFields, "input"), (MessagesFields, "messages")],
)
def test_required_fields(schema, name):
    with pytest.raises(FieldError, match=f"^{name} is missing, but required$") as caught:
        parse_fields({name: None}, schema)
    assert caught.value.param == name


def test_long_values_are_shortened():
    with pytest.raises(FieldError) as caught:
        parse_fields({"messages": MESSAGE, "cache_salt": "x" * 10**6}, ChatCompletionFields)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "robot"}, 'messages[0].role is "robot", but has to be one of user, assistant, '),
        ({"role": "user"}, "messages[0].content is missing, but has to be a list of objects"),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "messages[0].content[0] has the type 'image', which is not supported: use one of text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": 7}]},
            "messages[0].content[0].text is 7, but has to be a string",
        ),
    ],
)
def test_messages(message, text):
    fields = parse_fields({"messages": [message], "max_tokens": 1}, MessagesFields)
    with pytest.raises(FieldError) as caught:
        convert_messages(fields)
    assert str(caught.value).startswith(text)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"content": "x"}, "input[0].role is missing, but has to be one of user, assistant, "),
        ({"type": "file"}, "input[0] has the type 'file', which is not supported: use one of "),
        ({"type": "function_call"}, "input[0].call_id is missing, but has to be a string"),
    ],
)
def test_responses(item, text):
    with pytest.raises(FieldError) as caught:
        convert_responses(parse_fields({"input": [item]}, ResponsesFields))
    assert str(caught.value).startswith(text)
    assert caught.value.param == "input"
