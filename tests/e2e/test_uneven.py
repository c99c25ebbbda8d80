"""Stages of different speed: their layers at the start, and other layers under running requests."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from gllm.engine.llm_outputs import RequestOutput
from gllm.recovery.balance import BalanceLimits
from gllm.runtime.head import layer_planner
from tests.support.servers.recovery_load import HAS_EXACT_TEXTS

pytestmark = pytest.mark.full
PROMPTS = ["Once upon a time", "There was once a fox", "Not far from here", "The old man said"]
NUM_TOKENS = 150
OPTIONS: dict[str, Any] = {
    "progress": False,
    "pipeline_parallel_size": 2,
    "dtype": "float32",
    "threads": 1,
    "kv_cache_memory": 2**26,
}
PARAMS = SamplingParams(temperature=1, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache without measurements, and changes of layers within a second."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    quick = partial(BalanceLimits, window_seconds=0.3, num_windows=1, min_steps=10)
    monkeypatch.setattr(layer_planner, "BalanceLimits", quick)
    return tmp_path / "gllm" / "probes"


@pytest.fixture(scope="module")
def undisturbed() -> list[RequestOutput]:
    """The outputs of equally fast stages."""
    with LLM("demo", **OPTIONS) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        assert not llm.engine.status().recoveries
        return outputs


def layers_of(llm: LLM) -> list[int]:
    layers: list[int] = llm.engine.describe()["layers"]
    return layers


def test_layers_change_under_requests_without_an_error(undisturbed: list[RequestOutput]) -> None:
    slowed: dict[str, Any] = {"debug_slowdown": (2, 12), "layers": "even", "rebalance": True}
    with LLM("demo", **OPTIONS, **slowed) as llm:
        before = layers_of(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
        status = llm.engine.status()
        after = layers_of(llm)
    # Busy machines may show a further change.
    assert set(status.recoveries) == {"rebalanced"}
    assert status.num_resumed_requests >= 1
    assert after[0] > before[0]
    if HAS_EXACT_TEXTS:
        assert outputs == undisturbed
    assert [len(each.outputs[0].token_ids) for each in outputs] == [NUM_TOKENS] * len(PROMPTS)


def test_a_slow_stage_starts_with_fewer_layers(
    undisturbed: list[RequestOutput], cache: Path
) -> None:
    with LLM("demo", **OPTIONS, debug_slowdown=(1, 6)) as llm:
        layers = layers_of(llm)
        outputs = llm.generate(PROMPTS, PARAMS)
        assert not llm.engine.status().recoveries
    assert sum(layers) == 6
    assert layers[0] > layers[1]
    if HAS_EXACT_TEXTS:
        assert outputs == undisturbed
    assert len(list(cache.iterdir())) == 2, "one measurement per stage"
