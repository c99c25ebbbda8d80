"""Incremental detokenization: convert the tokens of one choice into text while they arrive.

Each token costs the same, however long the output is. The pieces join to the text that all tokens
have after the prompt, and are never cut inside a character.
"""

import codecs
import re
from collections.abc import Sequence
from itertools import islice
from typing import Protocol

from gllm.text.tokenizer import BYTE_TOKEN, Tokenizer


class StopStrings:
    """Stop strings of a request, indexed for incremental search in its choices."""

    def __init__(self, stops: Sequence[str] = ()) -> None:
        self._stops = tuple(dict.fromkeys(stops))
        by_first: dict[str, list[str]] = {}
        for stop in self._stops:
            by_first.setdefault(stop[0], []).append(stop)
        self._by_first = {char: tuple(stops) for char, stops in by_first.items()}
        # Finds first characters in C; without stop strings a lookahead that always fails.
        self._first = re.compile("|".join(map(re.escape, by_first)) or "(?!)")

    def find(self, text: str, num_searched: int) -> tuple[int, str] | None:
        """Return start and text of the stop string that ends first; None if there is none.

        Of several that end at the same character, the longest counts.

        Args:
            text: The text to search.
            num_searched: Number of characters at the beginning in which no stop string ends.
        """
        matches = []
        for stop in self._stops:
            begin = text.find(stop, max(0, num_searched + 1 - len(stop)))
            if begin >= 0:
                matches.append((begin + len(stop), begin, stop))
        return None if not matches else min(matches)[1:]

    def find_partial_stop(self, text: str) -> int:
        """Return the start of the longest suffix that may be the beginning of a stop string.

        `text` contains no complete stop string. Without such a suffix the result is its length.
        """
        begin = 0
        while (match := self._first.search(text, begin)) is not None:
            begin = match.start()
            tail = text[begin:]
            if any(stop.startswith(tail) for stop in self._by_first[text[begin]]):
                return begin
            begin += 1
        return len(text)


class StopMatcher:
    """Incremental search for stop strings in the text of one choice.

    Text that may be the beginning of a stop string is held back. The result does not depend on how
    the text is divided into deltas. Each character costs at most one `str.startswith` per stop
    string.
    """

    def __init__(self, stops: StopStrings) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str, may_stop: bool = True) -> tuple[str, str | None]:
        """Add text; return the text that is safe to show, and the stop string if one was found.

        Args:
            text: Further text of the choice.
            may_stop: False to ignore stop strings that end in this text; they may begin in it.
        """
        window = self._held + text
        match = self._stops.find(window, len(self._held)) if may_stop else None
        if match is not None:
            begin, stop = match
            self._held = ""
            return window[:begin], stop
        cut = self._stops.find_partial_stop(window)
        self._held = window[cut:]
        return window[:cut], None

    def finish(self) -> str:
        """End the text and return the text that was held back."""
        held, self._held = self._held, ""
        return held


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Decoder of tokens that stand for bytes; holds back incomplete UTF-8 characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """True if no character is incomplete."""

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        if self._is_between:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """Return the replacement character if the output ends inside a character."""
        return self._utf8.decode(b"", final=True)


class _ByteWindowDecoder:
    """Decoder of tokens that stand for bytes, for tokenizers with further decoding steps.

    Decodes new tokens together with those before them, and holds back incomplete characters.

    Args:
        tokenizer: Tokenizer of the model.
        context: Tokens before the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window = context
        self._num_new = 0
        """Number of tokens since the last one that ended with a whole character."""
        self._shown = tokenizer.decode(context, False)

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        self._num_new += 1
        text = self._whole_characters()
        new_text, self._shown = text[len(self._shown) :], text
        if not self._is_incomplete or self._num_new > MAX_WINDOW_TOKENS:
            # An incomplete character is in the last three tokens.
            last = self._window[-min(self._num_new, 4) :]
            # A step that strips the beginning of a text would strip that of the next token, if the
            # tokens before it had no text.
            if self._tokenizer.decode(last, False) or len(self._window) > MAX_WINDOW_TOKENS:
                self._window = last
            self._num_new = 0
            self._shown = self._whole_characters()
        return new_text

    def finish(self) -> str:
        """Return the replacement character if the output ends inside a character."""
        return self._tokenizer.decode(self._window, False)[len(self._shown) :]

    @property
    def _is_incomplete(self) -> bool:
        """True if the last token ends inside a character."""
        return bool(self._utf8.getstate()[0])

    def _whole_characters(self) -> str:
        """Return the text of the window without an incomplete character at its end."""
        text = self._tokenizer.decode(self._window, False)
        return text.removesuffix("\ufffd") if self._is_incomplete else text


class _WindowDecoder:
    """Decoder for other tokenizers: decodes new tokens together with the token before them.

    Byte tokens are decoded as SentencePiece does: each character is shown when its last byte
    arrives, and each byte of no character is a replacement character. The tokenizers library
    replaces all bytes of a run in which one is invalid.

    Args:
        tokenizer: Tokenizer of the model.
        context: Tokens before the text.
    """

    def __init__(self, tokenizer: Tokenizer, context: list[int]) -> None:
        self._tokenizer = tokenizer
        self._context = context
        self._bytes: list[int] = []
        """Byte tokens of an incomplete character."""

    def push(self, token_id: int) -> str:
        """Return the text that a token completes."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        if self._tokenizer.has_byte_fallback and BYTE_TOKEN.fullmatch(token):
            return self._push_byte(token_id)
        text = self.finish()
        num_shown = len(self._tokenizer.decode(self._context, False))
        text += self._tokenizer.decode([*self._context, token_id], False)[num_shown:]
        self._context = [token_id]
        return text

    def finish(self) -> str:
        """Return a replacement character for each byte of an incomplete character."""
        num_bytes = len(self._bytes)
        if num_bytes:
            self._context, self._bytes = self._bytes, []
        return "\ufffd" * num_bytes

    def _push_byte(self, token_id: int) -> str:
        """Return the text that a byte token completes."""
        self._bytes.append(token_id)
        text = ""
        while self._bytes:
            raw = b"".join(map(self._tokenizer.token_bytes, self._bytes))
            try:
                char = raw.decode()
            except UnicodeDecodeError as error:
                if error.end == len(raw) and error.reason == "unexpected end of data":
                    break
                text += "\ufffd"
                self._context = [self._bytes.pop(0)]
                continue
            # At the beginning of a text the tokenizer may strip a space.
            text += char if self._context else self._tokenizer.decode(self._bytes, False)
            self._context, self._bytes = self._bytes, []
        return text


MAX_WINDOW_TOKENS = 8
"""Number of tokens without a whole character at an end that are decoded together."""
NO_STOPS = StopStrings()
"""No stop strings."""


class IncrementalDetokenizer:
    """Converts the tokens of one choice into text as they arrive, up to the first stop string.

    Args:
        tokenizer: Tokenizer of the model.
        stop: Stop strings.
        skip_special_tokens: Leave special tokens out of the text.
        include_stop: Keep the stop string in the text.
        visible_special_tokens: Special tokens that are not skipped.
        min_tokens: Number of tokens before which no stop string ends the text.
        prompt: Tokens that the text continues, which are not part of it. The first word of the text
            begins with a space only if there is text before it, in tokenizers of SentencePiece.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings = NO_STOPS,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        visible_special_tokens: Sequence[str] = (),
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        visible = {tokenizer.token_to_id(token) for token in visible_special_tokens}
        self._skipped = (
            tokenizer.special_token_ids - visible if skip_special_tokens else frozenset()
        )
        self._decoder = self._create_decoder(tokenizer, prompt)
        self._stops = None if stop is NO_STOPS else StopMatcher(stop)
        self._include_stop = include_stop
        self._num_early_tokens = min_tokens
        """Number of tokens to come that cannot end the text."""

    def _create_decoder(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> _Decoder:
        """Return a decoder of text that continues the last visible token of a prompt."""
        if tokenizer.is_byte_level:
            return _ByteLevelDecoder(tokenizer)
        visible = (
            token_id
            for token_id in reversed(prompt)
            if token_id not in self._skipped and tokenizer.id_to_token(token_id) is not None
        )
        context = list(islice(visible, 1))
        decoder = _ByteWindowDecoder if tokenizer.has_byte_tokens else _WindowDecoder
        return decoder(tokenizer, context)

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Add tokens; return the new text, the number of tokens used, and the stop string.

        Without a stop string all tokens are used; otherwise those up to the one that completes it.
        """
        skipped, decode = self._skipped, self._decoder.push
        if self._stops is None:
            texts = [decode(token_id) for token_id in token_ids if token_id not in skipped]
            return "".join(texts), len(token_ids), None
        pieces = []
        for num_used, token_id in enumerate(token_ids, start=1):
            if token_id in skipped:
                continue
            may_stop = num_used > self._num_early_tokens
            text, stop = self._stops.push(decode(token_id), may_stop)
            pieces.append(text)
            if stop is not None:
                return "".join(pieces) + self._visible_stop(stop), num_used, stop
        self._num_early_tokens -= len(token_ids)
        return "".join(pieces), len(token_ids), None

    def finish(self) -> str:
        """Return the buffered text, up to a stop string that it completes."""
        text = self._decoder.finish()
        if self._stops is None:
            return text
        text, stop = self._stops.push(text, self._num_early_tokens < 0)
        return text + (self._stops.finish() if stop is None else self._visible_stop(stop))

    def _visible_stop(self, stop: str) -> str:
        """Return the text to show for a stop string."""
        return stop if self._include_stop else ""
