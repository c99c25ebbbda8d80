"""The end-of-sequence token of a model folder's tokenizer, from its files' JSON."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SPACE = re.compile(r"[ \t\n\r]*")


def find_eos_id(folder: Path) -> int | None:
    """Return the id of the tokenizer's eos_token; None if it has none or no id.

    A file that cannot be read counts as missing here: loading the tokenizer reports it.
    """
    config = _read_object(folder / "tokenizer_config.json")
    by_id = config.get("added_tokens_decoder")
    # As transformers: the older file has precedence over a configuration without this key.
    named = config if isinstance(by_id, dict) else config | _special_tokens_map(folder)
    name = _content(named.get("eos_token"))
    if not isinstance(name, str):
        return None
    if isinstance(by_id, dict):
        ids = [key for key, token in by_id.items() if _content(token) == name and key.isdecimal()]
        if ids:
            return int(ids[0])
    token_id = _read_object(folder / "added_tokens.json").get(name)
    return token_id if type(token_id) is int else _find_in_tokenizer(folder, name)


def _find_in_tokenizer(folder: Path, name: str) -> int | None:
    """Return the id of a token in tokenizer.json.

    Every worker reads the file at its start. Its last part, the vocabulary, is by far the largest,
    and is decoded only if no part before it has the token.
    """
    model: object = None
    try:
        text = (folder / "tokenizer.json").read_text(encoding="utf-8")
        for key, value in _iterate_members(text):
            if key == "added_tokens":
                for token in value if isinstance(value, list) else []:
                    if _content(token) == name and type(token.get("id")) is int:
                        return int(token["id"])
            elif key == "model":
                model = value
    except (OSError, ValueError):
        return None
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, list):
        pieces = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
        return next((index for index, piece in enumerate(pieces) if piece == name), None)
    token_id = vocabulary.get(name) if isinstance(vocabulary, dict) else None
    return token_id if type(token_id) is int else None


def _iterate_members(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the members of a JSON object; those behind the last one that is taken stay undecoded.

    Raises:
        ValueError: the text is no JSON object.
    """
    decoder = json.JSONDecoder()

    def expect(position: int, characters: str) -> int:
        """Return the position after one of the characters and white space around it."""
        position = _skip_space(text, position)
        if position >= len(text) or text[position] not in characters:
            raise ValueError(f"one of {characters!r} is expected at character {position}")
        return _skip_space(text, position + 1)

    position = expect(0, "{")
    while text[position : position + 1] != "}":
        key, position = decoder.raw_decode(text, position)
        value, position = decoder.raw_decode(text, expect(position, ":"))
        yield key, value
        position = _skip_space(text, position)
        if text[position : position + 1] != "}":
            position = expect(position, ",")


def _skip_space(text: str, position: int) -> int:
    """Return the position of the next character that is no white space of JSON."""
    match = _SPACE.match(text, position)
    assert match is not None, "it matches nothing too"
    return match.end()


def _special_tokens_map(folder: Path) -> dict[str, Any]:
    return _read_object(folder / "special_tokens_map.json")


def _content(token: object) -> object:
    """Return the text of a token, which files have as a text or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
