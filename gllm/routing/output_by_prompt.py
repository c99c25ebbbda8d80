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
"""Predictions that are kept."""


def prompt_bucket(num_prompt_tokens: int) -> int:
    """Return the number of the bucket of a prompt: two per power of two."""
    bits = max(1, num_prompt_tokens).bit_length()
    return 2 * bits + (max(1, num_prompt_tokens) >> max(0, bits - 2) & 1)


class PromptLengthPredictor:
    """Predictor of output lengths in tokens, by buckets of prompt lengths.

    Args:
        prior: Expected output tokens before any request has finished.
    """

    def __init__(self, prior: int = 256) -> None:
        self._prior = prior
        self._buckets: dict[int, OutputHistory] = {}
        self._all = OutputHistory(BUCKET_HISTORY)
        self._known: dict[tuple[int, int], float] = {}
        """Predictions since the last record: a heartbeat asks again and again for the same."""

    def record(self, num_prompt_tokens: int, num_output_tokens: int) -> None:
        """Add a request that has finished."""
        self._known.clear()
        bucket = prompt_bucket(num_prompt_tokens)
        history = self._buckets.get(bucket)
        if history is None:
            history = self._buckets[bucket] = OutputHistory(BUCKET_HISTORY)
        history.record(num_output_tokens)
        self._all.record(num_output_tokens)

    def predict(self, num_prompt_tokens: int, num_generated: int = 0) -> float:
        """Return the expected length of an output, in tokens; always more than `num_generated`.

        Args:
            num_prompt_tokens: Length of the prompt.
            num_generated: Output tokens so far.
        """
        key = num_prompt_tokens, num_generated
        length = self._known.get(key)
        if length is None:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            length = self._known[key] = self._predict(num_prompt_tokens, num_generated)
        return length

    def _predict(self, num_prompt_tokens: int, num_generated: int) -> float:
        history = self._buckets.get(prompt_bucket(num_prompt_tokens))
        if history is None or len(history.recent) < MIN_BUCKET_REQUESTS:
            history = self._all
        if not history.recent:
            return max(float(self._prior), num_generated + 1.0)
        mean = history.mean_above(0)
        if num_generated >= mean:
            # An output longer than all earlier ones is expected to double.
            mean = history.mean_above(num_generated) or 2.0 * num_generated
        return max(mean, num_generated + 1.0)
