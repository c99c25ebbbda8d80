"""Decode the arguments of a custom tool's call into the free text of its input.

The model writes `{"input": "..."}`; the text is passed on while it arrives.
"""

import json
import re

from gllm.text.chat.tools import CUSTOM_INPUT_KEY

_PREFIX = re.compile(rf'\s*{{\s*"{CUSTOM_INPUT_KEY}"\s*:\s*"')
"""Text before the input."""
_PREFIX_WITHOUT_SPACE = f'{{"{CUSTOM_INPUT_KEY}":"'
_SPACE = re.compile(r"\s+")
_UNIT = re.compile(
    r'[^"\\]+'
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4}"
    r'|\\["\\/bfnrt]'
)
"""Part of a JSON string that can be decoded by itself."""
_LONE_SURROGATE = re.compile(
    r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r"|\\u[dD][89abAB][0-9a-fA-F]{2}(?=[^\\]|\\[^u]|\\u(?![dD][c-fC-F])[0-9a-fA-F]{4})"
)
"""Half of a surrogate pair without the other half."""


class CustomToolInputDecoder:
    """Incremental decoder of one call's arguments; arguments of another form pass unchanged."""

    def __init__(self) -> None:
        self._pending = ""
        """Text that cannot be decoded yet."""
        self._state = "prefix"
        """prefix, string, end or verbatim."""

    def push(self, text: str) -> str:
        """Return the input that more text of the arguments adds."""
        self._pending += text
        if self._state == "prefix":
            self._match_prefix()
        if self._state == "verbatim":
            text, self._pending = self._pending, ""
            return text
        return self._decode_string() if self._state == "string" else ""

    def _match_prefix(self) -> None:
        """Leave the state `prefix` once it is known whether the arguments have the usual form."""
        if match := _PREFIX.match(self._pending):
            self._pending = self._pending[match.end() :]
            self._state = "string"
        elif not _PREFIX_WITHOUT_SPACE.startswith(_SPACE.sub("", self._pending)):
            self._state = "verbatim"

    def _decode_string(self) -> str:
        """Return the complete part of the pending string, decoded."""
        pieces: list[str] = []
        position = 0
        while position < len(self._pending):
            if self._pending[position] == '"':
                self._state = "end"
                break
            if match := _UNIT.match(self._pending, position):
                pieces.append(json.loads(f'"{match[0]}"'))
            elif match := _LONE_SURROGATE.match(self._pending, position):
                pieces.append("\ufffd")
            else:
                break
            position = match.end()
        self._pending = self._pending[position:]
        return "".join(pieces)
