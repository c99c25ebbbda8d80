"""Estimates of output lengths: bounds, means and classes, whatever the predictor."""

from collections.abc import Sequence
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.routing.lengths.accuracy import (
    BUCKET_BOUNDS,
    BUCKET_NAMES,
    LengthAccuracy,
    MeasuredLengthPredictor,
    bucket_of,
)
from gllm.routing.lengths.registry import LENGTH_PREDICTORS, make_length_predictor
from gllm.routing.lengths.weighted import WeightedEstimate
from gllm.scheduler.output_lengths import (
    NO_LIMIT,
    UNKNOWN_LENGTH,
    FixedEstimate,
    LengthPredictor,
    LengthQuery,
)

LENGTHS = st.integers(1, 5000)
PROMPTS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=300)


@given(
    name=st.sampled_from(LENGTH_PREDICTORS),
    history=st.lists(st.tuples(PROMPTS, LENGTHS), max_size=12),
    prompt=PROMPTS,
    max_tokens=st.integers(2, 4000),
    data=st.data(),
)
def test_estimates_are_above_what_is_generated_and_within_the_limit(
    name: str, history: list[tuple[list[int], int]], prompt: list[int], max_tokens: int, data
) -> None:
    lengths = make_length_predictor(name)
    for earlier, length in history:
        # The tails are equal, so that these prompts are similar.
        query = LengthQuery(len(earlier), max_tokens, [*earlier, *prompt])
        lengths.estimate(query).record(min(length, max_tokens))
    estimate = lengths.estimate(LengthQuery(len(prompt), max_tokens, prompt))
    num_generated = data.draw(st.integers(0, max_tokens - 1))
    for predict in (estimate.expected, estimate.likely):
        assert num_generated < predict(num_generated) <= max_tokens
    assert estimate.is_known == bool(history)
    rest = estimate.after(num_generated)
    assert rest.expected() == pytest.approx(estimate.expected(num_generated) - num_generated)


@given(
    sample=st.lists(st.tuples(LENGTHS, st.floats(1e-6, 1e3)), min_size=1, max_size=40),
    num_generated=st.integers(0, 6000),
)
def test_a_sample_predicts_its_conditional_mean_and_its_heaviest_bucket(
    sample: list[tuple[int, float]], num_generated: int
) -> None:
    estimate = WeightedEstimate(sample, NO_LIMIT, lambda length: None)
    longer = [(length, weight) for length, weight in sample if length > num_generated]
    if not longer:
        assert estimate.expected(num_generated) == estimate.likely(num_generated)
        assert estimate.expected(num_generated) == 2 * num_generated
        return
    total = sum(weight for _, weight in longer)
    mean = sum(length * weight for length, weight in longer) / total
    assert estimate.expected(num_generated) == pytest.approx(mean, rel=1e-6)
    weights = dict.fromkeys(range(len(BUCKET_NAMES)), 0.0)
    for length, weight in longer:
        weights[bucket_of(length)] += weight
    chosen = bucket_of(estimate.likely(num_generated))
    assert weights[chosen] == pytest.approx(max(weights.values()), rel=1e-6)


def test_buckets_are_named_by_their_bounds() -> None:
    assert BUCKET_NAMES[:2] == ("1-16", "17-32")
    assert BUCKET_NAMES[-1] == "2049+"
    for index, bound in enumerate(BUCKET_BOUNDS):
        assert bucket_of(bound) == index
        assert bucket_of(bound + 1) == index + 1


@given(st.lists(st.tuples(st.floats(1, 4000), LENGTHS), max_size=50))
def test_accuracy_counts_every_output_once(pairs: list[tuple[float, int]]) -> None:
    accuracy = LengthAccuracy()
    for predicted, actual in pairs:
        accuracy.record(predicted, actual)
    rows = accuracy.rows()
    assert [row.bucket for row in rows] == list(BUCKET_NAMES)
    assert sum(row.num_outputs for row in rows) == accuracy.num_outputs == len(pairs)
    for index, row in enumerate(rows):
        own = [(predicted, actual) for predicted, actual in pairs if bucket_of(actual) == index]
        assert row.num_short == sum(bucket_of(predicted) < index for predicted, _ in own)
        assert row.num_long == sum(bucket_of(predicted) > index for predicted, _ in own)
        assert row.mean_tokens == pytest.approx(fmean([a for _, a in own]) if own else 0)
        assert row.mean_predicted_tokens == pytest.approx(fmean([p for p, _ in own]) if own else 0)
    right = sum(bucket_of(predicted) == bucket_of(actual) for predicted, actual in pairs)
    assert accuracy.right_share == (right / len(pairs) if pairs else 0.0)


class Scripted(LengthPredictor):
    """A predictor that predicts the given lengths in turn, and notes what it learns."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = iter(lengths)
        self.learned: list[int] = []

    def estimate(self, query: LengthQuery):
        length, learned = next(self._lengths), self.learned
        if not length:
            return UNKNOWN_LENGTH

        class Estimate(FixedEstimate):
            def record(self, num_output_tokens: int) -> None:
                learned.append(num_output_tokens)

        return Estimate(length)


def test_the_first_prediction_is_measured_and_the_predictor_learns() -> None:
    inner = Scripted([10, 300, 0])
    measured = MeasuredLengthPredictor("scripted", inner)
    estimates = [measured.estimate(LengthQuery(5)) for _ in range(3)]
    # Later predictions, of what is longer than an output so far, do not count.
    assert estimates[0].expected(12) == 24
    for estimate, length in zip(estimates, (12, 40, 77), strict=True):
        estimate.record(length)
    assert inner.learned == [12, 40]
    described = measured.describe()
    assert described["predictor"] == "scripted"
    assert described["right_share"] == 0.5
    rows = {row["bucket"]: row for row in described["buckets"]}
    assert rows["1-16"]["num_right"] == 1
    assert rows["33-64"]["num_long"] == 1
    # Nothing was known of the third request.
    assert rows["65-128"]["mean_tokens"] == 0


@pytest.mark.parametrize("name", LENGTH_PREDICTORS)
def test_estimates_follow_later_outputs_or_stay(name: str) -> None:
    lengths = make_length_predictor(name)
    query = LengthQuery(4, 1000, [1, 2, 3, 4])
    for _ in range(20):
        lengths.estimate(query).record(50)
    assert lengths.estimate(query).expected() == pytest.approx(50)
    assert lengths.estimate(query).likely() == pytest.approx(50)
    assert lengths.estimate(query).expected(50) == 100
