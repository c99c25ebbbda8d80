"""A tool call and its result with a running server, by OpenAI's own client (`make serve` first).

The demo model knows nothing of weather: `tool_choice` makes it call, and the schema makes the call
valid. A larger model decides for itself with `tool_choice` left out.
"""

import json
import sys

import openai
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

TOOL: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"enum": ["Berlin", "Paris", "Rome"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 7},
            },
            "required": ["city", "days"],
        },
    },
}


def get_weather(city: str, days: int) -> str:
    """Return the weather of a city, which is always fine."""
    return f"{city}: {days} days of sunshine"


def main(base_url: str = "http://127.0.0.1:8000/v1") -> None:
    """Print the call, its result and the answer to it."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "How is the weather in Rome?"}
    ]
    with openai.OpenAI(base_url=base_url, api_key="none") as client:
        answer = client.chat.completions.create(
            model="demo", messages=messages, tools=[TOOL], tool_choice="required"
        )
        message = answer.choices[0].message
        messages.append(message.to_dict())  # type: ignore[arg-type]
        for call in message.tool_calls or ():
            assert call.type == "function"
            print(f"{call.function.name}({call.function.arguments})")
            result = get_weather(**json.loads(call.function.arguments))
            print(result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        last = client.chat.completions.create(model="demo", messages=messages, tools=[TOOL])
        print(last.choices[0].message.content)


if __name__ == "__main__":
    main(*sys.argv[1:])
