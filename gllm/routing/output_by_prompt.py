"""Prediction of output lengths from the prompt's length, by the outputs of earlier requests.

Source: "Aladdin" (arXiv 2405.06856), section on output prediction: requests are divided into
buckets by the length of their prompts. The mean of a bucket is the unbiased prediction of an
output; once an output exceeds it, the mean of all longer ones takes its place. The predictor by
`max_tokens` differs in this: it takes the mean of all longer ones from the first token on.
"""

from functools import lru_cache

from gllm.scheduler.output_lengths import OutputClasses, OutputHistory

MIN_BUCKET_REQUESTS = 16
"""Finished requests from which a bucket predicts by itself; before that, all buckets do."""


class PromptLengthPredictor(OutputClasses):
    """Predicts output lengths from those of finished requests with a similar prompt length.

    Source: "Aladdin" (arXiv 2405.06856), section on output prediction.

    Args:
        prior: Expected output tokens before any request has finished.
    """

    history_length = 2048

    def __init__(self, prior: int = 256) -> None:
        super().__init__()
        self._prior = float(prior)
        self._all = OutputHistory(self.history_length)

    @staticmethod
    @lru_cache(maxsize=16384)
    def class_of(num_tokens: int) -> int:
        """Return the number of the bucket of a prompt: two per power of two."""
        bits = max(1, num_tokens).bit_length()
        return 2 * bits + (max(1, num_tokens) >> max(0, bits - 2) & 1)

    def record(self, num_tokens: int, length: int) -> None:
        """Add a request that has finished, by the lengths of its prompt and of its output."""
        super().record(num_tokens, length)
        self._all.record(length)

    def predict(self, num_prompt_tokens: int, num_generated: int = 0) -> float:
        """Return the expected length of an output, in tokens; always more than `num_generated`.

        Args:
            num_prompt_tokens: Length of the prompt.
            num_generated: Output tokens so far.
        """
        history = self.histories.get(self.class_of(num_prompt_tokens))
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
