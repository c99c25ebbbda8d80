"""Predicted output lengths of a workload; accuracy and bins of the noisy predictor (T4)."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.sim.workloads.length_predictions import (
    BIN_TOKENS,
    PAPER_ACCURACY,
    NoisyLengthPredictor,
    predict_lengths,
)
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

JOBS = make_workload("azure-conv", 2000, seed=1)


def predictions(jobs: list[WorkloadRequest], predictor: str, seed: int = 0) -> list[int]:
    predicted = predict_lengths(jobs, predictor, seed)
    assert [job._replace(predicted_output_tokens=0) for job in predicted] == jobs
    return [job.predicted_output_tokens for job in predicted]


def test_the_oracle_knows_the_lengths() -> None:
    assert predictions(JOBS, "oracle") == [job.num_output_tokens for job in JOBS]


@pytest.mark.parametrize("accuracy", [0.0, 0.749, 1.0])
def test_noisy_predictions_name_the_right_bin_as_often_as_they_should(accuracy: float) -> None:
    predicted = predictions(JOBS, f"noisy:{accuracy}")
    right = [
        max(1, job.num_output_tokens // 200 * 200) == length
        for job, length in zip(JOBS, predicted, strict=True)
    ]
    assert sum(right) / len(right) == pytest.approx(accuracy, abs=0.03)
    assert predicted == predictions(JOBS, f"noisy:{accuracy}")
    assert (predicted == predictions(JOBS, f"noisy:{accuracy}", seed=1)) == (accuracy == 1)


def test_predictions_by_prompt_know_the_requests_before_only() -> None:
    jobs = [
        WorkloadRequest(float(number), 100 if number % 2 else 3000, 500 if number % 2 else 20)
        for number in range(100)
    ]
    predicted = predictions(jobs, "by-prompt")
    assert predicted[0] == 256
    assert predicted[1] == 20
    assert predicted[-2:] == [20, 500]
    assert predictions(jobs[:60], "by-prompt") == predicted[:60]


def test_noisy_accuracy_is_the_papers() -> None:
    """T4: 74.9 % at 200 tokens, within 2 points."""
    rng = Random(200)
    predictor = NoisyLengthPredictor(Random(1))
    lengths = [rng.randrange(1, 2048) for _ in range(20_000)]
    right = sum(predictor.predict_bin(length) == length // BIN_TOKENS for length in lengths)
    assert right / len(lengths) == pytest.approx(PAPER_ACCURACY, abs=0.02)


@given(
    num_tokens=st.integers(1, 4000),
    accuracy=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 50),
)
def test_predictions_are_lower_ends_of_bins(num_tokens: int, accuracy: float, seed: int) -> None:
    index, predicted = (
        predict(num_tokens)
        for predict in (
            NoisyLengthPredictor(Random(seed), accuracy).predict_bin,
            NoisyLengthPredictor(Random(seed), accuracy).predict,
        )
    )
    assert predicted == max(1, index * BIN_TOKENS)
    is_right = index == num_tokens // BIN_TOKENS
    assert is_right or accuracy < 1
    assert not is_right or accuracy > 0


def test_every_wrong_bin_occurs() -> None:
    predictor = NoisyLengthPredictor(Random(0), accuracy=0.0, max_tokens=1000)
    assert {predictor.predict(450) for _ in range(200)} == {1, 200, 600, 800}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"accuracy": 1.5}, "accuracy is 1.5"),
        ({"max_tokens": 200}, "max_tokens is 200"),
    ],
)
def test_impossible_predictors_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyLengthPredictor(Random(0), **arguments)  # type: ignore[arg-type]
