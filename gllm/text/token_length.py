"""How long the text of one token can be.

Owns the reading of a tokenizer's parts that decides it: a text too long for a context is refused by
its characters alone, before it is tokenized.
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

COMPOSED = 4
"""Characters that composition (NFC) may make one of, at most."""
KEEPING = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that keep every character, Split unless its behavior is to remove."""


def max_token_characters(backend: tokenizers.Tokenizer) -> int | None:
    """Return the most characters of a text that one token stands for.

    None where there is no such bound: unknown characters may be dropped or merged, white space may
    vanish.
    """
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    normalizers = list(_parts(backend.normalizer, "normalizers"))
    splitters = list(_parts(backend.pre_tokenizer, "pretokenizers"))
    if not all(_keeps(one) for one in (*normalizers, *splitters)):
        return None
    if any(one.lstrip or one.rstrip for one in backend.get_added_tokens_decoder().values()):
        return None
    vocabulary = backend.get_vocab()
    if any(one["type"] == "ByteLevel" for one in splitters):
        bytes_ = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(byte in vocabulary for byte in bytes_):
        return None
    composed = COMPOSED if any(one["type"] == "NFC" for one in normalizers) else 1
    return composed * max(map(len, vocabulary))


def _parts(part: Any, members: str) -> Iterator[dict[str, Any]]:
    """The description of a normalizer or a pre-tokenizer, those within a sequence one by one."""
    unseen = [] if part is None else [json.loads(part.__getstate__())]
    while unseen:
        one = unseen.pop()
        if one["type"] == "Sequence":
            unseen += one[members]
        else:
            yield one


def _keeps(part: dict[str, Any]) -> bool:
    """Whether no character is lost, and none made one of several but by composition."""
    match part["type"]:
        case "Split":
            return bool(part["behavior"] != "Removed")
        case "Replace":
            return bool(part["pattern"] == {"String": " "} and part["content"])
        case kind:
            return kind in (*KEEPING, "NFC", "Prepend")
