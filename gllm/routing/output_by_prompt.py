"""Prediction of output lengths from the prompt's length, by the outputs of earlier requests.

Source: "Aladdin" (arXiv 2405.06856), section on output prediction: requests are divided into
buckets by the length of their prompts. The mean of a bucket is the unbiased prediction of an
output; once an output exceeds it, the mean of all longer ones takes its place.
"""

from gllm.scheduler.output_lengths import OutputHistory

BUCKET_HISTORY = 2048
"""Number of finished requests in the history of a bucket."""
MIN_BUCKET_REQUESTS = 16
"""Finished requests from which a bucket predicts by itself; before that, all buckets do."""

MAX_KNOWN = 16384
"""Prompt lengths, and predictions of a history, that are kept."""


def prompt_bucket(num_prompt_tokens: int) -> int:
    """Return the number of the bucket of a prompt: two per power of two."""
    bits = max(1, num_prompt_tokens).bit_length()
    return 2 * bits + (max(1, num_prompt_tokens) >> max(0, bits - 2) & 1)


class _Outputs:
    """Outputs of a bucket, or of all, with the predictions since the last one."""

    __slots__ = ("_history", "_is_stale", "_longer", "_mean")

    def __init__(self, prior: float) -> None:
        self._history = OutputHistory(BUCKET_HISTORY)
        self._is_stale = False
        self._mean = prior
        self._longer: dict[int, float] = {}

    @property
    def num_requests(self) -> int:
        """Number of requests by which this predicts."""
        return len(self._history.recent)

    def record(self, num_output_tokens: int) -> None:
        """Add the output of a request that has finished."""
        self._history.record(num_output_tokens)
        self._is_stale = True
        self._longer.clear()

    @property
    def mean(self) -> float:
        """Expected length of an output that has not exceeded it."""
        if self._is_stale:
            self._mean, self._is_stale = self._history.mean_above(0), False
        return self._mean

    def predict_longer(self, num_generated: int) -> float:
        """Return the expected length of an output that has reached the mean, or will by a token."""
        length = self._longer.get(num_generated)
        if length is None:
            if len(self._longer) >= MAX_KNOWN:
                self._longer.clear()
            length = num_generated + 1.0
            if self._history.recent and num_generated >= self.mean:
                # An output longer than all earlier ones is expected to double.
                mean = self._history.mean_above(num_generated) or 2.0 * num_generated
                length = max(mean, length)
            self._longer[num_generated] = length
        return length


class PromptLengthPredictor:
    """Predictor of output lengths in tokens, by buckets of prompt lengths.

    Args:
        prior: Expected output tokens before any request has finished.
    """

    def __init__(self, prior: int = 256) -> None:
        self._prior = float(prior)
        self._buckets: dict[int, _Outputs] = {}
        self._all = _Outputs(self._prior)
        self._sources: dict[int, _Outputs] = {}
        """Outputs by which a prompt length is predicted: those of its bucket, or all."""

    def record(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Add a request that has finished."""
        bucket = prompt_bucket(num_prompt_tokens)
        outputs = self._buckets.get(bucket)
        if outputs is None:
            outputs = self._buckets[bucket] = _Outputs(self._prior)
        outputs.record(num_output_tokens)
        self._all.record(num_output_tokens)
        if outputs.num_requests == MIN_BUCKET_REQUESTS:
            self._sources.clear()

    def predict(self, num_prompt_tokens: int, num_generated: int = 0) -> float:
        """Return the expected length of an output, in tokens; always more than `num_generated`.

        Args:
            num_prompt_tokens: Length of the prompt.
            num_generated: Output tokens so far.
        """
        outputs = self._sources.get(num_prompt_tokens) or self._find_source(num_prompt_tokens)
        mean = outputs.mean
        return mean if num_generated + 1 <= mean else outputs.predict_longer(num_generated)

    def _find_source(self, num_prompt_tokens: int) -> _Outputs:
        if len(self._sources) >= MAX_KNOWN:
            self._sources.clear()
        outputs = self._buckets.get(prompt_bucket(num_prompt_tokens))
        if outputs is None or outputs.num_requests < MIN_BUCKET_REQUESTS:
            outputs = self._all
        self._sources[num_prompt_tokens] = outputs
        return outputs
