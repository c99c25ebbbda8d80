"""A tool call and its result without a server: `LLM.chat` with tools.

The demo model was not trained on tools: `tool_choice` makes it call, and the schema makes the call
valid. A larger model decides for itself if `tool_choice` is left out.
"""

import json
from typing import Any

from gllm import LLM, SamplingParams

TOOL: dict[str, Any] = {
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


def main() -> None:
    """Print the call, its result and the answer to it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather in Rome?"}]
    params = SamplingParams(temperature=0, max_tokens=100)
    with LLM("demo", progress=False) as llm:
        choice = llm.chat(messages, params, tools=[TOOL], tool_choice="required").outputs[0]
        messages.append(choice.message)
        for call in choice.tool_calls:
            print(f"{call.name}({call.arguments})")
            result = get_weather(**json.loads(call.arguments))
            print(result)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(llm.chat(messages, params, tools=[TOOL]).outputs[0].content)


if __name__ == "__main__":
    main()
