"""Predictors of output lengths: their interface, and those by the outputs of a request's class.

Every user of a predicted length reads it through `LengthPredictor`: routing policies, pairs of
prefill and decode engines, admission to the KV cache and the simulator. The predictors here have
one sliding window of output lengths per class of requests. A class is a range of `max_tokens`,
because requests with a similar limit tend to come from the same client, or a range of prompt
lengths. `gllm.routing.lengths` has predictors that read the prompt's tokens.
"""

from abc import ABC, abstractmethod
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

OutputLengths = Mapping[int, Iterable[int]]
"""Lengths of the last outputs in tokens, the oldest first, by class."""

HISTORY_LENGTH = 64
"""Number of finished sequences in the history of a class."""
NO_LIMIT = 2**31 - 1
"""`max_tokens` of a request whose limit is unknown."""
UNKNOWN_LENGTH_TOKENS = 256
"""Expected number of output tokens of a request before any similar one has finished."""
MIN_BUCKET_REQUESTS = 16
"""Finished requests from which a range of prompt lengths predicts by itself; before that, all
ranges do."""


class LengthQuery(NamedTuple):
    """Facts about a request from which its output length is predicted."""

    num_prompt_tokens: int
    max_tokens: int = NO_LIMIT
    """Maximum number of tokens to generate."""
    prompt: Sequence[int] = ()
    """Token ids of the prompt; empty if they are unknown."""


class LengthEstimate(ABC):
    """Predicted output length of one request, made when the request arrives.

    All numbers of tokens are counted from the end of the prompt.
    """

    @property
    @abstractmethod
    def is_known(self) -> bool:
        """True if the estimate follows from outputs of other requests."""

    @abstractmethod
    def expected(self, num_generated: int = 0) -> float:
        """Return the mean length in tokens of outputs that are longer than `num_generated`.

        It is above `num_generated` while that is below the request's `max_tokens`.
        """

    def likely(self, num_generated: int = 0) -> float:
        """Return the most probable length in tokens, above `num_generated`.

        It differs from the mean where outputs are either short or long. The default is the mean.
        """
        return self.expected(num_generated)

    @abstractmethod
    def record(self, num_output_tokens: int) -> None:
        """Record that an output of the request has ended by itself after that many tokens.

        Later estimates of the same predictor use it.
        """

    def after(self, num_earlier: int) -> "LengthEstimate":
        """Return the estimate of the tokens that follow the first `num_earlier` ones."""
        return ContinuedEstimate(self, num_earlier) if num_earlier else self


class ContinuedEstimate(LengthEstimate):
    """Estimate of a request's output from a token on, where another engine continues it.

    Args:
        whole: estimate of the whole output.
        num_earlier: tokens of the output before.
    """

    __slots__ = ("_num_earlier", "_whole")

    def __init__(self, whole: LengthEstimate, num_earlier: int) -> None:
        self._whole = whole
        self._num_earlier = num_earlier

    @property
    def is_known(self) -> bool:
        """True if the estimate follows from outputs of other requests."""
        return self._whole.is_known

    def expected(self, num_generated: int = 0) -> float:
        """Return the mean length of the rest, in tokens."""
        return self._whole.expected(self._num_earlier + num_generated) - self._num_earlier

    def likely(self, num_generated: int = 0) -> float:
        """Return the most probable length of the rest, in tokens."""
        return self._whole.likely(self._num_earlier + num_generated) - self._num_earlier

    def record(self, num_output_tokens: int) -> None:
        """Record the length of the rest."""
        self._whole.record(self._num_earlier + num_output_tokens)


class RecordedEstimate(LengthEstimate):
    """Estimate of another predictor, with something else to do when an output ends.

    Args:
        inner: the estimate.
        on_ended: called with the number of tokens of each output that has ended.
    """

    __slots__ = ("_inner", "_on_ended")

    def __init__(self, inner: LengthEstimate, on_ended: Callable[[int], None]) -> None:
        self._inner = inner
        self._on_ended = on_ended

    @property
    def is_known(self) -> bool:
        """True if the estimate follows from outputs of other requests."""
        return self._inner.is_known

    def expected(self, num_generated: int = 0) -> float:
        """Return the mean length in tokens of outputs that are longer than `num_generated`."""
        return self._inner.expected(num_generated)

    def likely(self, num_generated: int = 0) -> float:
        """Return the most probable length in tokens, above `num_generated`."""
        return self._inner.likely(num_generated)

    def record(self, num_output_tokens: int) -> None:
        """Pass the length of an output on."""
        self._on_ended(num_output_tokens)


class FixedEstimate(LengthEstimate):
    """Estimate that does not change: a given length, until the output exceeds it.

    Args:
        num_tokens: the length, at least 1.
        is_known: True unless the length is a guess.
    """

    __slots__ = ("_is_known", "_num_tokens")

    def __init__(self, num_tokens: int, is_known: bool = True) -> None:
        self._num_tokens = num_tokens
        self._is_known = is_known

    @property
    def is_known(self) -> bool:
        """True unless the length is a guess."""
        return self._is_known

    def expected(self, num_generated: int = 0) -> float:
        """Return the length; an output that exceeds it is expected to double."""
        return self._num_tokens if num_generated < self._num_tokens else 2 * num_generated

    def record(self, num_output_tokens: int) -> None:
        """Ignore the length."""


UNKNOWN_LENGTH = FixedEstimate(UNKNOWN_LENGTH_TOKENS, is_known=False)
"""Estimate of a request about which nothing is known."""


class LengthPredictor(ABC):
    """Predicts the output length of each request; learns from the outputs that have ended."""

    @abstractmethod
    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of a new request; its `record` is called when an output ends."""


class OutputHistory:
    """Sliding window of the output lengths of finished sequences, with the mean above a length.

    Args:
        size: number of sequences in the window.
    """

    def __init__(self, size: int = HISTORY_LENGTH) -> None:
        self.recent: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Sums of the 0, 1, 2, ... longest lengths; empty if they have to be recomputed."""
        self._means: dict[int, float] = {}
        """Means above a length that were computed since the last record."""

    def record(self, length: int) -> None:
        """Add the output length of a finished sequence; drop the oldest if the window is full."""
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_right(self._sorted, self.recent[0]) - 1]
        self.recent.append(length)
        insort(self._sorted, length)
        self._sums = []
        self._means.clear()

    def mean_above(self, length: int) -> float:
        """Return the mean of all lengths greater than `length`; 0 if there are none."""
        mean = self._means.get(length)
        if mean is None:
            mean = self._means[length] = self._compute_mean(length)
        return mean

    def _compute_mean(self, length: int) -> float:
        count = len(self._sorted) - bisect_right(self._sorted, length)
        if not self._sums:
            self._sums = [0, *accumulate(reversed(self._sorted))]
        return self._sums[count] / count if count else 0.0


class ClassEstimate(LengthEstimate):
    """Estimate of a request by the outputs of its class, which follows the class's later outputs.

    Args:
        classes: the predictor.
        size: size of the request in tokens, which determines its class.
        max_tokens: most tokens of the output.
    """

    __slots__ = ("_classes", "_max_tokens", "_size")

    def __init__(self, classes: "OutputClasses", size: int, max_tokens: int) -> None:
        self._classes = classes
        self._size = size
        self._max_tokens = max_tokens

    @property
    def is_known(self) -> bool:
        """True if outputs of the class have ended."""
        return self._classes.has_outputs(self._size)

    def expected(self, num_generated: int = 0) -> float:
        """Return the mean length of the class's outputs, in tokens; at most `max_tokens`."""
        return min(self._max_tokens, self._classes.predict(self._size, num_generated))

    def record(self, num_output_tokens: int) -> None:
        """Add the output to its class."""
        self._classes.record(self._size, num_output_tokens)


class OutputClasses(LengthPredictor):
    """Base class of predictors with a sliding window of output lengths per class of requests.

    Subclasses define the size in tokens by which requests are classified, and the classes.

    Args:
        recent: initial content of the windows: `recent_lengths` of an earlier object.
    """

    history_length = HISTORY_LENGTH

    def __init__(self, recent: OutputLengths | None = None) -> None:
        self.histories: dict[int, OutputHistory] = {}
        for key, lengths in (recent or {}).items():
            history = self.histories[key] = OutputHistory(self.history_length)
            for length in lengths:
                history.record(length)

    @staticmethod
    @abstractmethod
    def size_of(query: LengthQuery) -> int:
        """Return the number of tokens of a request by which it is classified."""

    @staticmethod
    @abstractmethod
    def class_of(size: int) -> int:
        """Return the class of a request by its size in tokens."""

    @abstractmethod
    def predict(self, size: int, num_generated: int = 0) -> float:
        """Return the expected final length of an output, in tokens.

        Args:
            size: size of the request, which determines its class.
            num_generated: output tokens so far.
        """

    def has_outputs(self, size: int) -> bool:
        """Return True if a prediction follows from outputs that have ended.

        Args:
            size: size of the request, which determines its class.
        """
        return self.class_of(size) in self.histories

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of a request by its class."""
        return ClassEstimate(self, self.size_of(query), query.max_tokens)

    @property
    def recent_lengths(self) -> dict[int, list[int]]:
        """Lengths of the last outputs by class, to initialize another predictor."""
        return {key: list(history.recent) for key, history in self.histories.items()}

    def record(self, size: int, length: int) -> None:
        """Add a request that finished after `length` output tokens, neither aborted nor failed.

        Args:
            size: size of the request, which determines its class.
            length: number of its output tokens.
        """
        key = self.class_of(size)
        if key not in self.histories:
            self.histories[key] = OutputHistory(self.history_length)
        self.histories[key].record(length)


class LimitLengthPredictor(OutputClasses):
    """Predicts a request's output length from finished requests with a similar `max_tokens`.

    Args:
        prior: prediction in tokens while no similar request has finished.
        recent: initial history: `recent_lengths` of an earlier predictor.
    """

    def __init__(
        self, prior: int = UNKNOWN_LENGTH_TOKENS, recent: OutputLengths | None = None
    ) -> None:
        super().__init__(recent)
        self._prior = prior

    @staticmethod
    def size_of(query: LengthQuery) -> int:
        """Return `max_tokens`."""
        return query.max_tokens

    @staticmethod
    def class_of(size: int) -> int:
        """Return the number of bits of `max_tokens`: requests within a power of two are similar."""
        return size.bit_length()

    def predict(self, size: int, num_generated: int = 0) -> int:
        """Return the expected final length of an output, in tokens; at most `max_tokens`.

        It is the mean of the recorded lengths greater than `num_generated`. An output longer than
        all of them is expected to double.

        Args:
            size: `max_tokens` of the request, which determines its class.
            num_generated: output tokens so far.
        """
        history = self.histories.get(self.class_of(size))
        if history is not None:
            expected = round(history.mean_above(num_generated))
        else:
            expected = self._prior if num_generated < self._prior else 0
        return min(size, expected or max(2 * num_generated, 1))


class PromptLengthPredictor(OutputClasses):
    """Predicts output lengths from those of finished requests with a similar prompt length.

    The mean of a class is the unbiased prediction of an output; once an output exceeds it, the mean
    of all longer ones takes its place. `LimitLengthPredictor` takes the mean of all longer ones
    from the first token on. Source: "Aladdin" (arXiv 2405.06856), section on output prediction.

    Args:
        prior: Expected output tokens before any request has finished.
    """

    history_length = 2048

    def __init__(self, prior: int = UNKNOWN_LENGTH_TOKENS) -> None:
        super().__init__()
        self._prior = float(prior)
        self._all = OutputHistory(self.history_length)

    @staticmethod
    def size_of(query: LengthQuery) -> int:
        """Return the length of the prompt."""
        return query.num_prompt_tokens

    @staticmethod
    @lru_cache(maxsize=16384)
    def class_of(size: int) -> int:
        """Return the number of the bucket of a prompt: two per power of two."""
        bits = max(1, size).bit_length()
        return 2 * bits + (max(1, size) >> max(0, bits - 2) & 1)

    def has_outputs(self, size: int) -> bool:
        """Return True if any output has ended: a class with few outputs predicts by all of them."""
        return bool(self._all.recent)

    def record(self, size: int, length: int) -> None:
        """Add a request that has finished, by the lengths of its prompt and of its output."""
        super().record(size, length)
        self._all.record(length)

    def predict(self, size: int, num_generated: int = 0) -> float:
        """Return the expected length of an output, in tokens; always more than `num_generated`.

        Args:
            size: Length of the prompt.
            num_generated: Output tokens so far.
        """
        history = self.histories.get(self.class_of(size))
        if history is None or len(history.recent) < MIN_BUCKET_REQUESTS:
            history = self._all
        mean = history.mean_above(0) if history.recent else self._prior
        if num_generated + 1 <= mean:
            return mean
        if not history.recent or num_generated < mean:
            return num_generated + 1.0
        # An output longer than all earlier ones is expected to double.
        longer = history.mean_above(num_generated) or 2.0 * num_generated
        return max(longer, num_generated + 1.0)
