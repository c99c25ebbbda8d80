"""Choice of the mode of a transfer by a threshold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.transfer_mode import (
    TransferMode,
    TransferModePolicy,
)
from gllm.scheduler.config import DEFAULT_THRESHOLD_TOKENS

SERIALIZED, PER_LAYER = TransferMode.SERIALIZED, TransferMode.PER_LAYER


@given(threshold=st.integers(1, 10**6))
def test_the_threshold_is_the_first_prompt_per_layer(threshold: int) -> None:
    policy = TransferModePolicy(threshold)
    assert policy.choose(threshold - 1) is SERIALIZED
    assert policy.choose(threshold) is PER_LAYER


def test_the_default_is_the_papers_and_none_is_never() -> None:
    assert DEFAULT_THRESHOLD_TOKENS == 512
    assert TransferModePolicy().choose(511) is SERIALIZED
    assert TransferModePolicy().choose(512) is PER_LAYER
    assert TransferModePolicy(None).choose(10**9) is SERIALIZED
    assert TransferModePolicy(0).choose(0) is PER_LAYER


def test_negative_thresholds_are_refused() -> None:
    with pytest.raises(ValueError, match="threshold_tokens is -1"):
        TransferModePolicy(-1)
