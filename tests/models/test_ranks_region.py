"""Ranks whose groups are in shared memory: recorded as programs, with the bits of plain torch."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError
from gllm.kernels.native.library import load_library, using_library
from gllm.models.spec.model import ModelSpec
from gllm.transport.groups import StageGroups, open_groups
from gllm.transport.region import RegionLayout, create_region
from tests.models.test_ranks import PROMPTS
from tests.support.models.kernel_builds import UnrecordableLibrary
from tests.support.models.ranked_model import RankedModel, joined, open_thread_groups
from tests.support.models.tiny_models import FAMILIES, save

MAX_TOKENS = sum(map(len, PROMPTS))


def open_regions(size: int, model: ModelSpec) -> list[StageGroups]:
    """Open groups in shared memory; threads of one process use them as processes do."""
    if size == 1:
        return open_thread_groups(1)
    region = create_region("test")
    vocab_rows = -(-model.vocab_size // size)
    layout = RegionLayout(MAX_TOKENS, model.hidden_size, vocab_rows)
    groups = [open_groups(region, rank, size, layout) for rank in range(size)]
    region.close()
    return groups


def logits(model: RankedModel) -> list[Tensor]:
    """Those of prompts, of a token each, of some sequences, and of several tokens each."""
    return [
        model.step(dict(enumerate(PROMPTS))),
        model.step({seq: [40 + seq] for seq in range(len(PROMPTS))}),
        model.step({1: [9], 2: [8, 7, 6]}),
        model.step({0: [3] * 5, 2: [99]}),
    ]


@pytest.mark.parametrize(
    ("family", "cut"),
    [
        ("gemma2", (2, 2)),
        ("qwen2-moe", (4,)),
        pytest.param("qwen2", (2,), marks=pytest.mark.full),
        pytest.param("deepseek-v2", (2, 1), marks=pytest.mark.full),
        pytest.param("olmo2", (4, 2), marks=pytest.mark.full),
        pytest.param("qwen3-next", (2,), marks=pytest.mark.full),
        *(
            pytest.param(name, cut, marks=pytest.mark.long)
            for name in FAMILIES
            for cut in [(2,), (4, 2)]
        ),
    ],
)
def test_the_same_bits_as_by_torch(family: str, cut: tuple[int, ...], tmp_path: Path) -> None:
    folder = save(family, tmp_path, heads=8)
    with joined(RankedModel(folder, cut, len(PROMPTS))) as model:
        wanted = logits(model)
    with joined(RankedModel(folder, cut, len(PROMPTS), open_groups=open_regions)) as model:
        actual = logits(model)
        is_recorded = {rank.stage.layers.is_program for ranks in model.stages for rank in ranks}
    assert all(torch.equal(*pair) for pair in zip(actual, wanted, strict=True))
    assert is_recorded == {load_library() is not None}


@pytest.mark.skipif(load_library() is None, reason="nothing is compiled")
@pytest.mark.parametrize(
    ("dtype", "quantization"),
    [
        (torch.bfloat16, "none"),
        (torch.float16, "int8"),
        pytest.param(torch.float32, "int8", marks=pytest.mark.full),
    ],
    ids=str,
)
def test_programs_compute_the_same(dtype: torch.dtype, quantization: str, tmp_path: Path) -> None:
    """Recorded or called, to the last bit; the maximum of int8 rows is recorded too."""
    folder = save("qwen3", tmp_path, heads=8)
    results = []
    for is_recorded in (True, False):
        ranked = RankedModel(
            folder, (2,), len(PROMPTS), dtype, quantization, open_groups=open_regions
        )
        library = nullcontext() if is_recorded else using_library(UnrecordableLibrary())
        with joined(ranked) as model, library:
            results.append(logits(model))
            assert all(rank.stage.layers.is_program == is_recorded for rank in model.stages[0])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


@pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")
@pytest.mark.parametrize(
    ("family", "quantization"),
    [
        ("gemma2", "none"),
        ("qwen3", "int8"),
        pytest.param("qwen2-moe", "none", marks=pytest.mark.full),
    ],
)
def test_logits_do_not_depend_on_the_batch(family: str, quantization: str, tmp_path: Path) -> None:
    """A prompt in one step, in chunks, beside others or not: the same bits."""
    folder = save(family, tmp_path, heads=8)
    prompt = PROMPTS[-1]
    results = []
    for chunks in ([33], [1, 16, 9, 7], [20, *[1] * 13]):
        ranked = RankedModel(folder, (2,), 2, quantization=quantization, open_groups=open_regions)
        with joined(ranked) as model:
            begins = [sum(chunks[:index]) for index in range(len(chunks))]
            parts = [
                prompt[begin : begin + count] for begin, count in zip(begins, chunks, strict=True)
            ]
            rows = [model.step({0: part, 1: [9]})[: len(part)] for part in parts]
            results.append(torch.cat(rows))
    assert all(torch.equal(other, results[0]) for other in results)


@pytest.mark.parametrize("family", ["qwen2", "qwen2-moe"])
def test_a_closed_group_ends_the_step(family: str, tmp_path: Path) -> None:
    """Also within a recorded program, whose calls cannot raise."""
    folder = save(family, tmp_path, heads=8)
    with joined(RankedModel(folder, (2,), len(PROMPTS), open_groups=open_regions)) as model:
        model.step({0: [5, 6]})
        model.groups[0][1].head.cancel()
        with pytest.raises(GroupClosedError):
            model.step({0: [7]})
        model.leave()
        model.join()
        assert model.step({1: [5]}).isfinite().all()
