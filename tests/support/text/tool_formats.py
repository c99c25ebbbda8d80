"""Tool calls as the models of each family write them: a row for each.

Owns the formats, written the other way round than the parsers read them.
"""

import json
from typing import Any

Calls = list[tuple[str, dict[str, Any]]]


def _json(value: Any) -> str:
    """As templates write it."""
    return json.dumps(value, ensure_ascii=False)


def _tagged(value: Any) -> str:
    """A value as templates write it between tags: strings as they are."""
    return value if isinstance(value, str) else _json(value)


def hermes(calls: Calls) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return "\n".join(f"<tool_call>\n{_json(one)}\n</tool_call>" for one in objects)


def qwen3_coder(calls: Calls) -> str:
    texts = []
    for name, arguments in calls:
        pairs = [(key, _tagged(value)) for key, value in arguments.items()]
        inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in pairs)
        texts.append(f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>")
    return "\n".join(texts)


def glm45(calls: Calls, space: str = "\n") -> str:
    texts = []
    for name, arguments in calls:
        pairs = [(key, _tagged(value)) for key, value in arguments.items()]
        inner = "".join(
            f"<arg_key>{key}</arg_key>{space}<arg_value>{value}</arg_value>{space}"
            for key, value in pairs
        )
        texts.append(f"<tool_call>{name}{space}{inner}</tool_call>")
    return space.join(texts)


def glm47(calls: Calls) -> str:
    """Without line ends."""
    return glm45(calls, "")


def glm4(calls: Calls) -> str:
    return "\n".join(f"{name}\n{_json(arguments)}" for name, arguments in calls)


def llama3(calls: Calls) -> str:
    objects = [{"name": name, "parameters": arguments} for name, arguments in calls]
    return "; ".join(map(_json, objects))


def llama3_tag(calls: Calls) -> str:
    return "<|python_tag|>" + llama3(calls)


def mistral(calls: Calls) -> str:
    objects = [{"name": name, "arguments": arguments} for name, arguments in calls]
    return f"[TOOL_CALLS]{_json(objects)}"


def mistral_named(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(values)}" for name, values in calls)


def deepseek(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
        "<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(texts) + "<｜tool▁calls▁end｜>"


def deepseek31(calls: Calls) -> str:
    texts = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"
        for name, arguments in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "".join(texts) + "<｜tool▁calls▁end｜>"


FORMATS = [
    ("hermes", hermes),
    ("qwen3_coder", qwen3_coder),
    ("glm45", glm45),
    ("glm45", glm47),
    ("glm4", glm4),
    ("llama3", llama3),
    ("llama3", llama3_tag),
    ("mistral", mistral),
    ("mistral", mistral_named),
    ("deepseek", deepseek),
    ("deepseek", deepseek31),
]
"""A parser's name, and what writes calls for it."""

BEFORE = "Let me see."
"""Content that may come before calls."""
FIRST_ONLY = {"llama3"}
"""Formats in which nothing may come before them."""
