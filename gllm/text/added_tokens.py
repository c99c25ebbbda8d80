"""Read the tokenizer of a model folder, with the tokens that files beside tokenizer.json add.

Older models have added tokens in tokenizer_config.json (`added_tokens_decoder`), added_tokens.json
and special_tokens_map.json alone. They are added as transformers does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

NAMED_TOKENS = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
]
"""Keys of special tokens that have a name."""
LISTS = ("additional_special_tokens", "extra_special_tokens")
"""Keys of special tokens without a name."""
OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Options of an added token in JSON."""


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """Read tokenizer.json, and add the tokens of the files beside it.

    Raises:
        ValueError: A file is invalid.
        Exception: The library cannot read tokenizer.json.
    """
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = find_added_tokens(folder, backend.get_added_tokens_decoder())
    if tokens:
        backend.add_tokens(tokens)
    return backend


def find_added_tokens(
    folder: Path, present: Mapping[int, tokenizers.AddedToken]
) -> list[tokenizers.AddedToken]:
    """Return the tokens that the files beside tokenizer.json add or change, in order of their ids.

    Args:
        folder: The model folder.
        present: The added tokens of tokenizer.json, by id.

    Raises:
        ValueError: A file is invalid.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    is_complete = isinstance(config.get("added_tokens_decoder"), dict)
    if not is_complete:
        config |= read_json_object(folder / "special_tokens_map.json")
    named = _named_tokens(config)
    if is_complete:
        by_id = {
            int(index): to_token(token)
            for index, token in config["added_tokens_decoder"].items()
            if index.isdecimal() and isinstance(token, dict) and "content" in token
        }
    else:
        by_id = {
            index: tokenizers.AddedToken(text, normalized=text not in named, special=text in named)
            for text, index in read_json_object(folder / "added_tokens.json").items()
            if isinstance(index, int)
        }
        # Those of tokenizer.json have precedence.
        by_id |= present
    known = {_properties(token) for token in present.values()}
    tokens = [token for _, token in sorted(by_id.items()) if _properties(token) not in known]
    texts = {token.content for token in (*present.values(), *tokens)}
    tokens += [token for text, token in named.items() if text not in texts]
    for token in tokens:
        token.special = token.special or token.content in named
    return tokens


def read_description(folder: Path) -> dict[str, Any]:
    """Return the JSON of the tokenizer that `read_tokenizer` reads. Raises ValueError."""
    description = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    present = {token["id"]: to_token(token) for token in description.get("added_tokens") or ()}
    if find_added_tokens(folder, present):
        description = json.loads(read_tokenizer(folder).to_str())
    return dict(description)


def _named_tokens(config: Mapping[str, Any]) -> dict[str, tokenizers.AddedToken]:
    """Return the special tokens of a configuration, by their texts."""
    values = [config.get(name) for name in NAMED_TOKENS]
    for name in LISTS:
        more = config.get(name)
        values += (
            more.values() if isinstance(more, dict) else more if isinstance(more, list) else ()
        )
    tokens = [
        to_token(value, is_special=True)
        for value in values
        if isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    ]
    return {token.content: token for token in tokens if token.content}


def to_token(value: str | dict[str, Any], is_special: bool = False) -> tokenizers.AddedToken:
    """Return a token of a file, which is a text or an object."""
    if isinstance(value, str):
        return tokenizers.AddedToken(value, special=True)
    options = {name: bool(value[name]) for name in OPTIONS if value.get(name) is not None}
    if is_special:
        options["special"] = True
    return tokenizers.AddedToken(str(value["content"]), **options)


def _properties(token: tokenizers.AddedToken) -> tuple[object, ...]:
    """Return all that decides how a token is found in a text."""
    return token.content, *(getattr(token, name) for name in OPTIONS)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file. Raises ValueError."""
    if not file.is_file():
        return {}
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file} does not contain a JSON object")
    return values
