"""Text to token ids and back, as a model folder's tokenizer.json says.

Owns what the frontend and the engine need of the tokenizers library. Knows nothing of requests.
"""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from gllm.text.chat.template import ChatTemplate, load_chat_template
from gllm.text.special_tokens import SpecialTokens
from gllm.text.token_length import max_token_characters

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
"""How vocabularies of text write a single byte."""


class TooManyTokensError(ValueError):
    """A text has more tokens than are allowed: at least `count` if that is not exact."""

    def __init__(self, count: int, is_exact: bool = True) -> None:
        super().__init__(count, is_exact)
        self.count = count
        self.is_exact = is_exact


class Tokenizer:
    """A tokenizer and, where the model has one, its chat template."""

    def __init__(
        self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None
    ) -> None:
        # A folder may carry the truncation and padding of its training run.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str | None] = {}
        self.chat_template = chat_template
        self.vocab_size: int = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)
        self._longest = max_token_characters(backend)

    @classmethod
    def load(cls, folder: str | Path, chat_template: str | None = None) -> "Tokenizer":
        """The tokenizer of a model folder; `chat_template` is a file in place of the folder's own.

        Raises FileNotFoundError without a tokenizer.json, ValueError where a file is broken.
        """
        template = None if chat_template is None else Path(chat_template)
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise FileNotFoundError(
                f"{folder} has no tokenizer.json: save one with the model, for instance by "
                "save_pretrained of a fast tokenizer of transformers"
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            if file.read_bytes().startswith(b"version https://git-lfs"):
                raise ValueError(
                    f"{file} is a git-lfs pointer and not the file itself: run `git lfs pull`"
                ) from error
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        tokenizer = cls(backend, load_chat_template(Path(folder), template))
        if tokenizer.chat_template is not None:
            # Made now, for it takes as long as reading the file.
            _ = tokenizer.special_tokens
        return tokenizer

    def encode(
        self, text: str, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids; the tokenizer's post-processor adds its special tokens unless told not to.

        In a thread it lets others run: the calls for batches hold no lock of Python's. Raises
        TooManyTokens if there are more than `max_tokens`, before tokenizing where the text's length
        shows it.
        """
        self._check_length(text, max_tokens)
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TooManyTokensError(len(encoding))
        return encoding.ids

    def encode_chat(self, text: str, mark: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a rendered chat; special tokens with a mark inside are ordinary text.

        Raises TooManyTokens.
        """
        if not mark or not (mark in text or self.special_tokens.are_normalized):
            return self.encode(text, False, max_tokens)
        self._check_length(text.replace(mark, ""), max_tokens)
        ids = self.special_tokens.encode(text, mark)
        if max_tokens is not None and len(ids) > max_tokens:
            raise TooManyTokensError(len(ids))
        return ids

    def _check_length(self, text: str, max_tokens: int | None) -> None:
        """Raise TooManyTokens if no text of this length has so few tokens."""
        if max_tokens is not None and self._longest is not None:
            fewest = -(-len(text) // self._longest)
            if fewest > max_tokens:
                raise TooManyTokensError(fewest, is_exact=False)

    @cached_property
    def special_tokens(self) -> SpecialTokens:
        """The special tokens as text may spell them."""
        return SpecialTokens(self._backend)

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that are none are skipped."""
        (text,) = self._backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's entry for an id, None where there is none."""
        return self._backend.id_to_token(token_id) if token_id >= 0 else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary's entry, None where there is none."""
        return self._backend.token_to_id(token)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens stand for bytes, so that text is the concatenation of theirs."""
        # As it would be pickled: all of the tokenizer in JSON would take its vocabulary along.
        state = None if self._backend.decoder is None else self._backend.decoder.__getstate__()
        decoder: dict[str, Any] | None = None if state is None else json.loads(state)
        while decoder and decoder["type"] == "Sequence" and len(decoder["decoders"]) == 1:
            decoder = decoder["decoders"][0]
        return decoder is not None and decoder["type"] == "ByteLevel"

    def token_text(self, token_id: int) -> str | None:
        """What a token stands for within a text, None where that is no whole characters."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                text = None
            return self._texts.setdefault(token_id, text)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token stands for within a text."""
        found = self._bytes.get(token_id)
        if found is None:
            token = self.id_to_token(token_id) or ""
            bytes_of = _bytes_of if self.is_byte_level else _bytes_of_piece
            found = self._bytes[token_id] = bytes_of(token)
        return found


def _byte_alphabet() -> dict[str, int]:
    """The printable character that stands for each byte in a byte-level vocabulary.

    Bytes that print stand for themselves; the others take the code points from 256 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    """Bytes of a vocabulary entry; added tokens outside the alphabet are plain text."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _bytes_of_piece(token: str) -> bytes:
    """Bytes of a vocabulary entry that is text: byte tokens are named, spaces may be written as a
    lower one eighth block."""
    if BYTE_TOKEN.fullmatch(token):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()
