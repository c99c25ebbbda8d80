"""The blocking engine that programs embed, with real workers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import EngineError
from gllm.engine.llm import LLM
from gllm.options.field_types import FieldError
from tests.e2e.conftest import POISON

GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logit_bias={POISON: -100.0})


@pytest.fixture(scope="module")
def llm(poisoned: Path) -> Iterator[LLM]:
    with LLM(
        str(poisoned),
        progress=False,
        pipeline_parallel_size=2,
        kv_cache_memory=2**24,
        threads=1,
    ) as made:
        yield made


def test_prompts_come_back_in_order_with_all_choices(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, n=2, max_tokens=6, seed=1, ignore_eos=True)
    mixed: Any = [[7, 8], "Hello", "Hello"]
    outputs = llm.generate(mixed, params)
    assert [output.prompt for output in outputs] == [[7, 8], "Hello", "Hello"]
    assert all(len(output.outputs) == 2 for output in outputs)
    assert outputs[1].outputs == outputs[2].outputs
    assert {c.finish_reason for output in outputs for c in output.outputs} == {"length"}
    assert outputs[1].outputs[0].token_ids != outputs[1].outputs[1].token_ids


@pytest.mark.full
def test_a_cache_in_fp8_is_half_as_large(tiny_model: Path) -> None:
    sizes = []
    for kept in ("auto", "fp8"):
        options: dict[str, Any] = {"dtype": "bfloat16", "device": "cpu", "kv_cache_dtype": kept}
        with LLM(str(tiny_model), progress=False, max_num_seqs=4, threads=1, **options) as made:
            (output,) = made.generate([[7, 8]], GREEDY)
            assert len(output.outputs[0].token_ids) == 10
            sizes.append((made.engine.status().num_kv_blocks, made.engine.status().kv_cache_bytes))
    assert sizes[1] == (sizes[0][0], sizes[0][1] // 2)


@pytest.mark.full
def test_attention_that_cannot_be_ends_the_start(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="attention_backend triton does not compute on device cpu"):
        LLM(str(tiny_model), progress=False, device="cpu", attention_backend="triton")
    # What only a worker knows: whether there is a GPU.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    wanted = "--attention-backend triton: does not compute on a CPU; choose auto"
    with pytest.raises(EngineError, match=wanted):
        LLM(str(tiny_model), progress=False, attention_backend="triton")


def test_without_parameters_the_models_defaults_hold(llm: LLM) -> None:
    assert llm.engine.model.defaults == {"temperature": 0.0}
    one, two = llm.generate([[5] * 500, [5] * 500])
    assert one.outputs == two.outputs


def test_a_chat(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Hi"}], GREEDY)
    assert len(answer.outputs[0].token_ids) == 10


def test_a_prompt_that_cannot_be_computed_fails_alone(llm: LLM) -> None:
    alone = llm.generate([[5, 6, 7]], GREEDY)
    bad, good = llm.generate([[POISON], [5, 6, 7]], GREEDY)
    assert "not finite" in bad.error
    assert (bad.outputs[0].finish_reason, good.error) == ("error", "")
    assert [good] == alone
    bad_vector, vector = llm.embed([[POISON], [5, 6, 7]])
    assert "not finite" in bad_vector.error
    assert len(vector.outputs.embedding) == 48


def test_bad_prompts_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompt in ([], [402], [-1], [5] * 512):
        with pytest.raises(FieldError):
            llm.generate([[5], prompt], GREEDY)
