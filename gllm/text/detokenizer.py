"""One choice's tokens to text, while they come.

Owns the decoder's state between tokens: each token costs the same, however long the output is, and
the pieces join to what decoding everything at once gives, never cut inside a character. Knows
nothing of requests.
"""

import codecs
from collections.abc import Sequence
from typing import Protocol

from gllm.text.stop_strings import StopMatcher, StopStrings
from gllm.text.tokenizer import BYTE_TOKEN, Tokenizer


class _Decoder(Protocol):
    def push(self, token_id: int) -> str: ...
    def finish(self) -> str: ...


class _ByteLevelDecoder:
    """Tokens are bytes: an incremental UTF-8 decoder holds back unfinished characters."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True
        """No character is unfinished."""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        if self._is_between:
            text = self._tokenizer.token_text(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        """The replacement character, where the output ends inside a character."""
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Any other tokenizer: decodes the new tokens after the one before them.

    A run of byte tokens is one unit to such a tokenizer (one bad byte spoils all of it), so nothing
    of a run is shown before its end.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._shown = ""

    def push(self, token_id: int) -> str:
        """Text that this token completes."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return ""
        self._window.append(token_id)
        if BYTE_TOKEN.fullmatch(token):
            return ""
        text = self.finish()
        self._window = [token_id]
        self._shown = self._tokenizer.decode(self._window, False)
        return text

    def finish(self) -> str:
        """Text of the byte tokens that are left."""
        return self._tokenizer.decode(self._window, False)[len(self._shown) :]


NO_STOPS = StopStrings()


class IncrementalDetokenizer:
    """Tokens in, text out, up to the first stop string, with it where `include_stop`.

    shown: special tokens that are shown although special ones are skipped.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: StopStrings = NO_STOPS,
        skip_special_tokens: bool = True,
        include_stop: bool = False,
        shown: Sequence[str] = (),
    ) -> None:
        self._tokenizer = tokenizer
        decoder = _ByteLevelDecoder if tokenizer.is_byte_level else _WindowDecoder
        self._decoder: _Decoder = decoder(tokenizer)
        kept = {tokenizer.token_to_id(token) for token in shown}
        self._skipped = tokenizer.special_token_ids - kept if skip_special_tokens else frozenset()
        self._stops = StopMatcher(stop) if stop else None
        self._include_stop = include_stop

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, str | None]:
        """Text that may be shown, tokens used for it, and the stop string that is complete.

        Without a stop string all tokens are used; with one, those up to the token completing it.
        """
        skipped, decode = self._skipped, self._decoder.push
        if self._stops is None:
            shown = [decode(token_id) for token_id in token_ids if token_id not in skipped]
            return "".join(shown), len(token_ids), None
        pieces = []
        for used, token_id in enumerate(token_ids, start=1):
            if token_id in skipped:
                continue
            text, stop = self._stops.push(decode(token_id))
            pieces.append(text)
            if stop is not None:
                return "".join(pieces) + self._ending(stop), used, stop
        return "".join(pieces), len(token_ids), None

    def finish(self) -> str:
        """What was held back, when no more tokens come; cut at a stop string it completes."""
        text = self._decoder.finish()
        if self._stops is None:
            return text
        text, stop = self._stops.push(text)
        return text + (self._stops.finish() if stop is None else self._ending(stop))

    def _ending(self, stop: str) -> str:
        """What is shown of a stop string."""
        return stop if self._include_stop else ""
