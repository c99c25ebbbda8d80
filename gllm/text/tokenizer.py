"""Tokenizer of a model folder: text to token ids and back, based on the tokenizers library."""

import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from gllm.observability.process_memory import trim_memory
from gllm.text.added_tokens import read_tokenizer
from gllm.text.byte_alphabet import BYTE_LEVEL_ALPHABET
from gllm.text.chat.template import ChatTemplate, load_chat_template
from gllm.text.conversion.folder import prepare_tokenizer_folder
from gllm.text.special_tokens import SpecialTokenMarker

MAX_COMPOSED_CHARACTERS = 4
"""Largest number of characters that Unicode composition (NFC) joins into one."""
LOSSLESS_PRE_TOKENIZERS = ("ByteLevel", "Digits", "Metaspace", "Split")
"""Pre-tokenizers that keep every character; Split only if its behavior is not to remove."""


def compute_max_token_characters(backend: tokenizers.Tokenizer) -> int | None:
    """Return an upper bound of the characters of text that a single token can represent.

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
    """Yield the description of a component, or of each member of a sequence, the last first."""
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


BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""Vocabulary entry of a single byte in vocabularies of text."""


class TooManyTokensError(ValueError):
    """A text has more tokens than permitted.

    Args:
        count: Number of tokens.
        is_exact: False if `count` is only a lower bound.
    """

    def __init__(self, count: int, is_exact: bool = True) -> None:
        super().__init__(count, is_exact)
        self.count = count
        self.is_exact = is_exact


class Tokenizer:
    """Tokenizer of a model, with its chat template if there is one."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        # The file may contain truncation and padding of the training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._max_token_characters = compute_max_token_characters(backend)

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """Load the tokenizer of a model folder.

        Args:
            folder: The model folder; a tokenizer in other files than tokenizer.json is converted.
            chat_template: File of a chat template to be used in place of the folder's own.

        Raises:
            FileNotFoundError: The folder has no tokenizer.
            ValueError: A file is invalid or cannot be converted.
        """
        template = None if chat_template is None else Path(chat_template)
        folder = prepare_tokenizer_folder(Path(folder))
        file = folder / "tokenizer.json"
        try:
            backend = read_tokenizer(folder)
        except PermissionError as error:
            raise ValueError(f"{error.filename} cannot be read: permission denied") from error
        except ValueError:
            raise
        except Exception as error:  # the library raises bare Exception
            if file.read_bytes().startswith(b"version https://git-lfs"):
                raise ValueError(
                    f"{file} is a git-lfs pointer and not the file itself: run `git lfs pull`"
                ) from error
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        tokenizer = cls(backend, load_chat_template(folder, template))
        if tokenizer.chat_template is not None:
            # Takes as long as reading the file: not during a request.
            _ = tokenizer.special_token_marker
        # Reading the file has taken twice the memory of its vocabulary.
        trim_memory()
        return tokenizer

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Tokenize a text.

        Releases the GIL, so other threads run meanwhile.

        Args:
            text: The text.
            add_special_tokens: Let the post-processor add its special tokens.
            max_tokens: Largest permitted number of tokens; None for no limit.

        Raises:
            TooManyTokensError: The text has more tokens; a text that is far too long is not
                tokenized.
        """
        self._check_length(text, max_tokens)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding))
        return encoding.ids

    def encode_chat(self, text: str, mark: str, max_tokens: int | None = None) -> list[int]:
        """Tokenize a rendered chat; marked special tokens are ordinary text.

        Args:
            text: The rendered chat.
            mark: The text that `SpecialTokenMarker.mark_values` has put into special tokens; empty
                if there is none.
            max_tokens: Largest permitted number of tokens; None for no limit.

        Raises:
            TooManyTokensError: The chat has more tokens.
        """
        if not mark or not (mark in text or self.special_token_marker.may_arise_from_text):
            return self.encode(text, False, max_tokens)
        self._check_length(text.replace(mark, ""), max_tokens)
        ids = self.special_token_marker.encode_marked(text, mark)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokensError(len(ids))
        return ids

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise TooManyTokensError if a text of this length cannot have so few tokens."""
        if max_tokens is not None and self._max_token_characters is not None:
            min_tokens = -(-len(text) // self._max_token_characters)
            if min_tokens > max_tokens:
                raise TooManyTokensError(min_tokens, is_exact=False)

    @cached_property
    def special_token_marker(self) -> SpecialTokenMarker:
        """Marker of special tokens that are spelled in messages."""
        return SpecialTokenMarker(self._backend)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; ids outside the vocabulary are skipped."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def has_same_tokens(self, other: "Tokenizer") -> bool:
        """Return True if every token has the same id in another tokenizer, added ones included."""
        return self._backend.get_vocab(True) == other._backend.get_vocab(True)

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry of an id, None if there is none."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry, None if there is none."""
        return self._backend.token_to_id(token)

    @cached_property
    def is_byte_level(self) -> bool:
        """True if tokens stand for bytes, so that text is the concatenation of their bytes."""
        return self._decoder_steps == ("ByteLevel",)

    @cached_property
    def has_byte_tokens(self) -> bool:
        """True if tokens stand for bytes, whatever steps follow when they are decoded."""
        return "ByteLevel" in self._decoder_steps

    @cached_property
    def has_byte_fallback(self) -> bool:
        """True if tokens such as `<0x0A>` are decoded as bytes."""
        return "ByteFallback" in self._decoder_steps

    @cached_property
    def _decoder_steps(self) -> tuple[str, ...]:
        """Kinds of the steps that decode tokens."""
        # The decoder alone: JSON of the whole tokenizer would contain the vocabulary.
        return tuple(step["type"] for step in _steps(self._backend.decoder, "decoders"))

    def token_text(self, token_id: int) -> str | None:
        """Return the text of a token, None if its bytes are not whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            return self._texts.setdefault(token_id, text)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token stands for."""
        known = self._bytes.get(token_id)
        if known is None:
            token = (self._backend.id_to_token(token_id) if token_id >= 0 else None) or ""
            to_bytes = _byte_level_bytes if self.has_byte_tokens else _piece_bytes
            known = self._bytes[token_id] = to_bytes(token)
        return known


def _byte_level_bytes(token: str) -> bytes:
    """Return the bytes of a vocabulary entry; added tokens outside the alphabet are plain text."""
    try:
        return bytes(BYTE_LEVEL_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _piece_bytes(token: str) -> bytes:
    """Return the bytes of a vocabulary entry that is text.

    Byte tokens have names; a space may be written as a lower one eighth block.
    """
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
