"""Turn the arguments of a custom tool's call back into the free text of its input.

The model writes `{"input": "..."}`; the text is passed on while it arrives.
"""

import json
import re

from gllm.text.chat.tools import CUSTOM_INPUT_KEY

_COMPLETE = re.compile(rf'\s*{{\s*"{CUSTOM_INPUT_KEY}"\s*:\s*"')
_BEGINNING = "".join(("{", f'"{CUSTOM_INPUT_KEY}"', ":", '"'))
_SPACE = re.compile(r"\s+")
_UNIT = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
)
"""A piece of a JSON string that can be decoded by itself."""
_LONE = re.compile(
    r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
)
"""Half of a surrogate pair without the other half."""


class CustomToolInputDecoder:
    """Decodes the arguments of one call. Arguments of another form are passed on as they are."""

    def __init__(self) -> None:
        self._rest = ""
        """Text that cannot be decoded yet."""
        self._state = "beginning"

    def push(self, text: str) -> str:
        """Return the input that more of the arguments adds."""
        self._rest += text
        if self._state == "beginning":
            self._begin()
        if self._state == "verbatim":
            text, self._rest = self._rest, ""
            return text
        return self._decoded() if self._state == "string" else ""

    def _begin(self) -> None:
        """Find out whether the arguments have the expected form."""
        if found := _COMPLETE.match(self._rest):
            self._rest = self._rest[found.end() :]
            self._state = "string"
        elif not _BEGINNING.startswith(_SPACE.sub("", self._rest)):
            self._state = "verbatim"

    def _decoded(self) -> str:
        """Take all of the string that is complete."""
        pieces: list[str] = []
        at = 0
        while at < len(self._rest):
            if self._rest[at] == '"':
                self._state = "end"
                break
            if found := _UNIT.match(self._rest, at):
                pieces.append(json.loads(f'"{found[0]}"'))
            elif found := _LONE.match(self._rest, at):
                pieces.append("\ufffd")
            else:
                break
            at = found.end()
        self._rest = self._rest[at:]
        return "".join(pieces)
