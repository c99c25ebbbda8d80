"""Tokenizer of a GGUF file, as the files that the tokenizers library and chat templates read.

A file has the vocabulary, the type of each token, merges or scores, and the name of the split into
words. Each kind of tokenizer has one builder in BUILDERS.

Source: ggml's docs/gguf.md for the keys; Kudo and Richardson, "SentencePiece" (2018) for scores.
"""

import base64
from collections.abc import Callable, Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_metadata import REMEDY, GgufMetadata
from gllm.models.formats.gguf_pre_tokenizers import (
    ADD_BOS,
    ALIASES,
    IGNORE_MERGES,
    PRE_TOKENIZERS,
)

PREFIX = "tokenizer.ggml."
"""Beginning of the keys of the tokenizer."""
SPACE = "▁"
"""Character that stands for a space in vocabularies of text."""
MAX_CHARACTERS = 1024
"""Longest token of a tokenizer by scores, in characters; known ones have 512 spaces at most."""
MAX_WORD = 100
"""Longest word of WordPiece, in characters, as in BERT; longer ones become the unknown token."""
MAX_TOKEN_ID = 2**31 - 1
"""Ids above count as unset: converters write -1 as an unsigned number."""


class TokenType(IntEnum):
    """Type of a token in `tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


ADDED_TYPES = (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
"""Types of tokens that are found in a text before it is split into words."""
NAMED_TOKENS = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
    "cls_token": "cls_token_id",
    "mask_token": "mask_token_id",
}
"""Names of tokenizer_config.json to keys of the file, one of which the format misspells."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end an answer."""
END_TEXTS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<EOT>",
    "<｜end▁of▁sentence｜>",
)
"""Control tokens that end an answer in whatever model has them: many files lack their keys."""
HARMONY_END_TEXTS = ("<|return|>", "<|call|>", "<|endoftext|>")
"""Instead of these, in models that have all of them: gpt-oss, whose <|end|> ends a message of
several in an answer."""


def build_tokenizer(metadata: GgufMetadata, architecture: str) -> dict[str, Any]:
    """Return the content of tokenizer.json.

    Args:
        metadata: the file's metadata.
        architecture: the file's architecture; Phi-3's control tokens take the spaces behind them.

    Raises:
        ModelError: a key is missing or invalid, or the tokenizer is not implemented.
    """
    kind = metadata.text(f"{PREFIX}model")
    if kind not in BUILDERS:
        raise ModelError(
            f"{metadata.path}: {PREFIX}model {kind!r:.80} is not implemented, only "
            f"{', '.join(BUILDERS)} are: use another model"
        )
    vocabulary = Vocabulary(metadata)
    strips_right = architecture == "phi3" and kind == "llama"
    parts = BUILDERS[kind](vocabulary)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": vocabulary.added_tokens(strips_right),
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": vocabulary.post_processor(),
        **parts,
    }


def build_tokenizer_config(metadata: GgufMetadata) -> dict[str, Any]:
    """Return the content of tokenizer_config.json: named tokens and the chat templates."""
    vocabulary = Vocabulary(metadata)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for name, key in NAMED_TOKENS.items():
        token_id = vocabulary.token_id(key)
        if token_id is not None:
            config[name] = vocabulary.tokens[token_id]
    templates = {"default": metadata.get("tokenizer.chat_template")}
    prefix = "tokenizer.chat_template."
    templates |= {key[len(prefix) :]: metadata.get(key) for key in metadata.keys(prefix)}
    templates = {name: text for name, text in templates.items() if isinstance(text, str) and text}
    if list(templates) == ["default"]:
        config["chat_template"] = templates["default"]
    elif templates:
        config["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items()
        ]
    return config


def find_end_ids(metadata: GgufMetadata) -> list[int]:
    """Return the ids of the tokens that end an answer, the end of the sequence first."""
    vocabulary = Vocabulary(metadata)
    ids = [vocabulary.token_id(key) for key in END_KEYS]
    is_harmony = all(text in vocabulary.ids for text in HARMONY_END_TEXTS)
    ids += [
        vocabulary.ids[text]
        for text in (HARMONY_END_TEXTS if is_harmony else END_TEXTS)
        if text in vocabulary.ids
        and vocabulary.types[vocabulary.ids[text]] in (TokenType.CONTROL, TokenType.USER_DEFINED)
    ]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


class Vocabulary:
    """Tokens of a file with their types. Raises ModelError for lists that do not fit."""

    def __init__(self, metadata: GgufMetadata) -> None:
        self.metadata = metadata
        self.tokens = [
            token or f"[EMPTY_{index}]"
            for index, token in enumerate(metadata.texts(f"{PREFIX}tokens"))
        ]
        self.ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self.ids) != len(self.tokens):
            index = next(i for i, token in enumerate(self.tokens) if self.ids[token] != i)
            raise ModelError(
                f"{metadata.path}: {PREFIX}tokens has {self.tokens[index]!r:.80} twice, as {index} "
                f"and {self.ids[self.tokens[index]]}: {REMEDY}"
            )
        count = len(self.tokens)
        has_types = metadata.get(f"{PREFIX}token_type") is not None
        types = metadata.numbers(f"{PREFIX}token_type", count) if has_types else []
        self.types = [int(kind) for kind in types] or [int(TokenType.NORMAL)] * count

    def token_id(self, name: str) -> int | None:
        """Return the id that a key names; None if it is unset or outside the vocabulary."""
        value = self.metadata.get(PREFIX + name)
        if value is None:
            return None
        token_id = self.metadata.integer(PREFIX + name)
        if 0 <= token_id < len(self.tokens):
            return token_id
        if 0 <= token_id <= MAX_TOKEN_ID:
            count = len(self.tokens)
            text = f"is {token_id}, but the vocabulary has {count} tokens: the key is ignored"
            self.metadata.warn(PREFIX + name, text)
        return None

    def added_tokens(self, strips_right: bool) -> list[dict[str, Any]]:
        """Return the entries of `added_tokens` in tokenizer.json, in the order of their ids.

        The tokenizer finds these tokens before it splits the text.

        Args:
            strips_right: True if control tokens also match the spaces behind them (`rstrip`).
        """
        keeps = ("<unk>", "<s>", "<|endoftext|>")
        return [
            {
                "id": index,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": strips_right and token not in keeps,
                "normalized": False,
                "special": kind != TokenType.USER_DEFINED,
            }
            for index, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in ADDED_TYPES
        ]

    def split_name(self) -> str:
        """Return the name of the split into words, "default" with a warning if there is none."""
        name = self.metadata.text(f"{PREFIX}pre", "")
        if not name:
            self.metadata.warn(
                f"{PREFIX}pre",
                "is missing, as in files from before May 2024: texts are split into words by "
                "llama.cpp's default, and may become other tokens than the model was trained "
                f"with; {REMEDY}",
            )
        return name or "default"

    def scores(self) -> list[float]:
        """Return the score of each token."""
        return self.metadata.numbers(f"{PREFIX}scores", len(self.tokens))

    def merges(self) -> list[list[str]]:
        """Return the pairs that are merged, in order. Raises ModelError for unknown tokens."""
        pairs = []
        for merge in self.metadata.texts(f"{PREFIX}merges"):
            # A part may begin with a space, which ends it nowhere else.
            end = merge.find(" ", 1)
            left, right = merge[:end], merge[end + 1 :]
            if end < 0 or not {left, right, left + right} <= self.ids.keys():
                raise ModelError(
                    f"{self.metadata.path}: {PREFIX}merges has {merge!r:.80}, of which the "
                    f"vocabulary lacks a part: {REMEDY}"
                )
            pairs.append([left, right])
        return pairs

    def post_processor(self) -> dict[str, Any] | None:
        """Return what adds bos_token and eos_token to a text; None if nothing does.

        BERT's are cls_token and sep_token.
        """
        kind = self.metadata.text(f"{PREFIX}model")
        pre = self.metadata.text(f"{PREFIX}pre", "")
        begins = kind in ("llama", "gemma4", "bert") or (kind == "gpt2" and pre in ADD_BOS)
        begins = self.metadata.boolean(f"{PREFIX}add_bos_token", begins)
        ends = self.metadata.boolean(f"{PREFIX}add_eos_token", kind in ("t5", "bert"))
        bos_key, eos_key = (
            ("cls_token_id", "seperator_token_id")
            if kind == "bert"
            else ("bos_token_id", "eos_token_id")
        )
        bos_id = self.token_id(bos_key) if begins else None
        eos_id = self.token_id(eos_key) if ends else None
        ids = [token_id for token_id in (bos_id, eos_id) if token_id is not None]
        if not ids:
            return None

        def sequence(name: str) -> list[dict[str, Any]]:
            text = [{"Sequence": {"id": name, "type_id": 0}}]
            before, after = (
                [{"SpecialToken": {"id": self.tokens[token_id], "type_id": 0}}]
                if token_id is not None
                else []
                for token_id in (bos_id, eos_id)
            )
            return [*before, *text, *after]

        return {
            "type": "TemplateProcessing",
            "single": sequence("A"),
            "pair": sequence("A") + sequence("B"),
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]}
                for i in ids
            },
        }


def _build_byte_level(vocabulary: Vocabulary) -> dict[str, Any]:
    """Build byte-pair encoding of bytes, each written as a printable character."""
    pre = vocabulary.split_name()
    name = ALIASES.get(pre, pre)
    if name not in PRE_TOKENIZERS:
        known = ", ".join(sorted({*PRE_TOKENIZERS, *ALIASES}))
        raise ModelError(
            f"{vocabulary.metadata.path}: {PREFIX}pre {pre!r:.80} is not implemented, only these "
            f"are: {known}"
        )
    splits = [
        {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
        for regex in PRE_TOKENIZERS[name]
    ]
    byte_level = {"type": "ByteLevel", "trim_offsets": True}
    to_bytes = {**byte_level, "add_prefix_space": False, "use_regex": False}
    return {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, to_bytes]},
        "decoder": {**byte_level, "add_prefix_space": True, "use_regex": True},
        "model": _byte_pair_model(
            vocabulary, vocabulary.merges(), ignore_merges=pre in IGNORE_MERGES
        ),
    }


def _build_text(vocabulary: Vocabulary) -> dict[str, Any]:
    """Build byte-pair encoding of texts with merges, whose unknown characters become bytes."""
    split = {"type": "Split", "pattern": {"Regex": r"\n+"}, "behavior": "Isolated"}
    return {
        "pre_tokenizer": {**split, "invert": False},
        **_with_spaces(has_prefix=False),
        "model": _byte_pair_model(vocabulary, vocabulary.merges(), has_bytes=True),
    }


def _build_scored(vocabulary: Vocabulary) -> dict[str, Any]:
    """Build byte-pair encoding by scores, as SentencePiece does it."""
    has_prefix = vocabulary.metadata.boolean(f"{PREFIX}add_space_prefix", True)
    return {
        **_with_spaces(has_prefix),
        "model": _byte_pair_model(vocabulary, _merges_by_score(vocabulary), has_bytes=True),
    }


def _merges_by_score(vocabulary: Vocabulary) -> list[list[str]]:
    """Return every way to join two tokens to one, the token with the highest score first."""
    ids, scores = vocabulary.ids, vocabulary.scores()
    mergeable = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)
    merges: list[tuple[float, int, int, str, str]] = []
    for index, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind not in mergeable:
            continue
        if len(token) > MAX_CHARACTERS:
            raise ModelError(
                f"{vocabulary.metadata.path}: token {index} in {PREFIX}tokens has {len(token)} "
                f"characters, but may have {MAX_CHARACTERS}: {REMEDY}"
            )
        for end in range(1, len(token)):
            left, right = ids.get(token[:end]), ids.get(token[end:])
            if left is not None and right is not None:
                merges.append((-scores[index], left, right, token[:end], token[end:]))
    merges.sort()
    return [[left, right] for *_, left, right in merges]


def _build_unigram(vocabulary: Vocabulary) -> dict[str, Any]:
    """Build the unigram model: the most probable division of a text into tokens."""
    metadata, spaces = vocabulary.metadata, {"type": "Metaspace", "replacement": SPACE}
    normalizers: list[dict[str, Any]] = []
    charsmap = metadata.get(f"{PREFIX}precompiled_charsmap")
    if charsmap:
        count = len(charsmap) if isinstance(charsmap, list) else 0
        octets = bytes(int(item) & 0xFF for item in metadata.numbers(_CHARSMAP, count))
        normalizers.append(
            {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(octets).decode()}
        )
    if metadata.boolean(f"{PREFIX}remove_extra_whitespaces", False):
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    has_prefix = metadata.boolean(f"{PREFIX}add_space_prefix", True)
    scheme = {"prepend_scheme": "always" if has_prefix else "never", "split": True}
    has_bytes = any(kind == TokenType.BYTE for kind in vocabulary.types)
    pieces = [list(pair) for pair in zip(vocabulary.tokens, vocabulary.scores(), strict=True)]
    return {
        "normalizer": {"type": "Sequence", "normalizers": normalizers} if normalizers else None,
        "pre_tokenizer": {**spaces, **scheme},
        "decoder": {**spaces, **scheme},
        "model": {
            "type": "Unigram",
            "unk_id": vocabulary.token_id("unknown_token_id"),
            "vocab": pieces,
            "byte_fallback": has_bytes,
        },
    }


def _build_word_piece(vocabulary: Vocabulary) -> dict[str, Any]:
    """Build WordPiece: at each place of a word the longest token, the first one with SPACE.

    Source: Devlin et al., "BERT" (2019). Its files mark the tokens that continue a word, GGUF
    those that begin one.
    """
    metadata = vocabulary.metadata
    lowercase = metadata.boolean(f"{PREFIX}normalizer.lowercase", True)
    unknown = vocabulary.token_id("unknown_token_id")
    if unknown is None:
        raise ModelError(f"{metadata.path}: lacks the key '{PREFIX}unknown_token_id': {REMEDY}")
    spaces = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "always", "split": True}
    return {
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": metadata.boolean(f"{PREFIX}normalizer.strip_accents", lowercase),
            "lowercase": lowercase,
        },
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "BertPreTokenizer"}, spaces],
        },
        "decoder": spaces,
        "model": {
            "type": "WordPiece",
            "unk_token": vocabulary.tokens[unknown],
            "continuing_subword_prefix": "",
            "max_input_chars_per_word": len(SPACE) + MAX_WORD,
            "vocab": vocabulary.ids,
        },
    }


_CHARSMAP = f"{PREFIX}precompiled_charsmap"
"""Key of the table by which SentencePiece normalizes characters."""


def _with_spaces(has_prefix: bool) -> dict[str, Any]:
    """Return the normalizer and decoder of vocabularies in which spaces are visible.

    Args:
        has_prefix: every part of a text that follows a control token begins with a space.
    """
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    undo = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    prepend = [{"type": "Prepend", "prepend": SPACE}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    steps = [undo, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prepend, replace]},
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def _byte_pair_model(
    vocabulary: Vocabulary,
    merges: list[list[str]],
    ignore_merges: bool = False,
    has_bytes: bool = False,
) -> dict[str, Any]:
    """Return the model of byte-pair encoding.

    Args:
        vocabulary: the tokens.
        merges: the pairs that are merged, in order.
        ignore_merges: a word that is a token is not divided.
        has_bytes: characters without a token become the tokens of their bytes.
    """
    unknown = vocabulary.token_id("unknown_token_id") if has_bytes else None
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None if unknown is None else vocabulary.tokens[unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": has_bytes,
        "byte_fallback": has_bytes,
        "ignore_merges": ignore_merges,
        "vocab": vocabulary.ids,
        "merges": merges,
    }


BUILDERS: Mapping[str, Callable[[Vocabulary], dict[str, Any]]] = MappingProxyType(
    {
        "gpt2": _build_byte_level,
        "llama": _build_scored,
        "t5": _build_unigram,
        "gemma4": _build_text,
        "bert": _build_word_piece,
    }
)
"""Builders of the normalizer, the split, the model and the decoder, by `tokenizer.ggml.model`."""
