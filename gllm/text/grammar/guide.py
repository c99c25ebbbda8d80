"""Follow the output of one sequence through its grammar: allowed tokens and forced tokens.

The creator of a guide decides on which thread masks are computed.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from itertools import takewhile
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from llguidance import LLMatcher

MASK_SECONDS = 10.0
"""Time limit of one mask; masks of bounded grammars take far less than a second."""
TOKEN_SECONDS = 60.0
"""Time limit for the sampling of the token before."""


class GrammarGuideError(Exception):
    """The output of a sequence violates its grammar, or computing a token mask took too long."""


def _describe(error: Exception) -> str:
    """Return an error in words."""
    return str(error) if isinstance(error, GrammarGuideError) else f"its grammar failed: {error!r}"


class GuideOptions(NamedTuple):
    """Options of the grammar states (guides) of all sequences of a stage."""

    vocab_size: int
    """Vocabulary size of the model."""
    eos: int
    """Token that ends the output."""
    forces: bool
    """True to skip sampling where the grammar allows a single token; False to sample all tokens."""
    mask_seconds: float = MASK_SECONDS
    """Limit in seconds for computing one mask."""
    token_seconds: float = TOKEN_SECONDS
    """Limit in seconds for waiting until the token before is sampled."""


def filter_eos_ids(eos_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the end-of-sequence token ids that are less than the vocabulary size."""
    return [token for token in eos_ids if token < vocab_size]


MaskFunction = Callable[[], bytes]
"""Function that computes a mask: one bit per token, lowest bit of a byte first."""


class GrammarGuide:
    """Grammar state of one sequence: accepts sampled tokens and computes masks of allowed tokens.

    Tokens that are the only ones allowed are fixed in advance: rows that were scheduled before this
    was known get the fixed token instead of a sampled one. Output tokens are counted from 0.
    """

    def __init__(
        self,
        submit_first: Callable[[MaskFunction], "Future[bytes]"],
        submit: Callable[[MaskFunction], "Future[bytes]"],
        create_matcher: "Callable[[], LLMatcher]",
        options: GuideOptions,
        output: Sequence[int] = (),
    ) -> None:
        """Start to compute the first mask.

        Args:
            submit_first: Runs the function of the first mask on another thread; it also compiles
                the grammar, which takes longer.
            submit: Runs the function of a later mask on another thread.
            create_matcher: Returns a new matcher; raises GrammarGuideError if there is none.
            options: Properties of the model and the executor.
            output: Tokens that the sequence generated under an earlier guide. Tokens that this one
                settles beyond them are returned with the first accepted token.
        """
        self._tokens: list[int] = []
        """Settled tokens of the output."""
        self._first_index = self._num_reported = len(output)
        """Number of settled tokens that `accept_token` has returned, here or earlier."""
        self._error = ""
        """Reason why the sequence cannot continue."""
        self._changed = Condition()
        self._options = options
        self._submit = submit
        self._mask = submit_first(lambda: self._start(create_matcher(), output))

    @property
    def first_mask(self) -> "Future[bytes]":
        """Future of the first mask; valid until a token is accepted."""
        return self._mask

    def allowed_tokens(self, index: int) -> int | bytes:
        """Return output token `index` if it is fixed, otherwise the mask of allowed tokens.

        The mask has one bit per token, lowest bit of a byte first. Waits until all tokens before
        `index` have been accepted.

        Raises:
            GrammarGuideError: The sequence cannot continue, or a time limit was exceeded.
        """
        if index == self._first_index:
            # The guide may still follow the earlier output.
            self._wait_for_mask(self._mask)
        with self._changed:
            limit = self._options.token_seconds
            if not self._changed.wait_for(lambda: self._error or index <= len(self._tokens), limit):
                self._error = f"its last token did not come in {limit:g} s"
            self._check()
            if index < len(self._tokens):
                return self._tokens[index]
            mask = self._mask
        return self._wait_for_mask(mask)

    def accept_token(self, index: int, token: int) -> tuple[int, ...]:
        """Accept the sampled output token `index`; return the tokens that are fixed by it.

        The result begins with this token, or with the one that the grammar had fixed in its place.
        It is empty if that one was returned before.

        Raises:
            GrammarGuideError: The grammar does not allow the token, or the sequence has failed.
        """
        with self._changed:
            self._check()
            is_new = index == len(self._tokens)
            if is_new:
                # The matcher belongs to one thread at a time: its last mask must be complete.
                self._wait_for_mask(self._mask)
            try:
                if is_new:
                    self._settle(token)
            except Exception as error:
                # Any error of the library concerns this sequence only.
                self._error = _describe(error)
                raise GrammarGuideError(self._error) from error
            finally:
                self._changed.notify_all()
            first_new, self._num_reported = self._num_reported, len(self._tokens)
            return tuple(self._tokens[first_new:])

    def fail(self, error: str) -> None:
        """Fail the sequence with an error; the first error is recorded."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def cancel(self) -> None:
        """Cancel the queued mask; the guide must not be used afterwards."""
        self._mask.cancel()

    def settled_token(self, index: int) -> int:
        """Return output token `index`, which must have been sampled or fixed by the grammar."""
        return self._tokens[index]

    def _wait_for_mask(self, mask: "Future[bytes]") -> bytes:
        try:
            return mask.result(self._options.mask_seconds)
        except TimeoutError:
            self.fail(f"a step of its grammar takes over {self._options.mask_seconds:g} s")
        except Exception as error:
            self.fail(_describe(error))
        raise GrammarGuideError(self._error)

    def _check(self) -> None:
        if self._error:
            raise GrammarGuideError(self._error)

    def _start(self, matcher: "LLMatcher", output: Sequence[int]) -> bytes:
        self._matcher = matcher
        for token in output:
            # One by one: the matcher limits the work of each call.
            self._consume(token)
        self._settle_forced()
        return self._compute_mask()

    def _settle(self, token: int) -> None:
        self._consume(token)
        if token != self._options.eos:
            self._settle_forced()
            self._mask = self._submit(self._compute_mask)

    def _consume(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check_matcher()
        self._tokens.append(token)

    def _settle_forced(self) -> None:
        """Settle the tokens that the grammar leaves no choice about, including the end."""
        if not self._options.forces:
            return
        is_valid = self._options.vocab_size.__gt__
        forced = list(takewhile(is_valid, self._matcher.compute_ff_tokens()))
        self._matcher.consume_tokens(forced)
        self._check_matcher()
        self._tokens += forced
        if self._matcher.is_stopped():
            self._tokens.append(self._options.eos)

    def _compute_mask(self) -> bytes:
        mask = self._matcher.compute_bitmask()
        self._check_matcher()
        return mask

    def _check_matcher(self) -> None:
        if self._matcher.is_error():
            raise GrammarGuideError(f"the grammar cannot go on: {self._matcher.get_error()}")
