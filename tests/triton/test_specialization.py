"""Kernels are not compiled anew for another number of rows."""

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.triton import experts, linear_fp8, masking, penalties, qkv, rms_norm
from gllm.kernels.triton.activation import act_and_mul
from gllm.kernels.triton.sampling import sample
from tests.kernels.test_sampling import plan_of
from tests.support.gpu.variants import recorded_variants


def _ints(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.int64)


def _histories(rows: int) -> TokenHistories:
    """Of one block each; a different number of blocks to a row than there are rows."""
    tables = torch.zeros(rows, 2 * rows + 1, dtype=torch.int32)
    return TokenHistories(_ints(rows), _ints(rows), _ints(rows), tables, 16)


def _ban(rows: int) -> None:
    phrases = BadWords(_ints(rows), _ints(rows), _ints(rows, rows), _ints(rows))
    masking.apply_bad_words(torch.zeros(rows, 96), _ints(64), _histories(rows), phrases)


def _rotate(rows: int) -> None:
    cache = torch.zeros(8, 16, 1, 16), torch.zeros(8, 16, 1, 16)
    qkv.rotate_and_store(torch.zeros(rows, 4, 16), QKVLayout(2, 1), None, cache, _ints(rows))


def _mix(rows: int) -> None:
    x, up, down = torch.zeros(rows, 32), torch.zeros(4, 64, 32), torch.zeros(4, 32, 32)
    experts.run_experts(x, _ints(rows, 2), torch.zeros(rows, 2), up, down, "silu")


def _penalize(rows: int) -> None:
    settings = torch.ones(3, rows, dtype=torch.float64)
    penalties.apply_history_penalties(torch.zeros(rows, 96), _ints(64), _histories(rows), settings)


OPERATIONS: dict[str, Callable[[int], object]] = {
    "rms_norm": lambda rows: rms_norm.rms_norm(torch.zeros(rows, 96), torch.ones(96), 1e-6),
    "gate": lambda rows: act_and_mul("silu", torch.zeros(rows, 96)),
    "quantize": lambda rows: linear_fp8.quantize(torch.zeros(rows, 256)),
    "qkv": _rotate,
    "experts": _mix,
    "sample": lambda rows: sample(torch.zeros(rows, 96), plan_of([{"top_k": 3}] * rows)),
    "masks": lambda rows: masking.apply_token_bitmask(
        torch.zeros(rows, 96), _ints(rows), torch.zeros(rows, 3, dtype=torch.int32)
    ),
    "phrases": _ban,
    "penalties": _penalize,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_any_number_of_rows_is_one_variant(name: str) -> None:
    """Triton would make constants of 1 and of multiples of 16."""
    with recorded_variants() as variants:
        OPERATIONS[name](3)
        known = set(variants)
        assert known
        for rows in (1, 2, 16, 48):
            OPERATIONS[name](rows)
        assert sorted(variants - known) == []
