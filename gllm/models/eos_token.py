"""The end-of-sequence token of a model folder's tokenizer, from its files' JSON."""

import json
from pathlib import Path
from typing import Any

import msgspec


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


class _TokenizerFile(msgspec.Struct):
    """The keys of tokenizer.json that name tokens."""

    added_tokens: Any = None
    model: msgspec.Raw = msgspec.Raw(b"null")
    """Has the vocabulary: most of the file, and mostly not needed."""


def _find_in_tokenizer(folder: Path, name: str) -> int | None:
    """Return the id of a token in tokenizer.json."""
    added, encoded_model = _read_tokenizer(folder / "tokenizer.json")
    for token in added if isinstance(added, list) else []:
        if _content(token) == name and type(token.get("id")) is int:
            return int(token["id"])
    vocabulary = _decode_object(encoded_model).get("vocab")
    if isinstance(vocabulary, list):
        pieces = (entry[0] if isinstance(entry, list) and entry else None for entry in vocabulary)
        return next((index for index, piece in enumerate(pieces) if piece == name), None)
    token_id = vocabulary.get(name) if isinstance(vocabulary, dict) else None
    return token_id if type(token_id) is int else None


def _read_tokenizer(path: Path) -> tuple[Any, bytes]:
    """Return the added tokens, and the JSON of the model, of a tokenizer.json.

    Every worker reads the file at its start, and decoding all of a large vocabulary takes longer
    than anything else that it reads before the weights.
    """
    try:
        file = msgspec.json.decode(path.read_bytes(), type=_TokenizerFile)
    except (OSError, msgspec.DecodeError):
        # The standard library accepts more, such as surrogates without their other half.
        tokenizer = _read_object(path)
        return tokenizer.get("added_tokens"), json.dumps(tokenizer.get("model")).encode()
    return file.added_tokens, bytes(file.model)


def _special_tokens_map(folder: Path) -> dict[str, Any]:
    return _read_object(folder / "special_tokens_map.json")


def _content(token: object) -> object:
    """Return the text of a token, which files have as a text or as an object."""
    return token.get("content") if isinstance(token, dict) else token


def _read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is none."""
    try:
        return _decode_object(path.read_bytes())
    except OSError:
        return {}


def _decode_object(encoded: bytes) -> dict[str, Any]:
    """Return the JSON object in UTF-8; empty if there is none."""
    try:
        value = json.loads(encoded.decode())
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
