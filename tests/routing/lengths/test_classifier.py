"""Files of length classifiers: what is read, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.routing.lengths.classifier import (
    MAX_FILE_BYTES,
    ClassifierError,
    ClassifierPredictor,
    decode_classifier,
    read_classifier,
)
from gllm.routing.lengths.features import NUM_FEATURES, sparse_features
from gllm.routing.lengths.registry import check_length_predictor, make_length_predictor
from gllm.scheduler.output_lengths import LengthQuery
from tests.support.examples import num_examples

SHORT, LONG = [1, 2, 3, 4], [50, 60, 70, 80]


def query_of(prompt: list[int]) -> LengthQuery:
    return LengthQuery(len(prompt), 2000, prompt)


def make_file() -> dict[str, Any]:
    """Return a classifier of two buckets that tells SHORT from LONG."""
    short, long = ({*sparse_features(query_of(each))[0].tolist()} for each in (SHORT, LONG))
    weights = [0.0] * NUM_FEATURES
    for index in short ^ long:
        weights[index] = 9.0 if index in long else -9.0
    return {
        "format": "gllm-length-classifier",
        "version": 1,
        "model": "demo",
        "num_requests": 100,
        "buckets": [
            {"quantiles": [4.0, 8.0], "intercept": 0.0, "coefficients": [0.0] * NUM_FEATURES},
            {"quantiles": [300.0, 500.0], "intercept": 0.0, "coefficients": weights},
        ],
    }


DATA = json.dumps(make_file()).encode()


def test_buckets_are_predicted_by_the_prompt(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_bytes(DATA)
    assert check_length_predictor(str(path)) == str(path)
    lengths = make_length_predictor(str(path))
    assert isinstance(lengths, ClassifierPredictor)
    for prompt, likely in ((SHORT, 6), (LONG, 400)):
        estimate = lengths.estimate(query_of(prompt))
        assert estimate.is_known
        assert estimate.likely() == likely
        assert estimate.expected() == pytest.approx(likely, rel=0.05)
        assert sum(lengths.probabilities(query_of(prompt))) == pytest.approx(1)
    # Once the output is longer than the bucket, only the other one is left.
    assert lengths.estimate(query_of(SHORT)).expected(10) == pytest.approx(400)
    unknown = lengths.estimate(LengthQuery(50))
    assert not unknown.is_known
    lengths.estimate(LengthQuery(50)).record(33)
    assert lengths.estimate(LengthQuery(50)).expected() == 33


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(fields)


def change_bucket(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["buckets"][1].update(fields)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (change(format="other"), "format"),
        (change(version=2), "version"),
        (change(num_requests=0), "num_requests"),
        (change(extra=1), "extra"),
        (change(buckets=[]), "buckets"),
        (change(buckets=[{}]), "quantiles"),
        (change_bucket(quantiles=[]), "quantiles"),
        (change_bucket(quantiles=[0.5]), "quantiles"),
        (change_bucket(quantiles=[9.0, 8.0]), "ascending"),
        (change_bucket(intercept="1"), "intercept"),
        (change_bucket(intercept=1e9), "intercept"),
        (change_bucket(coefficients=[1.0]), "coefficients"),
        (change_bucket(coefficients=[None] * NUM_FEATURES), "coefficients"),
        (change_bucket(code="import os"), "code"),
    ],
)
def test_files_with_anything_unexpected_are_refused(
    edit: Callable[[dict[str, Any]], None], message: str, tmp_path: Path
) -> None:
    content = make_file()
    edit(content)
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ClassifierError, match=message):
        read_classifier(path)
    with pytest.raises(ValueError, match=f"{path}: .*{message}"):
        check_length_predictor(str(path))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused(number: str) -> None:
    data = DATA.replace(b'"intercept": 0.0', f'"intercept": {number}'.encode(), 1)
    assert data != DATA
    with pytest.raises(ClassifierError):
        decode_classifier(data)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mean is none of by-max-tokens, .*No such file"):
        check_length_predictor("mean")
    with pytest.raises(ValueError, match="Is a directory"):
        check_length_predictor(str(tmp_path))
    big = tmp_path / "big"
    with big.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(ClassifierError, match="more than"):
        read_classifier(big)


@settings(max_examples=num_examples(150, 2000))
@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 60), st.booleans())
@example(b"\x80\x04\x95", 0, 3, True)
@example(b"PK\x03\x04", 0, 4, True)
@example(b"[" * 60, 0, 0, False)
def test_damaged_headers_are_refused_or_leave_a_classifier(
    noise: bytes, position: int, num_removed: int, is_cut: bool
) -> None:
    data = DATA[:position] + noise + (b"" if is_cut else DATA[position + num_removed :])
    try:
        classifier = decode_classifier(data)
    except ClassifierError:
        return
    estimate = ClassifierPredictor(classifier).estimate(query_of(SHORT))
    assert 0 < estimate.expected() <= 2000
