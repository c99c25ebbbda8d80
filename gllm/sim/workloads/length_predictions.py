"""Predicted output lengths of a workload's requests, as a predictor beside the router gives them.

The predictors are those of production; `oracle` and `noisy` emulate an accuracy, and exist here
only. Source of `noisy`: "Inference without Interference" (TetriInfer, arXiv 2401.11181), section
3.3.2.
"""

import math
from collections.abc import Sequence
from random import Random

from gllm.routing.lengths.registry import make_length_predictor
from gllm.scheduler.output_lengths import (
    NO_LIMIT,
    FixedEstimate,
    LengthEstimate,
    LengthPredictor,
    LengthQuery,
    LimitLengthPredictor,
)
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.workloads.requests import WorkloadRequest, iterate_scheduler_requests

LONGEST_OUTPUT = 2048
"""Longest output in tokens that a noisy prediction names, unless the workload has a longer one."""
PAPER_ACCURACY = 0.749
"""Accuracy of the paper's classifier (fine-tuned OPT-125M)."""
BIN_TOKENS = 200
"""Width in tokens of the paper's bins."""
SIMULATED_HELP = (
    "oracle; noisy:ACCURACY, the right one of TetriInfer's bins with this probability; "
    "by-max-tokens, by-prompt, nearest or a file of `gllm profile lengths`, as in production"
)
"""Predictors of `gllm simulate --length-predictor`."""


class OracleLengthPredictor(LengthPredictor):
    """Emulated predictor that knows the length: simulated outputs end at `max_tokens`."""

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the length as the estimate."""
        return FixedEstimate(query.max_tokens)


class NoisyLengthPredictor(LengthPredictor):
    """Emulated classifier that predicts an output length's bin with a given accuracy.

    Bins have a width of 200 tokens. Simulated outputs end at `max_tokens`, so that is the length.

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

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the lower end of the bin, or by chance of a wrong one, as the estimate."""
        return FixedEstimate(self.predict(query.max_tokens))


def make_query(request: SchedulerRequest, lengths: LengthPredictor) -> LengthQuery:
    """Return what a predictor may know of a simulated request.

    A simulated output ends at `max_tokens`. Predictors that read the limit among other things would
    therefore know the length, so it is hidden from all but those that read nothing else.

    Args:
        request: The request.
        lengths: The predictor.
    """
    is_open = isinstance(
        lengths, OracleLengthPredictor | NoisyLengthPredictor | LimitLengthPredictor
    )
    prompt = request.prompt_token_ids
    return LengthQuery(len(prompt), request.max_tokens if is_open else NO_LIMIT, prompt)


def make_simulated_predictor(
    jobs: Sequence[WorkloadRequest], predictor: str, seed: int = 0
) -> LengthPredictor:
    """Return a new predictor for the requests of a workload.

    Args:
        jobs: The requests.
        predictor: `oracle` for the true lengths; `noisy:ACCURACY` for the lower end of a bin of 200
            tokens, which is the right one with a probability of ACCURACY; or a predictor of
            production by its name or file.
        seed: Seed of the errors.

    Raises:
        ValueError: The predictor is none of these.
    """
    name, separator, text = predictor.partition(":")
    if name == "noisy" and separator:
        return _make_noisy(jobs, predictor, text, seed)
    if predictor == "oracle":
        return OracleLengthPredictor()
    try:
        return make_length_predictor(predictor)
    except ValueError as error:
        raise ValueError(
            f"--length-predictor {predictor}: choose oracle, noisy:ACCURACY such as noisy:0.749, "
            f"or a predictor of production: {error}"
        ) from None


def predict_lengths(
    jobs: Sequence[WorkloadRequest], predictor: str, seed: int = 0
) -> list[WorkloadRequest]:
    """Return requests with predicted output lengths.

    A predictor that learns knows the requests before, as if each had finished before the next
    arrival.

    Args:
        jobs: Requests in order of arrival.
        predictor: Predictor as for `make_simulated_predictor`.
        seed: Seed of the errors.

    Raises:
        ValueError: There is no such predictor.
    """
    lengths, predicted = make_simulated_predictor(jobs, predictor, seed), []
    for job, (_, request) in zip(jobs, iterate_scheduler_requests(jobs), strict=True):
        estimate = lengths.estimate(make_query(request, lengths))
        num_tokens = max(1, round(estimate.likely()))
        predicted.append(job._replace(predicted_output_tokens=num_tokens))
        estimate.record(job.num_output_tokens)
    return predicted


def _make_noisy(
    jobs: Sequence[WorkloadRequest], predictor: str, text: str, seed: int
) -> NoisyLengthPredictor:
    try:
        accuracy = float(text)
    except ValueError:
        accuracy = math.nan
    if not 0 <= accuracy <= 1:
        raise ValueError(
            f"--length-predictor {predictor}: the accuracy has to be a number in [0, 1], such as "
            "noisy:0.749"
        )
    longest = max((job.num_output_tokens for job in jobs), default=0)
    rng = Random(f"length prediction {seed}")
    return NoisyLengthPredictor(rng, accuracy=accuracy, max_tokens=max(longest + 1, LONGEST_OUTPUT))
