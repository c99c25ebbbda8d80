"""The fit of DistServe's coefficients, and sizes of KV cache."""

import pytest

from gllm.sim.costs.distserve import (
    DecodeSample,
    PhaseCoefficients,
    PrefillSample,
    fit_decode,
    fit_prefill,
    interpolate_coefficients,
    read_coefficients,
)
from gllm.sim.hardware.shapes import MODELS


def test_512_tokens_of_opt_66b_take_one_and_an_eighth_gibibyte() -> None:
    shape = MODELS["opt-66b"]
    assert shape.layers * shape.kv_bytes * 512 == 1.125 * 2**30


def test_the_fit_recovers_coefficients() -> None:
    prefill = PhaseCoefficients(18.1, 0.1, 7e-6)
    batches = [[n] * count for n in (16, 128, 512, 2000) for count in (1, 4, 16)]
    samples = [
        PrefillSample(
            lengths,
            prefill.constant
            + prefill.per_token * sum(lengths)
            + prefill.third * sum(n * n for n in lengths),
        )
        for lengths in batches
    ]
    assert fit_prefill(samples) == pytest.approx(prefill, rel=0.01)
    decode = PhaseCoefficients(19.9, 6e-4, 0.04)
    steps = [
        DecodeSample(
            lengths,
            decode.constant + decode.per_token * sum(lengths) + decode.third * len(lengths),
        )
        for lengths in batches
    ]
    assert fit_decode(steps) == pytest.approx(decode, rel=0.01)


def test_a_fit_needs_different_batches() -> None:
    with pytest.raises(ValueError, match="do not determine"):
        fit_prefill([PrefillSample([16], 3.0)] * 5)
    with pytest.raises(ValueError, match="above 0"):
        fit_decode([])


def test_three_ranks_lie_between_two_and_four() -> None:
    two, three, four = (interpolate_coefficients("distserve", "opt-175b", tp) for tp in (2, 3, 4))
    assert two == read_coefficients("distserve", "opt-175b", 2)
    share = (1 / 2 - 1 / 3) / (1 / 2 - 1 / 4)
    for middle, low, high in zip(three.prefill, two.prefill, four.prefill, strict=True):
        assert middle == pytest.approx((1 - share) * low + share * high)
        assert min(low, high) <= middle <= max(low, high)
    with pytest.raises(ValueError, match="tp"):
        interpolate_coefficients("distserve", "opt-175b", 16)
