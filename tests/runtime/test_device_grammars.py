"""Rows with grammars on a device: the CPU's tokens, forced ones among them, in every setting."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLTokenizer

from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import read_config
from gllm.runtime.base_executor import BaseExecutor
from gllm.runtime.grammars import GuideFactory
from tests.runtime.test_device_sampling import LOOKING, PROMPTS, OnDevice
from tests.runtime.test_logprobs import Told
from tests.support.gpu.device_stage import as_on_a_device
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.models.tiny_models import save

GRAMMAR = json.dumps({"grammars": [{"lark_grammar": 'start: ("abc" | "abd" | "wxyz" | /[0-4]/)+'}]})
SPECS = [
    SequenceSamplingParams(temperature=0.0, grammar=GRAMMAR),
    SequenceSamplingParams(seed=3, grammar=GRAMMAR),
    LOOKING,
    SequenceSamplingParams(
        seed=5, temperature=1.5, repetition_penalty=1.3, logit_bias={97: 2}, grammar=GRAMMAR
    ),
]
"""Beside them one that looks back at its output, without a grammar."""


class Bytes:
    """A vocabulary whose token i is byte i."""

    is_tokenizer_wrapper = True
    special_token_ids = ()
    bos_token_id = None

    def __init__(self, size: int) -> None:
        self.tokens = [bytes([token]) for token in range(size)]
        self.eos_token_id = 0

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama3", tmp_path_factory.mktemp("llama3"), seed=0)


@pytest.fixture
def queues() -> Iterator[FakeQueues]:
    with as_on_a_device(), FakeQueues(6) as made:
        yield made


def with_grammars(executor: BaseExecutor, folder: Path) -> None:
    """Give a stage whose folder has no tokenizer one of bytes."""
    size = read_config(folder).model.vocab_size
    executor._grammars = GuideFactory(folder, size, (0,))
    wrapper: Any = Bytes(size)
    executor._grammars._tokenizer = LLTokenizer(wrapper)


def run(pipeline: Told, folder: Path, rounds: int = 1) -> dict[int, list[int]]:
    with_grammars(pipeline.executors[-1], folder)
    for seq, (prompt, spec) in enumerate(zip(rounds * PROMPTS, rounds * SPECS, strict=True)):
        pipeline.ask(seq, prompt, spec)
    return pipeline.run()


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    answers = []
    for prompt, spec in zip(PROMPTS, SPECS, strict=True):
        pipeline = Told(folder, 1)
        with_grammars(pipeline.executors[-1], folder)
        pipeline.ask(0, prompt, spec)
        answers.append(pipeline.run()[0])
    return answers


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (40, {}),
        (40, {"async_scheduling": False}),
        (16, {}),
        pytest.param(16, {"prefix_cache": False}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_device_draws_what_the_cpu_draws(
    queues: FakeQueues,
    folder: Path,
    alone: list[list[int]],
    blocks: int,
    options: dict[str, Any],
) -> None:
    """Alone and in a crowd, with and without async scheduling, where sequences lose blocks."""
    rounds = 2 if blocks == 16 else 1
    pipeline = OnDevice(queues, folder, blocks, **options)
    generated = run(pipeline, folder, rounds)
    assert [generated[seq] for seq in sorted(generated)] == rounds * alone
    assert (pipeline.scheduler.stats().preemptions > 0) == (blocks == 16)
    for at, spec in enumerate(SPECS):
        text = bytes(alone[at]).decode()
        assert bool(set(text) <= set("abcdwxyz01234")) == bool(spec.grammar), text


def test_forced_tokens_save_steps_on_a_device(queues: FakeQueues, folder: Path) -> None:
    pipeline = OnDevice(queues, folder, 40, async_scheduling=False)
    with_grammars(pipeline.executors[-1], folder)
    only = json.dumps({"grammars": [{"lark_grammar": 'start: ("wxyz" | "abcdef")+'}]})
    pipeline.ask(0, PROMPTS[0], SequenceSamplingParams(temperature=0.0, grammar=only))
    tokens = pipeline.run()[0]
    assert set(bytes(tokens).decode()) <= set("wxyzabcdef")
    assert pipeline.scheduler.stats().steps <= 4
