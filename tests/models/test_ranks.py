"""Tensor parallel ranks and pipeline stages together compute what transformers computes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from gllm.models.config import read_config
from gllm.models.layers import SequenceMixer
from gllm.models.ranks import Ranks
from gllm.models.recurrent import ParallelMixer
from gllm.models.shard import unsupported_shard_reason
from gllm.models.spec.recurrent import LightningSpec, Mamba1Spec, Mamba2Spec
from gllm.models.stage import HEAD_ROWS
from tests.support.full_cases import full_but
from tests.support.models.ranked_model import RankedModel, joined, open_thread_groups
from tests.support.models.thread_group import ThreadGroup
from tests.support.models.tiny_models import FAMILIES, reference, save

CUTS = [(2,), (2, 2), (4,), (2, 1), (1, 2), (1, 1)]
"""Ranks of each stage."""
PROMPTS = [[5], [3, 4, 5, 60, 7, 99, 130], [(7 * i * i + 11) % 128 + 3 for i in range(33)]]
NEW_TOKENS = 5
TOLERANCE = 1e-4
"""On the difference of logits, relative to the largest magnitude of their row or to 1."""


def check(family: str, cut: tuple[int, ...], folder: Path) -> None:
    """Compare greedy answers and the logits of all their tokens with transformers'."""
    with joined(RankedModel(folder, cut, len(PROMPTS))) as model:
        answers, logits = model.generate(PROMPTS, NEW_TOKENS)
        check_sums(model)
    for prompt, answer, own in zip(PROMPTS, answers, logits, strict=True):
        with torch.inference_mode():
            ids = torch.tensor([[*prompt, *answer[:-1]]])
            wanted = reference(family, heads=8)(ids).logits[0]
        assert answer == wanted[len(prompt) - 1 :].argmax(dim=-1).tolist()
        assert largest_error(own, wanted) <= TOLERANCE


def largest_error(logits: Tensor, wanted: Tensor) -> float:
    """The largest difference, relative to the largest magnitude of its row or to 1."""
    scale = wanted.abs().amax(dim=-1, keepdim=True).clamp(min=1)
    return float(((logits - wanted).abs() / scale).max())


def check_sums(model: RankedModel) -> None:
    """There are two sums per layer, one for attention and one for each feed-forward block.

    Norms of whole projections, norms of groups of which several ranks have a part, and what Mamba
    selects by all channels need another one.
    """
    for ranks, groups in zip(model.stages, model.groups, strict=True):
        for rank, ends in zip(ranks, groups, strict=True):
            if len(ranks) > 1 and isinstance(ends.layers, ThreadGroup):
                layers = rank.stage.layers.layers
                mixers = [layer.attention for layer in layers if layer.attention is not None]
                norms = sum(map(has_further_sum, mixers))
                blocks = len(mixers) + sum(layer.mlp is not None for layer in layers)
                sums = blocks + norms + (rank.stage.embedding is not None)
                sums += sum(layer.experts is not None for layer in layers)
                sums += sum(isinstance(each, ParallelMixer) for each in mixers)
                assert ends.layers.num_sums == NEW_TOKENS * sums


def has_further_sum(mixer: SequenceMixer) -> bool:
    spec = mixer.spec.recurrent if isinstance(mixer, ParallelMixer) else mixer.spec
    if isinstance(spec, Mamba2Spec):
        return spec.total_num_groups is not None and spec.norm is not None
    return isinstance(spec, LightningSpec | Mamba1Spec) or getattr(
        spec, "has_projection_norm", False
    )


def folder_of(family: str, path: Path) -> Path:
    return save(family, path, heads=8)


QUICK = {
    "llama3",
    "llama-biased",
    "qwen2-moe",
    "gemma2",
    "phi3",
    "glm4",
    "gpt2",
    "falcon-7b",
    "falcon-40b",
    "bloom",
    "cohere-normed",
    "baichuan-7b",
    "deepseek-v3",
    "qwen3-next",
    "qwen3.5",
    "granite-moe",
    "llama4",
    "minimax-m2",
}
"""Families whose layers are divided in different ways."""


def possible_cuts(folder: Path, cuts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Those of the cuts whose ranks can divide a model: some recurrent layers have one group."""
    model = read_config(folder).model
    return [
        cut for cut in cuts if all(unsupported_shard_reason(model, each) is None for each in cut)
    ]


@pytest.mark.parametrize("family", full_but(QUICK, FAMILIES))
def test_greedy_tokens_and_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Each family with one cut, in turn; `test_every_cut` has all.

    One rank per stage is compared for every family in tests/runtime/worker/test_executor.py.
    """
    folder, first = folder_of(family, tmp_path), [*FAMILIES].index(family) % 5
    cuts = possible_cuts(folder, CUTS[first:] + CUTS[:first])
    check(family, cuts[0], folder)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_cut(family: str, tmp_path: Path) -> None:
    folder = folder_of(family, tmp_path)
    for cut in possible_cuts(folder, CUTS):
        check(family, cut, folder)


def test_weights_outlive_the_groups(tmp_path: Path) -> None:
    """The next epoch's groups serve the same weights, with an empty cache."""
    model = RankedModel(folder_of("qwen2", tmp_path), (2,), len(PROMPTS))
    answers, _ = model.generate(PROMPTS, 3)
    old = model.groups
    model.leave()
    for ends in old[0]:
        ends.layers.cancel()
        ends.head.cancel()
    model.join()
    model.num_computed = [0] * len(PROMPTS)
    with joined(model):
        assert model.generate(PROMPTS, 3)[0] == answers


def test_ranks_join_no_other_groups() -> None:
    ranks = Ranks(1, 2)
    with pytest.raises(ValueError, match="rank 1 of 2 joins a group as rank 0 of 2"):
        ranks.join(*open_thread_groups(2)[0])
    with pytest.raises(ValueError, match="rank 1 of 2 joins a group as rank 1 of 4"):
        ranks.join(*open_thread_groups(4)[1])
    with pytest.raises(AssertionError, match="join"):
        _ = ranks.layers


def test_a_token_outside_the_vocabulary(tmp_path: Path) -> None:
    """All ranks raise, and none waits for another one."""
    with joined(RankedModel(folder_of("llama2", tmp_path), (2,), 1)) as model:
        for token in (131, -1):
            with pytest.raises(IndexError, match="vocabulary of 131"):
                model.step({0: [5, token]})


def test_logits_are_gathered_in_chunks(tmp_path: Path) -> None:
    """Of more rows than the head computes at once."""
    folder = folder_of("gemma2", tmp_path)
    tokens = [(7 * i * i + 11) % 128 + 3 for i in range(HEAD_ROWS + 50)]
    prompts = [tokens[begin : begin + 60] for begin in range(0, len(tokens), 60)]
    results = []
    for cut in ((1,), (4,)):
        with joined(RankedModel(folder, cut, len(prompts))) as model:
            results.append(model.step(dict(enumerate(prompts))))
    assert len(results[0]) == len(tokens)
    assert largest_error(results[1], results[0]) <= TOLERANCE
