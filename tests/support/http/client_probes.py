"""What probes of several clients share: scripts, tools and the assembly of streams."""

import json
from typing import Any

from tests.support.http.scripted_server import MODEL

__all__ = ["MODEL", "TOOLS", "WEATHER", "say", "user", "write_call"]

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer"}},
        "required": ["city"],
    },
}
TIME = {"name": "get_time", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]
ARGUMENTS: dict[str, Any] = {"city": "Rome", "days": 3}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def say(text: str) -> list[dict[str, Any]]:
    """Messages that the scripted server answers with a text."""
    return user(f"Answer exactly: {text}")


def write_call(name: str, **arguments: Any) -> str:
    """Return a call as the demo model's family writes it."""
    text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{text}\n</tool_call>"


def write_json(value: Any) -> str:
    """Return a structured answer as grammars have it."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
