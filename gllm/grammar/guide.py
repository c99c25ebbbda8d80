"""One sequence's way through its grammar: what may be drawn next, and what need not be drawn.

Owns the output as far as it is settled. Knows nothing of logits and threads: whoever makes a guide
says where its masks are computed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_SECONDS = 10.0
"""A mask that takes longer ends its sequence; those of bounded grammars take well below one."""
TOKEN_SECONDS = 60.0
"""The same for a token that has to be drawn first."""


class GrammarGuideError(Exception):
    """Why a sequence cannot go on."""


def _reason(error: Exception) -> str:
    """Return an error in words."""
    return str(error) if isinstance(error, GrammarGuideError) else f"its grammar failed: {error!r}"


class GuideOptions(NamedTuple):
    """What goes for a guide besides its grammar."""

    vocab_size: int
    """Of the model."""
    eos: int
    forces: bool
    """Settle tokens that the grammar leaves no choice about; if not, every token is drawn."""


def valid_eos_ids(eos_ids: Sequence[int], vocab_size: int) -> list[int]:
    """The ends of a sequence that the model can write."""
    return [token for token in eos_ids if token < vocab_size]


class GrammarGuide:
    """Output tokens are counted from 0. A draw settles one and, where the grammar forces others,
    those that follow: rows that were planned before anybody knew get the settled token."""

    def __init__(
        self,
        begin: Callable[[Callable[[], bytes]], "Future[bytes]"],
        go_on: Callable[[Callable[[], bytes]], "Future[bytes]"],
        compiled: "Callable[[], LLMatcher]",
        rules: GuideOptions,
    ) -> None:
        """begin, go_on: run a function somewhere else, the first with time on its hands; compiled:
        a matcher of its own, raising GuideError where there is none."""
        self._tokens: list[int] = []
        """The output as far as it is settled."""
        self._told = 0
        """How many of those have been told."""
        self._error = ""
        """Why it cannot go on."""
        self._news = Condition()
        self._rules = rules
        self._go_on = go_on
        self._ahead = begin(lambda: self._begin(compiled()))

    @property
    def first_mask(self) -> "Future[bytes]":
        """Done when the first token can be drawn; to be asked for before that."""
        return self._ahead

    def allowed_tokens(self, index: int) -> int | bytes:
        """What output token `index` may be: one where that is settled, else a bit for each token,
        lowest bit of a byte first. Waits until all before it has been taken.

        Raises GuideError where there is none.
        """
        if not index:
            self._result(self._ahead)
        with self._news:
            if not self._news.wait_for(lambda: self._knows(index), TOKEN_SECONDS):
                self._error = f"its last token did not come in {TOKEN_SECONDS:g} s"
            self._check()
            if index < len(self._tokens):
                return self._tokens[index]
            ahead = self._ahead
        return self._result(ahead)

    def accept_token(self, index: int, token: int) -> tuple[int, ...]:
        """Output token `index` was drawn: all that is settled and has not been told yet. Begins
        with that token, or with the settled one in its place; empty where that one was told before.

        Raises GuideError.
        """
        with self._news:
            self._check()
            try:
                if index == len(self._tokens):
                    self._draw(token)
            except Exception as error:
                # Whatever the library raises concerns this sequence only.
                self._error = _reason(error)
                raise GrammarGuideError(self._error) from error
            finally:
                self._news.notify_all()
            told, self._told = self._told, len(self._tokens)
            return tuple(self._tokens[told:])

    def fail(self, error: str) -> None:
        """The sequence cannot go on; what was wrong first counts."""
        with self._news:
            self._error = self._error or error
            self._news.notify_all()

    def settled_token(self, index: int) -> int:
        """Output token `index`, which is settled."""
        return self._tokens[index]

    def _knows(self, index: int) -> bool:
        return bool(self._error) or index <= len(self._tokens)

    def _result(self, ahead: "Future[bytes]") -> bytes:
        try:
            return ahead.result(MASK_SECONDS)
        except TimeoutError:
            self.fail(f"a step of its grammar takes over {MASK_SECONDS:g} s")
        except Exception as error:
            self.fail(_reason(error))
        raise GrammarGuideError(self._error)

    def _check(self) -> None:
        if self._error:
            raise GrammarGuideError(self._error)

    def _begin(self, matcher: "LLMatcher") -> bytes:
        self._matcher = matcher
        self._settle_forced()
        return self._mask()

    def _draw(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check_matcher()
        self._tokens.append(token)
        if token != self._rules.eos:
            self._settle_forced()
            self._ahead = self._go_on(self._mask)

    def _settle_forced(self) -> None:
        """Settle what the grammar leaves no choice about, the end among it."""
        if not self._rules.forces:
            return
        fits = self._rules.vocab_size.__gt__
        forced = list(takewhile(fits, self._matcher.compute_ff_tokens()))
        self._matcher.consume_tokens(forced)
        self._check_matcher()
        self._tokens += forced
        if self._matcher.is_stopped():
            self._tokens.append(self._rules.eos)

    def _mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check_matcher()
        return mask

    def _check_matcher(self) -> None:
        if self._matcher.is_error():
            raise GrammarGuideError(f"the grammar cannot go on: {self._matcher.get_error()}")
