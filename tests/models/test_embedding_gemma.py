"""EmbeddingGemma: bidirectional attention, the mean of a text's hidden states, dense layers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.preflight import plan_local_model, resolve_config
from gllm.kernels.attention_backends import AttentionRequirements, HeadShape, choose_backend
from gllm.kernels.attention_window import SymmetricWindow
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.identity import hash_model
from gllm.models.pooling import MeanPooling
from gllm.options.field_types import FieldError
from gllm.scheduler.plan import SampledToken, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.support.engines.pipeline import Pipeline
from tests.support.models.embedding_gemma import embed, save_embedding_gemma, write
from tests.support.text.tokenizers import byte_level
from tests.support.text.tokenizers import save as save_tokenizer

EMBEDS = SequenceSamplingParams(temperature=0.0, embeds=True)
LENGTHS = (1, 2, 9, 40, 90)
"""Of the texts: shorter and longer than the windows, which have 8 tokens on each side."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Folder of the model, and the model of transformers."""
    folder = tmp_path_factory.mktemp("embedding-gemma")
    return folder, save_embedding_gemma(folder)


@pytest.fixture
def copy(saved: tuple[Path, Any], tmp_path: Path) -> Path:
    """A folder without weights, to be changed."""
    for path in saved[0].rglob("*.json"):
        target = tmp_path / path.relative_to(saved[0])
        target.parent.mkdir(exist_ok=True)
        target.write_bytes(path.read_bytes())
    return tmp_path


def texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 131, (length,), generator=generator).tolist() for length in LENGTHS]


@pytest.mark.parametrize(
    ("stages", "dtype", "tolerance"),
    [(1, "float32", 1e-4), (2, "float32", 1e-4), (1, "bfloat16", 0.06)],
)
def test_embeddings_equal_the_reference(
    saved: tuple[Path, Any], stages: int, dtype: str, tolerance: float
) -> None:
    folder, model = saved
    pipeline = Pipeline(folder, stages, dtype=dtype)
    for seq, text in enumerate(texts()):
        pipeline.add(seq, text, EMBEDS)
    # Texts of one token are rows of decodes, which come first.
    pipeline.run([pipeline.row(seq, len(text)) for seq, text in enumerate(texts())])
    assert [detail.seq for detail in pipeline.logprobs] == [*range(len(LENGTHS))]
    for detail, text in zip(pipeline.logprobs, texts(), strict=True):
        expected = embed(model, folder, text)
        vector = torch.from_numpy(np.frombuffer(detail.embedding, "<f4").copy())
        assert vector.shape == (40,)
        assert torch.norm(vector - expected) <= tolerance * torch.norm(expected)


def test_tokens_see_those_behind_them_within_the_window(saved: tuple[Path, Any]) -> None:
    """Another last token changes the hidden states of the first one, by layers of full attention;
    those that slide see half of the window on each side."""
    model = read_config(saved[0]).model
    windows = [layer.attention.window for layer in model.layers]
    assert windows == [SymmetricWindow(size) for size in (9, 9, None, 9)]
    assert model.is_bidirectional
    assert model.embedding_size == 40


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_text_is_always_computed_in_one_piece(
    saved: tuple[Path, Any], data: st.DataObject
) -> None:
    folder = saved[0]
    config = EngineConfig.from_options(
        str(folder),
        max_prefill_tokens=data.draw(st.integers(32, 64)),
        max_num_seqs=data.draw(st.integers(1, 8)),
        block_size=8,
    )
    resolved = resolve_config(config, plan_local_model(config, folder))
    stages = data.draw(st.integers(1, 3))
    num_blocks = data.draw(st.integers(32, 80))
    scheduler = Scheduler(resolved.scheduler.resolve(stages, num_blocks, 256))
    lengths = data.draw(st.lists(st.integers(1, 255), min_size=1, max_size=12))
    for seq, length in enumerate(lengths):
        scheduler.add(SchedulerRequest(seq, [5] * length, 1), 0.0)
    in_flight, computed = [], []
    while scheduler.stats().unfinished:
        while (plan := scheduler.schedule(0.0)) is not None:
            in_flight.append(plan)
            computed += [(row.seq, row.start, row.num_tokens) for row in plan.rows]
        plan = in_flight.pop(0)
        samples = [SampledToken(row.seq, row.num_preemptions, 7) for row in plan.rows]
        scheduler.commit(StepResult(plan.step, samples))
    assert sorted(computed) == [(seq, 0, length) for seq, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"policy": "sarathi"}, "policy"),
        ({"kv_cache_disk": "/tmp/kv:1GiB"}, "kv_cache_disk"),
        ({"kv_transfer": "tcp"}, "kv_transfer"),
    ],
)
def test_options_that_divide_texts_are_refused(
    saved: tuple[Path, Any], options: dict[str, str], field: str
) -> None:
    config = EngineConfig.from_options(str(saved[0]), **options)
    with pytest.raises(FieldError, match="bidirectional") as error:
        plan_local_model(config, saved[0])
    assert error.value.param == field


def test_backends_of_causal_kernels_are_refused() -> None:
    shape = HeadShape(64, 64, is_symmetric=True)
    requirements = AttentionRequirements(
        "cpu", (0, 0), torch.float32, torch.float32, 16, frozenset([shape])
    )
    assert choose_backend("auto", requirements).name == "torch"
    with pytest.raises(ValueError, match="bidirectional"):
        choose_backend("native", requirements)
    with pytest.raises(ValueError, match="choose --device cpu"):
        choose_backend("auto", replace(requirements, device="cuda", capability=(9, 0)))


@pytest.mark.parametrize(
    ("file", "change", "error"),
    [
        ("1_Pooling/config.json", {"pooling_mode_mean_tokens": False}, "pooling ''"),
        ("1_Pooling/config.json", {"pooling_mode": "cls"}, "pooling 'cls'"),
        ("2_Dense/config.json", {"in_features": 47}, "2_Dense: in_features is 47, not 48"),
        ("2_Dense/config.json", {"activation_function": "torch.nn.GELU"}, "activation_function"),
        ("config.json", {"use_bidirectional_attention": False}, "pooling 'mean' with 2 dense"),
    ],
)
def test_other_poolings_are_refused(
    copy: Path, file: str, change: dict[str, Any], error: str
) -> None:
    write(copy / file, json.loads((copy / file).read_text()) | change)
    with pytest.raises(ModelError, match=error):
        read_config(copy)


@pytest.mark.parametrize(
    ("modules", "error"),
    [
        ({}, "format of sentence-transformers"),
        ([{"type": "sentence_transformers.models.LSTM", "path": ""}], "LSTM"),
        ([{"type": "sentence_transformers.models.Dense", "path": "../x"}], "not a subfolder"),
    ],
)
def test_other_modules_are_refused(copy: Path, modules: Any, error: str) -> None:
    write(copy / "modules.json", modules)
    with pytest.raises(ModelError, match=error):
        read_config(copy)


def test_dense_layers_have_to_have_their_tensors(saved: tuple[Path, Any], copy: Path) -> None:
    pooling = read_config(copy).model.pooling
    assert pooling is not None
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors"):
        MeanPooling(pooling, copy)
    source = saved[0] / "3_Dense" / "model.safetensors"
    (copy / "2_Dense" / "model.safetensors").write_bytes(source.read_bytes())
    with pytest.raises(ModelError, match=r"linear.weight \[40, 80\]"):
        MeanPooling(pooling, copy)


def test_dense_layers_are_part_of_the_model(saved: tuple[Path, Any], tmp_path: Path) -> None:
    save_embedding_gemma(tmp_path)
    before = hash_model(tmp_path)
    weights = tmp_path / "2_Dense" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 64
    weights.write_bytes(content)
    assert hash_model(tmp_path) != before


@pytest.mark.full
async def test_an_engine_embeds_and_does_not_generate(tmp_path: Path) -> None:
    model = save_embedding_gemma(tmp_path, vocab_size=402)
    save_tokenizer(tmp_path, byte_level())
    config = EngineConfig.from_options(
        str(tmp_path), dtype="float32", threads=1, kv_cache_memory=2**24, pipeline_parallel_size=2
    )
    async with Engine(config) as engine:
        vector = await engine.embed(texts()[3])
        assert vector == pytest.approx(embed(model, tmp_path, texts()[3]).tolist(), abs=1e-4)
        with pytest.raises(FieldError, match="/v1/embeddings"):
            await anext(engine.generate([5, 6], SamplingParams(max_tokens=2)))
