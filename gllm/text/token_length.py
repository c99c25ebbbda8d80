"""Compute the largest number of characters that one token of a tokenizer can stand for.

With this bound a text too long for a context is rejected by its length, before it is tokenized.
"""

import json
from collections.abc import Iterator
from typing import Any

import tokenizers

MAX_COMPOSED_CHARACTERS = 4
"""Largest number of characters that Unicode composition (NFC) joins into one."""
LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that keep every character; Split only if its behavior is not to remove."""


def compute_max_token_characters(backend: tokenizers.Tokenizer) -> int | None:
    """Return the largest number of characters of a text that one token stands for.

    Returns:
        None if there is no bound, because unknown characters may be dropped or merged, or
        whitespace may be removed.
    """
    if not isinstance(backend.model, tokenizers.models.BPE):
        return None
    normalizers = list(_steps(backend.normalizer, "normalizers"))
    pre_tokenizers = list(_steps(backend.pre_tokenizer, "pretokenizers"))
    if not all(_is_lossless(step) for step in (*normalizers, *pre_tokenizers)):
        return None
    if any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values()):
        return None
    vocabulary = backend.get_vocab()
    if any(step["type"] == "ByteLevel" for step in pre_tokenizers):
        byte_tokens = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    elif backend.model.byte_fallback:
        byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        return None
    if not all(token in vocabulary for token in byte_tokens):
        return None
    composes = any(step["type"] == "NFC" for step in normalizers)
    return (MAX_COMPOSED_CHARACTERS if composes else 1) * max(map(len, vocabulary))


def _steps(component: Any, members_key: str) -> Iterator[dict[str, Any]]:
    """Yield the description of a normalizer or pre-tokenizer, or of each member of a sequence."""
    pending = [] if component is None else [json.loads(component.__getstate__())]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending += step[members_key]
        else:
            yield step


def _is_lossless(step: dict[str, Any]) -> bool:
    """Return whether a step keeps all characters and joins none except by composition."""
    match step["type"]:
        case "Split":
            return bool(step["behavior"] != "Removed")
        case "Replace":
            return bool(step["pattern"] == {"String": " "} and step["content"])
        case kind:
            return kind in (*LOSSLESS_PRE_TOKENIZERS, "NFC", "Prepend")
