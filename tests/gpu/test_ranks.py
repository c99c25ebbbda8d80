"""Ranks of a stage on a real GPU. Without one, tests/transport and tests/runtime have fakes."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from benchmarks.gpu import ranks
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import OK, run_row
from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = ["Once upon a time", "The owl said", "Who lives"]


@pytest.mark.skipif(not distributed.is_nccl_available(), reason="this PyTorch has no NCCL")
def test_one_rank_of_nccl_in_a_graph() -> None:
    (named,) = ranks.rows(Place(is_dry=False))
    row = run_row("kernels", named)
    assert (row.status, row.note) == (OK, "")


def texts(**options: Any) -> Iterator[list[int]]:
    common: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 64 * 2**20, "max_num_seqs": 8}
    with LLM("demo", progress=False, device="cuda", **common, **options) as llm:
        for output in llm.generate(PROMPTS, GREEDY):
            yield output.outputs[0].token_ids


@pytest.mark.parametrize("workers", [(1, 2), (2, 2)])
def test_ranks_generate_the_texts_of_one(workers: tuple[int, int]) -> None:
    """By NCCL where each rank has a GPU, through memory of the host where they share one."""
    stages, degree = workers
    options = {"pipeline_parallel_size": stages, "tensor_parallel_size": degree}
    assert [*texts(**options)] == [*texts()]
