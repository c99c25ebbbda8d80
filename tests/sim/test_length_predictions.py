"""Predicted output lengths of a workload."""

import pytest

from gllm.sim.workloads.length_predictions import predict_lengths
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

JOBS = make_workload("azure-conv", 2000, seed=1)


def predictions(jobs: list[WorkloadRequest], predictor: str, seed: int = 0) -> list[int]:
    predicted = predict_lengths(jobs, predictor, seed)
    assert [job[:-1] for job in predicted] == [job[:-1] for job in jobs]
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
