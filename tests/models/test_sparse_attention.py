"""Sparse attention of DeepSeek V3.2 and GLM-5: selected keys, shared selections, their cache.

The logits of both families are compared with transformers, with chunks, ranks, quantized weights,
preemption and cached prefixes, where all families are: their rows select 12 of up to 102 keys.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_local_model
from gllm.kernels.attention import store
from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.native.library import load_library
from gllm.kernels.token_selection import divide_tokens, select_highest
from gllm.models.config import read_config
from gllm.models.spec.attention import LatentAttentionSpec
from gllm.models.split import split_layers
from gllm.options.field_types import FieldError
from gllm.recovery.node_layout import NodeMemory, NodeShape, repartition_layers
from gllm.recovery.partition import StageCosts, partition_layers
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.kv_cache import KVCache, block_bytes, describe_layout
from gllm.runtime.worker.probe import find_kinds
from tests.runtime.worker.test_executor import all_logits, difference, greedy, prompt_of
from tests.runtime.worker.test_greedy import Scheduled, check, check_greedy, prompts
from tests.support.engines.pipeline import Pipeline
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.models.tiny_models import FAMILIES, randomize, reference, save, sizes

SHARED = ["full", "shared", "full", "shared"]
LATENT_SIZE, INDEX_SIZE = 24, 16
"""Elements of a token's entry and of its index key in the tiny models."""
NATIVE = pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("deepseek-v3.2", tmp_path_factory.mktemp("deepseek-v3.2"))


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of GLM-5 with every other layer without an indexer, and transformers' model."""
    return save_shared(tmp_path_factory.mktemp("glm-shared"), indexer_types=SHARED)


def save_shared(folder: Path, **options: Any) -> tuple[Path, Any]:
    import transformers

    torch.manual_seed(1)
    config = transformers.GlmMoeDsaConfig(**sizes(FAMILIES["glm-dsa"]) | options)
    model = randomize(transformers.GlmMoeDsaForCausalLM(config).eval())
    model.save_pretrained(folder)
    return folder, model


def logits_of(model: Any, prompt: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(torch.tensor([prompt])).logits[0].float()


@pytest.mark.parametrize(("stages", "chunk"), [(1, 16), (2, 7)])
def test_layers_without_an_indexer_use_the_selection_before(
    shared: tuple[Path, Any], stages: int, chunk: int
) -> None:
    folder, model = shared
    prompt = prompt_of(37, 1)
    pipeline = Pipeline(folder, stages)
    pipeline.add(1, prompt)
    actual = all_logits(pipeline, 1, chunk)[-37:]
    assert difference(actual, logits_of(model, prompt)) < 1e-4


def test_bfloat16_is_as_close_as_that_of_transformers(folder: Path) -> None:
    """Both round index scores otherwise, so that a key at the border may be another one."""
    prompt = prompt_of(37, 2)
    exact = logits_of(reference("deepseek-v3.2"), prompt)
    other = type(reference("deepseek-v3.2")).from_pretrained(folder, dtype=torch.bfloat16)
    pipeline = Pipeline(folder, dtype="bfloat16")
    pipeline.add(1, prompt)
    own = (all_logits(pipeline, 1, 16)[-37:] - exact).norm(dim=1)
    theirs = (logits_of(other, prompt) - exact).norm(dim=1)
    assert own.median() < 1.5 * theirs.median()
    assert own.quantile(0.75) < 2 * theirs.quantile(0.75)


def test_up_to_the_number_of_selected_keys_attention_is_full(folder: Path, tmp_path: Path) -> None:
    """Also with an indexer: the same bits as without."""
    model = read_config(folder).model
    assert model.limit_length(12).num_selected is None
    assert model.limit_length(13) is model
    prompt = prompt_of(12, 3)
    sparse = Pipeline(folder)
    dense = Pipeline(folder)
    for executor in dense.executors:
        for layer in executor._stage.layers.layers:
            layer.attention.indexer = None  # type: ignore[union-attr]
            layer.attention.spec = replace(layer.attention.spec, num_selected=None, indexer=None)  # type: ignore[union-attr]
    for pipeline in (sparse, dense):
        pipeline.add(1, prompt)
    assert torch.equal(all_logits(sparse, 1, 5), all_logits(dense, 1, 5))


def test_a_longer_context_is_not_full_attention(folder: Path) -> None:
    """The rows of the tests select less than all, or they would show nothing."""
    prompt = prompt_of(37, 3)
    model = reference("deepseek-v3.2")
    before = logits_of(model, prompt)
    indexers = [layer.self_attn.indexer for layer in model.model.layers]
    try:
        for indexer in indexers:
            indexer.index_topk = 64
        after = logits_of(model, prompt)
    finally:
        for indexer in indexers:
            indexer.index_topk = 12
    assert torch.allclose(before[:12], after[:12], atol=1e-5)
    assert (before[13:] - after[13:]).abs().amax(dim=1).min() > 1e-3


@pytest.mark.full
def test_cached_prefixes_have_their_index_keys(folder: Path) -> None:
    """A second round that computes only the last tokens of its prompts, over two stages."""
    pipeline = Scheduled(folder, 2, 600)
    check(pipeline, "deepseek-v3.2")
    for seq, prompt in enumerate(prompts(), start=100):
        pipeline.add(seq, prompt)
    generated = pipeline.run()
    check_greedy("deepseek-v3.2", [generated[seq] for seq in sorted(generated) if seq >= 100])
    assert pipeline.scheduler.stats().prefix_hits >= 2 * (24 + 56 + 88)


@NATIVE
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_results_do_not_depend_on_chunks_and_others(folder: Path, dtype: str) -> None:
    prompt, rows = prompt_of(37, 4), []
    for chunks in ([37], [9, 10, 1, 17], [1] * 37):
        pipeline = Pipeline(folder, dtype=dtype)
        pipeline.add(1, prompt)
        pipeline.add(2, prompt_of(30, 5))
        for index, chunk in enumerate(chunks):
            own = [pipeline.row(1, chunk), *([pipeline.row(2, 30)] if index == 0 else [])]
            own.sort(key=lambda row: row.num_tokens > 1)
            batch, logits = pipeline.logits(pipeline.plan(own))
            index_of = [seq for seq, _ in batch.sampling.sequences].index(1)
        rows.append(logits[index_of])
    assert torch.equal(rows[0], rows[1])
    assert torch.equal(rows[0], rows[2])


@pytest.mark.parametrize("backend", ["torch", pytest.param("native", marks=NATIVE)])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_selected_keys_are_those_of_a_mask(backend: str, data: st.DataObject) -> None:
    """Rows of any start and length: attention under a mask of the highest scores."""
    num_selected = data.draw(st.integers(1, 9))
    starts = data.draw(st.lists(st.integers(0, 14), min_size=1, max_size=4))
    counts = sorted(data.draw(st.integers(1, 8)) for _ in starts)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    block, heads, blocks = 4, 3, 6
    context = np.array(starts) + np.array(counts)
    rows = PagedBatch(
        np.random.default_rng(3).permutation(blocks * len(starts)).reshape(len(starts), blocks),
        np.concatenate(([0], np.cumsum(counts))),
        context,
        counts.count(1),
        block,
        blocks * len(starts),
    )
    plan = plan_attention(rows, torch.float32, backend=backend)
    cache = torch.zeros(blocks * len(starts) + 1, block, 1, 20 + 8)
    keys, index_keys = cache.split((20, 8), dim=-1)
    tokens = int(context.sum())
    entries, own_keys = (torch.randn(tokens, 1, size, generator=generator) for size in (20, 8))
    slots = torch.from_numpy(
        np.concatenate([rows.slots(row, 0, end) for row, end in enumerate(context)])
    )
    store(entries, keys, slots)
    store(own_keys, index_keys, slots)
    total = sum(counts)
    query = torch.randn(total, heads, 20, generator=generator)
    index_query = torch.randn(total, 5, 8, generator=generator)
    weights = torch.randn(total, 5, generator=generator)
    selection = divide_tokens(plan, torch.float32, num_selected)
    sparse = selection.sparse_tokens
    assert len(sparse) + len(selection.dense_tokens) == total
    if len(sparse):
        selection.select(index_query[sparse], weights[sparse], index_keys)
    actual = selection.attend(query, keys, keys[..., :16], AttentionScaling(0.3))
    first = 0
    for start, count, end in zip(starts, counts, np.cumsum(context), strict=True):
        seen = slice(int(end) - start - count, int(end))
        for token, position in enumerate(range(start, start + count), start=first):
            own = slice(seen.start, seen.start + position + 1)
            scores = (own_keys[own, 0] @ index_query[token].T).relu() @ weights[token]
            kept = scores.sort(descending=True, stable=True).indices[:num_selected]
            scaled = query[token] @ entries[own, 0][kept].T * 0.3
            expected = scaled.softmax(-1) @ entries[own, 0][kept][:, :16]
            assert torch.allclose(actual[token], expected, atol=1e-4)
        first += count


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20), st.data())
def test_of_equal_scores_the_first_are_selected(scores: list[int], data: st.DataObject) -> None:
    count = data.draw(st.integers(1, len(scores)))
    best = sorted(range(len(scores)), key=lambda at: (-scores[at], at))[:count]
    assert select_highest(torch.tensor(scores).float(), count).tolist() == sorted(best)


def test_scores_that_are_no_numbers_select_some_keys() -> None:
    scores = torch.tensor([1.0, float("nan"), 2.0, float("nan")])
    assert len(select_highest(scores, 3)) == 3
    assert select_highest(torch.full((4,), float("nan")), 2).tolist() == [0, 1]


def test_index_keys_are_part_of_the_blocks(shared: tuple[Path, Any]) -> None:
    """A layer without an indexer has none; hand-offs and checksums see whole entries."""
    model = read_config(shared[0]).model
    cache = KVCache(model.layers, 7, 4, torch.float32)
    assert [len(layer) for layer in cache.layers] == [3, 2, 3, 2]
    keys, values, index_keys = cache.layers[0]
    assert keys.shape == (8, 4, 1, LATENT_SIZE)
    assert index_keys.shape == (8, 4, 1, INDEX_SIZE)
    assert keys.untyped_storage().data_ptr() == index_keys.untyped_storage().data_ptr()
    assert keys.untyped_storage().data_ptr() == values.untyped_storage().data_ptr()
    per_token = 4 * (4 * LATENT_SIZE + 2 * INDEX_SIZE)
    assert block_bytes(model.layers, 4, torch.float32) == 4 * per_token
    layout = describe_layout("model", range(4), model.layers, 0, 1, cache)
    assert layout.bytes_per_token == per_token
    assert [layer.key_bytes for layer in layout.layers] == [160, 96, 160, 96]


def test_a_stage_begins_at_an_indexer(shared: tuple[Path, Any]) -> None:
    model = read_config(shared[0]).model
    assert model.joined_layers == {1, 3}
    assert split_layers(model, 2) == [range(2), range(2, 4)]
    with pytest.raises(ValueError, match=r"begins a stage at layer 3, .* such as 2"):
        split_layers(model, 2, (3, 1))
    with pytest.raises(ValueError, match="of which 2 can begin a stage"):
        split_layers(model, 3)
    short = model.limit_length(12)
    assert split_layers(short, 2, (3, 1)) == [range(3), range(3, 4)]
    assert find_kinds(model.layers[:2]) == [0]


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_no_division_begins_a_stage_without_its_selection(data: st.DataObject) -> None:
    layers = data.draw(st.integers(2, 12))
    joined = frozenset(data.draw(st.sets(st.integers(1, layers - 1))))
    stages = data.draw(st.integers(1, layers - len(joined)))
    speeds = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    costs = StageCosts((1.0,) * layers, joined_layers=joined)
    parts = partition_layers([costs.scale(float(speed)) for speed in speeds])
    assert joined.isdisjoint(part.start for part in parts)
    names = [f"node{stage // 2}" for stage in range(stages)]
    cut = [(part.start, part.stop) for part in parts]
    shape = NodeShape(cut, [1] * stages, names)
    survivors = [*dict.fromkeys(names)][:1]
    memory = NodeMemory(StageCosts((1.0,) * layers, joined_layers=joined))
    left = repartition_layers(shape, survivors, [costs] * stages, memory)
    assert left is not None
    assert joined.isdisjoint(begin for begin, _ in left.layers)
    assert layers in {end for _, end in left.layers}


def test_published_sharing_of_selections() -> None:
    """By frequency and offset, by a pattern, and by types: as transformers reads them."""
    import transformers

    from gllm.models.config import build_model
    from gllm.models.multimodal import LanguageModelConfig

    base = sizes(FAMILIES["glm-dsa"]) | {"num_hidden_layers": 10, "mlp_layer_types": None}
    base = {key: value for key, value in base.items() if value is not None}
    for options in (
        {},
        {"index_topk_freq": 4},
        {"index_topk_freq": 3, "index_skip_topk_offset": 4},
        {"index_topk_pattern": "FSSFSSFSSF"},
        {"indexer_types": ["full"] + ["shared"] * 9, "index_topk_freq": 2},
    ):
        config = transformers.GlmMoeDsaConfig(**base, **options)
        raw = base | options | {"architectures": ["GlmMoeDsaForCausalLM"]}
        model = build_model(LanguageModelConfig("GlmMoeDsaForCausalLM", raw))
        attentions = [layer.attention for layer in model.layers]
        own = [
            "full" if isinstance(each, LatentAttentionSpec) and each.indexer else "shared"
            for each in attentions
        ]
        assert own == config.indexer_types


def test_gpus_refuse_texts_that_are_longer(folder: Path) -> None:
    engine = EngineConfig.from_options(str(folder), dtype="float32")
    arguments: Any = (read_config(folder), engine, 1, range(4), FakeQueues())
    with pytest.raises(FieldError, match="set --max-model-len 12") as error:
        CudaExecutor(*arguments)
    assert error.value.param == "max_model_len"
    short = replace(engine, max_model_len=12)
    assert CudaExecutor(arguments[0], short, *arguments[2:]).model.num_selected is None
    plan = plan_local_model(short, folder)
    assert plan.config.model.num_selected is None


def test_a_short_model_reads_no_indexers(folder: Path) -> None:
    engine = EngineConfig.from_options(str(folder), dtype="float32", max_model_len=12)
    pipeline = Pipeline(folder)
    executor = type(pipeline.executors[0])(pipeline.config, engine, 1, range(4))  # type: ignore[call-arg]
    executor.load(folder, lambda done, total: None)
    executor.allocate(64, 4)
    assert [len(layer) for layer in executor.layer_caches] == [2] * 4
    pipeline.executors = [executor]
    prompt = prompt_of(10, 1)
    pipeline.add(1, prompt)
    tokens = greedy(pipeline, 1, 2)
    wanted = logits_of(reference("deepseek-v3.2"), prompt + tokens)[9:11].argmax(-1)
    assert tokens == wanted.tolist()


@pytest.mark.parametrize("cache", ["fp8", "bfloat16"])
def test_a_narrow_cache_has_narrow_index_keys(folder: Path, cache: str) -> None:
    prompt = prompt_of(37, 6)
    pipeline = Pipeline(folder, kv_cache_dtype=cache)
    pipeline.add(1, prompt)
    actual = all_logits(pipeline, 1, 16)[-37:]
    wanted = logits_of(reference("deepseek-v3.2"), prompt)
    errors = (actual - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert errors.median() < (0.4 if cache == "fp8" else 0.02)
