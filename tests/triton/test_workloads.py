"""What kernels are tuned by: tiny ones of every kind compute what is expected of them."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch

from gllm.kernels import tune
from gllm.kernels.triton import tiles, workloads
from gllm.kernels.triton.attention_shapes import AttentionShape
from gllm.kernels.triton.workloads import PreparedTuningCase
from tests.support.full_cases import full_but

CPU = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

TINY: dict[str, Callable[[torch.device], PreparedTuningCase]] = {
    "decode": partial(workloads.prepare_attention, AttentionShape(4, 2, 16, 16, 4), 3, 1, 21),
    "prefill": partial(workloads.prepare_attention, AttentionShape(4, 2, 16, 16, 4), 2, 5, 21),
    "latent": partial(
        workloads.prepare_attention, AttentionShape(3, 1, 24, 16, 4, shared=True), 2, 1, 9
    ),
    "float32": partial(
        workloads.prepare_attention, AttentionShape(2, 2, 16, 16, 4, wide=True), 1, 3, 9
    ),
    "linear": partial(workloads.prepare_linear_fp8, 3, 40, 150),
    "experts": partial(workloads.prepare_experts, 3, (4, 2, 24, 16), 2, "experts"),
    "experts in float32": partial(workloads.prepare_experts, 3, (4, 2, 24, 16), 4, "experts"),
    "experts, 16-bit products": partial(
        workloads.prepare_experts, 3, (4, 2, 24, 16), 2, "experts_fp8"
    ),
    "experts, 8-bit products": partial(
        workloads.prepare_experts, 3, (4, 2, 24, 16), 1, "experts_fp8"
    ),
    "4 bits": partial(workloads.prepare_linear_grouped, 3, 40, 150),
    "experts, 4 bits": partial(workloads.prepare_experts, 3, (4, 2, 24, 16), 4, "experts_grouped"),
    "sum": partial(workloads.prepare_experts_sum, 3, 2, 24),
    "quantize": partial(workloads.prepare_quantize, 2, 256),
    "norm": partial(workloads.prepare_rms_norm, 3, 40),
    "gate": partial(workloads.prepare_activation, 3, 40),
    "qkv": partial(workloads.prepare_qkv, 5, 4, 2, 16),
}


QUICK = {"decode", "linear", "quantize"}
"""Workloads of every `make test`; their kernels have tests of their own."""


@pytest.mark.parametrize("name", full_but(QUICK, TINY))
def test_results_are_right_again_and_again_and_wrong_ones_are_seen(name: str) -> None:
    prepared = TINY[name](CPU)
    assert prepared.run().shape == prepared.expected.shape
    for _ in range(2):
        assert prepared.error() <= prepared.limit
    wrong = PreparedTuningCase(prepared.run, 1.2 * prepared.expected, prepared.limit)
    assert not wrong.error() <= wrong.limit
    spoiled = PreparedTuningCase(lambda: prepared.run() * math.nan, prepared.expected, 1.0)
    assert not spoiled.error() <= spoiled.limit


def test_every_row_is_timed_by_something() -> None:
    tables = tiles.read_tile_file(tiles.DEFAULT).tables
    assert {*tables} == {*tune.CANDIDATE_VALUES}
    every = workloads.list_tuning_cases()
    rows = list(tune.list_rows([*tables], every))
    assert len(rows) == sum(map(len, tables.values()))
    assert sum(len(own) for *_, own in rows) == len(every)
    for table, row, own in rows:
        assert own, (table, row)


def test_every_row_is_compiled_for_something() -> None:
    for table, rows in tiles.read_tile_file(tiles.DEFAULT).tables.items():
        for row in rows:
            jobs = tune.list_compile_jobs(table, row, row.use, 90)
            assert jobs, (table, row)
            assert {job.use for job in jobs} == {tuple(row.use.items())}
