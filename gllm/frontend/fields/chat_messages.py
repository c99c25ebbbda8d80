"""Chat messages made of what other APIs call items and blocks.

Owns the building of messages, and the reading of what is nested. Knows nothing of any one API.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

from gllm.config.field_types import FieldError

Json = dict[str, Any]


class Turns:
    """Chat messages, put together turn by turn.

    joins: whether what a user says in a row is one message.
    """

    def __init__(self, joins: bool = False) -> None:
        self.messages: list[Json] = []
        self._joins = joins

    def say(self, role: str, text: str) -> None:
        """A message of its own. What a chat begins with for the system is one message: that is all
        that chat templates have a place for."""
        systems = ("system", "developer")
        last = self.messages[-1] if self.messages else {"role": ""}
        if role in systems and last["role"] in systems and len(self.messages) == 1:
            last["content"] += "\n\n" + text
        elif role == last["role"] == "user" and self._joins:
            last["content"] += "\n" + text
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        """What the assistant thought: goes with what it says or calls next."""
        message = self._assistant("reasoning_content", "content", "tool_calls")
        message["reasoning_content"] = text

    def answer(self, text: str) -> None:
        """What the assistant said."""
        self._assistant("content", "tool_calls")["content"] = text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        """A tool that the assistant called; `arguments` are the text of a JSON object."""
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._assistant().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        """What a call brought."""
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def _assistant(self, *taken: str) -> Json:
        """The assistant's message at the end, or a new one where that has one of these already."""
        last = self.messages[-1] if self.messages else {"role": ""}
        if last["role"] != "assistant" or any(last.get(name) for name in taken):
            last = {"role": "assistant", "content": ""}
            self.messages.append(last)
        return last


def refuse(where: str, why: str) -> NoReturn:
    """Raises FieldError; `where` is a path that begins with a field: input[3].content[0]."""
    raise FieldError(where.partition("[")[0].partition(".")[0], f"{where} {why}")


def listed(value: object, where: str) -> list[Json]:
    """A list of objects. Raises FieldError."""
    if not isinstance(value, list) or not all(isinstance(one, dict) for one in value):
        refuse(where, "has to be a list of objects")
    return value


def string(values: Json, name: str, where: str) -> str:
    """A string that has to be there. Raises FieldError."""
    value = values.get(name)
    if not isinstance(value, str):
        refuse(where, f"has to have a {name} that is a string")
    return value


def text_of(content: object, where: str, kinds: Sequence[str]) -> str:
    """A string, or the text of parts of these types, one per line. Raises FieldError."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        refuse(where, "has to be a string or a list of parts")
    texts = []
    for i, part in enumerate(listed(content, where)):
        here = f"{where}[{i}]"
        if part.get("type") not in kinds:
            unknown_type(part, here, kinds)
        texts.append(string(part, "text", here))
    return "\n".join(texts)


def unknown_type(value: Json, where: str, known: Sequence[str]) -> NoReturn:
    """Raises FieldError for an object of a type that is not done here."""
    kind = value.get("type")
    if isinstance(kind, str):
        refuse(where, f"is of type {kind!r}, which is not done here: only {', '.join(known)}")
    refuse(where, f"has to have a type of {', '.join(known)}")
