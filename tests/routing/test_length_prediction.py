"""Length predictors: accuracy of the noisy one (T4), bins and their ends."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.routing.length_prediction import (
    PAPER_ACCURACY,
    NoisyLengthPredictor,
    OracleLengthPredictor,
    PredictedLength,
    length_bin,
)


@pytest.mark.parametrize("granularity", PAPER_ACCURACY)
def test_noisy_accuracy_is_the_papers(granularity: int) -> None:
    """T4: 74.9 % at 200 tokens, within 2 points; the other granularities too."""
    rng = Random(granularity)
    predictor = NoisyLengthPredictor(Random(1), granularity)
    lengths = [rng.randrange(1, 2048) for _ in range(20_000)]
    right = sum(predictor.predict(each) == length_bin(each, granularity) for each in lengths)
    assert right / len(lengths) == pytest.approx(PAPER_ACCURACY[granularity], abs=0.02)


@given(
    num_tokens=st.integers(1, 4000),
    granularity=st.integers(1, 500),
    accuracy=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 50),
)
def test_predictions_are_bins(
    num_tokens: int, granularity: int, accuracy: float, seed: int
) -> None:
    predictor = NoisyLengthPredictor(Random(seed), granularity, accuracy)
    predicted = predictor.predict(num_tokens)
    assert predicted.lower % granularity == 0
    assert predicted.upper == predicted.lower + granularity
    is_right = predicted.lower <= num_tokens < predicted.upper
    assert is_right or accuracy < 1
    assert not is_right or accuracy > 0


def test_every_wrong_bin_occurs() -> None:
    predictor = NoisyLengthPredictor(Random(0), 200, accuracy=0.0, max_tokens=1000)
    lowers = {predictor.predict(450).lower for _ in range(200)}
    assert lowers == {0, 200, 600, 800}


def test_plans_use_the_lower_end_and_at_least_one_token() -> None:
    assert length_bin(399, 200).num_tokens == 200
    assert length_bin(400, 200) == PredictedLength(400, 600)
    assert length_bin(199, 200).num_tokens == 1
    assert OracleLengthPredictor().predict(17).num_tokens == 17


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"granularity": 0}, "granularity is 0"),
        ({"granularity": 150}, "accuracy has to be given for granularity 150"),
        ({"granularity": 200, "accuracy": 1.5}, "accuracy is 1.5"),
        ({"granularity": 200, "max_tokens": 200}, "max_tokens is 200"),
    ],
)
def test_impossible_predictors_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NoisyLengthPredictor(Random(0), **arguments)  # type: ignore[arg-type]
