"""Predicted output lengths of a workload's requests, as a predictor beside the router gives them.

Sources: "Inference without Interference" (TetriInfer, arXiv 2401.11181), section 3.3.2, for
`oracle` and `noisy`; "Aladdin" (arXiv 2405.06856) for `by-prompt`.
"""

import math
from collections.abc import Sequence
from random import Random

from gllm.routing.output_by_prompt import PromptLengthPredictor
from gllm.sim.workloads.requests import WorkloadRequest

LONGEST_OUTPUT = 2048
"""Longest output in tokens that a noisy prediction names, if the workload has no longer one."""
PAPER_ACCURACY = 0.749
"""Accuracy of the paper's classifier (fine-tuned OPT-125M)."""
BIN_TOKENS = 200
"""Width in tokens of the paper's bins."""


class NoisyLengthPredictor:
    """Simulated classifier that predicts an output length's bin with a given accuracy.

    Bins have a width of 200 tokens.

    Args:
        rng: Random number generator of the errors.
        accuracy: Probability of the right bin; default: the paper's.
        max_tokens: Longest output; wrong bins are sampled uniformly from those below it.

    Raises:
        ValueError: There are fewer than two bins, or the accuracy is no probability.
    """

    def __init__(
        self, rng: Random, accuracy: float = PAPER_ACCURACY, max_tokens: int = LONGEST_OUTPUT
    ) -> None:
        if max_tokens <= BIN_TOKENS:
            raise ValueError(
                f"max_tokens is {max_tokens}, but has to exceed {BIN_TOKENS}, so that there are "
                "bins to confuse"
            )
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy is {accuracy}, but has to be in [0, 1]")
        self._rng = rng
        self._accuracy = accuracy
        self._num_bins = -(-max_tokens // BIN_TOKENS)

    def predict_bin(self, num_output_tokens: int) -> int:
        """Return the bin of an output length, or by chance a wrong one."""
        index = num_output_tokens // BIN_TOKENS
        if self._rng.random() < self._accuracy:
            return index
        wrong = self._rng.randrange(max(self._num_bins, index + 1) - 1)
        return wrong + (wrong >= index)

    def predict(self, num_output_tokens: int) -> int:
        """Return the predicted length of an output: the lower end of its bin, at least 1."""
        return max(1, self.predict_bin(num_output_tokens) * BIN_TOKENS)


def predict_lengths(
    jobs: Sequence[WorkloadRequest], predictor: str, seed: int = 0
) -> list[WorkloadRequest]:
    """Return requests with predicted output lengths.

    Args:
        jobs: Requests in order of arrival.
        predictor: `oracle` for the true lengths; `noisy:ACCURACY` for the lower end of a bin of 200
            tokens, which is the right one with a probability of ACCURACY; `by-prompt` for the mean
            output length of earlier requests with prompts of similar length, as if each had
            finished before the next arrival.
        seed: Seed of the errors.

    Raises:
        ValueError: The predictor is none of these.
    """
    name, separator, text = predictor.partition(":")
    if name == "noisy" and separator:
        noisy = _make_noisy(jobs, predictor, text, seed)
        lengths = [noisy.predict(job.num_output_tokens) for job in jobs]
    elif predictor == "oracle":
        lengths = [job.num_output_tokens for job in jobs]
    elif predictor == "by-prompt":
        lengths = _predict_by_prompt(jobs)
    else:
        raise ValueError(
            f"--length-prediction {predictor}: choose oracle, noisy:ACCURACY such as noisy:0.749, "
            "or by-prompt"
        )
    return [
        job._replace(predicted_output_tokens=max(1, length))
        for job, length in zip(jobs, lengths, strict=True)
    ]


def _make_noisy(
    jobs: Sequence[WorkloadRequest], predictor: str, text: str, seed: int
) -> NoisyLengthPredictor:
    try:
        accuracy = float(text)
    except ValueError:
        accuracy = math.nan
    if not 0 <= accuracy <= 1:
        raise ValueError(
            f"--length-prediction {predictor}: the accuracy has to be a number in [0, 1], such as "
            "noisy:0.749"
        )
    longest = max((job.num_output_tokens for job in jobs), default=0)
    rng = Random(f"length prediction {seed}")
    return NoisyLengthPredictor(rng, accuracy=accuracy, max_tokens=max(longest + 1, LONGEST_OUTPUT))


def _predict_by_prompt(jobs: Sequence[WorkloadRequest]) -> list[int]:
    predictor, lengths = PromptLengthPredictor(), []
    for job in jobs:
        lengths.append(round(predictor.predict(job.num_prompt_tokens)))
        predictor.record(job.num_prompt_tokens, job.num_output_tokens)
    return lengths
