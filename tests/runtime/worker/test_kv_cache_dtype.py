"""What is cached in fewer bits, and what reads it: less memory, logits nearby."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.engine.preflight import plan_local_model
from gllm.kernels import attention_torch
from gllm.kernels.native.library import load_library
from gllm.options.field_types import FieldError
from gllm.runtime.worker.device import choose_cache_dtype
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import save

DENSE = ("llama3", "gemma2", "bloom", "baichuan2-13b")
"""Grouped queries, windows and softcap, ALiBi, both ways of slopes."""
LATENT = ("deepseek-v2", "deepseek-v3")
ROUNDING = {"float16": 2**-11, "bfloat16": 2**-8, "int8": 2**-7, "fp8": 2**-4}
"""By how much of itself a cached number changes at most."""
GROWTH = 2.5
"""|a - b| / |b| of all logits, in ROUNDING: 0.156 for fp8. These models are 48 wide with weights
spread wide, so that errors hardly average out: bfloat16 arithmetic alone is off by 0.026."""
WITH_EXPERTS = 0.25
"""The same bound where a router may pick another expert, which bfloat16 arithmetic alone makes off
by 0.13."""
FP8 = torch.float8_e4m3fn


def logits(folder: Path, kept: str, dtype: str = "float32", stages: int = 1) -> torch.Tensor:
    """Of 37 tokens, each behind what is cached of those before: chunks of 20 and 16, a decode."""
    pipeline = Pipeline(folder, stages, dtype=dtype, kv_cache_dtype=kept)
    tokens = torch.randint(131, (37,), generator=torch.Generator().manual_seed(1)).tolist()
    pipeline.add(1, tokens)
    for count in (20, 16):
        pipeline.logits(pipeline.plan([pipeline.row(1, count)]))
    pipeline.logits(pipeline.plan([pipeline.row(1, 1)]))
    return pipeline.logits(pipeline.decodes_again(1))[1]


def error(folder: Path, kept: str) -> float:
    wanted, actual = logits(folder, "auto"), logits(folder, kept, stages=2)
    return ((actual - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize("family", full_but(("gemma2", "bloom"), DENSE))
def test_logits_are_off_by_what_rounding_takes(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    errors = {kept: error(folder, kept) for kept in ROUNDING}
    for kept, rounding in ROUNDING.items():
        assert rounding / 5 < errors[kept] < rounding * GROWTH, errors
    # Nothing but rounding: 16 times as coarse, 16 times the error.
    assert 12 < errors["fp8"] / errors["bfloat16"] < 20, errors


@pytest.mark.parametrize("family", LATENT)
def test_latents_are_kept_in_fp8_too(family: str, tmp_path: Path) -> None:
    assert 0.01 < error(save(family, tmp_path), "fp8") < WITH_EXPERTS


@pytest.mark.parametrize("family", LATENT)
def test_latents_are_not_kept_in_int8(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    config = EngineConfig.from_options(str(folder), kv_cache_dtype="int8")
    with pytest.raises(FieldError, match=r"int8 is not implemented for latent attention \(MLA\)"):
        plan_local_model(config, folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kept", ["fp8_e4m3", "int8_per_token_head"])
def test_any_arithmetic_reads_8_bits(dtype: str, kept: str, tmp_path: Path) -> None:
    folder = save("llama3", tmp_path)
    wanted, actual = logits(folder, "auto"), logits(folder, kept, dtype)
    assert ((actual - wanted).norm() / wanted.norm()).item() < ROUNDING["fp8"] * GROWTH


def test_blocks_are_as_large_as_what_they_hold(tmp_path: Path) -> None:
    folder = save("llama3", tmp_path)
    sizes = {}
    for kept in ("auto", "bfloat16", "fp8", "int8"):
        pipeline = Pipeline(folder, kv_cache_dtype=kept)
        executor = pipeline.executors[0]
        sizes[kept] = executor.block_bytes
        held = [tensor for pair in executor.layer_caches for tensor in pair]
        # One block more than can be used stays zero.
        assert sum(tensor.nbytes for tensor in held) == 65 * executor.block_bytes
        assert {tensor.dtype for tensor in held} == {executor.cache_dtype}
        assert not any(tensor.view(torch.uint8).any() for tensor in held)
    assert sizes["auto"] == 2 * sizes["bfloat16"] == 4 * sizes["fp8"]
    # Heads of 8 elements, with a scale of 4 bytes.
    assert sizes["int8"] * 8 == sizes["fp8"] * (8 + 4)


def test_the_log_tells_the_choice_once_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A stage that is slower than it could be says so louder."""
    caplog.set_level(logging.INFO, "gllm.runtime.worker.executor")
    folder = save("llama3", tmp_path)
    one = Pipeline(folder, attention_backend="torch")
    two = Pipeline(folder, 2, attention_backend="torch", kv_cache_dtype="fp8")
    for executor in one.executors + two.executors:
        executor.log_choices()
    told = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in told] == ["WARNING"] * 3
    assert told[0][1].startswith("attention by torch (as requested); KV cache in torch.float32, ")
    if load_library() is not None:
        caplog.clear()
        Pipeline(folder, kv_cache_dtype="fp8").executors[0].log_choices()
        (record,) = caplog.records
        assert record.levelname == "INFO"
        assert record.getMessage().startswith("attention by native (")


def test_torch_is_what_computes_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where layers could be one program of compiled kernels."""
    folder = save("llama3", tmp_path)
    called = []
    compute = attention_torch.paged_attention

    def counted(*given: Any) -> torch.Tensor:
        called.append(1)
        return compute(*given)

    monkeypatch.setattr(attention_torch, "paged_attention", counted)
    pipeline = Pipeline(folder, attention_backend="torch")
    pipeline.add(1, [5, 6, 7])
    pipeline.run([pipeline.row(1, 3)])
    assert len(called) == 4
    assert not pipeline.executors[0].stage.layers.is_program


def test_a_backend_that_cannot_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    folder = save("llama3", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FieldError, match="--attention-backend triton: does not compute on a CPU"):
        Pipeline(folder, attention_backend="triton")


def test_fp8_needs_a_gpu_that_has_it() -> None:
    for name in ("fp8", "fp8_e4m3"):
        for capability in (None, (8, 9), (9, 0), (10, 0), (12, 0)):
            assert choose_cache_dtype(name, torch.bfloat16, capability) == FP8
        wanted = rf"--kv-cache-dtype {name} needs .* 8\.9 or more, but this one has 8\.0: choose"
        with pytest.raises(FieldError, match=wanted):
            choose_cache_dtype(name, torch.bfloat16, (8, 0))
    for compute in (torch.float32, torch.bfloat16):
        assert choose_cache_dtype("auto", compute, (8, 0)) == compute
        assert choose_cache_dtype("bfloat16", compute, None) == torch.bfloat16
        assert choose_cache_dtype("float16", compute, (7, 5)) == torch.float16


@pytest.mark.skipif(load_library() is None, reason="programs are of compiled kernels")
@pytest.mark.parametrize(("kept", "is_program"), [("int8", True), ("fp8", False)])
def test_programs_read_and_write_int8_in_place(kept: str, is_program: bool, tmp_path: Path) -> None:
    pipeline = Pipeline(save("llama3", tmp_path), kv_cache_dtype=kept)
    pipeline.add(1, [5, 6, 7])
    pipeline.run([pipeline.row(1, 3)])
    assert pipeline.executors[0].stage.layers.is_program == is_program
