"""Predicted output lengths of a workload's requests, as a predictor beside the router gives them.

Source of the predictors: "Inference without Interference" (TetriInfer, arXiv 2401.11181) for
`oracle` and `noisy`, "Aladdin" (arXiv 2405.06856) for `by-prompt`.
"""

import math
from collections.abc import Sequence
from random import Random

from gllm.routing.length_prediction import NoisyLengthPredictor, OracleLengthPredictor
from gllm.routing.output_by_prompt import PromptLengthPredictor
from gllm.sim.workloads.requests import WorkloadRequest

LONGEST_OUTPUT = 2048
"""Longest output in tokens that a noisy prediction names, if the workload has no longer one."""


def predict_lengths(
    jobs: Sequence[WorkloadRequest], predictor: str, seed: int = 0
) -> list[WorkloadRequest]:
    """Return the requests with predicted output lengths.

    `oracle` knows the lengths. `noisy:ACCURACY` names the lower end of a bin of 200 tokens, which
    is the right one with a probability of ACCURACY. `by-prompt` takes the mean output of the
    requests before with prompts of similar length, as if each had ended when the next one arrives.

    Args:
        jobs: In the order of arrival.
        predictor: One of these.
        seed: Seed of the errors.

    Raises:
        ValueError: The predictor is none of these.
    """
    name, separator, text = predictor.partition(":")
    if name == "noisy" and separator:
        return _predict_by_length(jobs, _make_noisy(jobs, predictor, text, seed))
    if predictor == "oracle":
        return _predict_by_length(jobs, OracleLengthPredictor())
    if predictor == "by-prompt":
        return _predict_by_prompt(jobs)
    raise ValueError(
        f"--length-prediction {predictor}: choose oracle, noisy:ACCURACY such as noisy:0.749, or "
        "by-prompt"
    )


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


def _predict_by_length(
    jobs: Sequence[WorkloadRequest], predictor: OracleLengthPredictor | NoisyLengthPredictor
) -> list[WorkloadRequest]:
    return [
        job._replace(predicted_output_tokens=predictor.predict(job.num_output_tokens).num_tokens)
        for job in jobs
    ]


def _predict_by_prompt(jobs: Sequence[WorkloadRequest]) -> list[WorkloadRequest]:
    predictor = PromptLengthPredictor()
    predicted = []
    for job in jobs:
        num_tokens = max(1, round(predictor.predict(job.num_prompt_tokens)))
        predicted.append(job._replace(predicted_output_tokens=num_tokens))
        predictor.record(job.num_prompt_tokens, job.num_output_tokens)
    return predicted
