"""Rows with grammars on a device: the CPU's tokens, forced ones among them, in every setting."""

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from gllm.messages.sampling import SequenceSamplingParams
from tests.runtime.worker.test_device_sampling import LOOKING, PROMPTS, OnDevice
from tests.runtime.worker.test_logprobs import Told
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


def save_with_bytes(folder: Path) -> Path:
    """A model whose token i is byte i; token 0 ends a sequence."""
    save("llama3", folder, seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 0}))
    # GPT-2 writes bytes that are no printable characters as those from 256 on.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = count(256)
    names = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    size = config["vocab_size"]
    tokenizer = Tokenizer(BPE({name: byte for byte, name in enumerate(names[:size])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_bytes(tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def queues() -> Iterator[FakeQueues]:
    with as_on_a_device(), FakeQueues(6) as made:
        yield made


def run(pipeline: Told, rounds: int = 1) -> dict[int, list[int]]:
    for seq, (prompt, spec) in enumerate(zip(rounds * PROMPTS, rounds * SPECS, strict=True)):
        pipeline.ask(seq, prompt, spec)
    return pipeline.run()


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[int]]:
    answers = []
    for prompt, spec in zip(PROMPTS, SPECS, strict=True):
        pipeline = Told(folder, 1)
        pipeline.ask(0, prompt, spec)
        answers.append(pipeline.run()[0])
    return answers


@pytest.mark.parametrize(
    ("blocks", "options"),
    [
        (40, {}),
        pytest.param(40, {"async_scheduling": False}, marks=pytest.mark.full),
        pytest.param(16, {}, marks=pytest.mark.full),
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
    generated = run(pipeline, rounds)
    assert [generated[seq] for seq in sorted(generated)] == rounds * alone
    assert (pipeline.scheduler.stats().preemptions > 0) == (blocks == 16)
    for at, spec in enumerate(SPECS):
        text = bytes(alone[at]).decode()
        assert bool(set(text) <= set("abcdwxyz01234")) == bool(spec.grammar), text


def test_forced_tokens_save_steps_on_a_device(queues: FakeQueues, folder: Path) -> None:
    pipeline = OnDevice(queues, folder, 40, async_scheduling=False)
    only = json.dumps({"grammars": [{"lark_grammar": 'start: ("wxyz" | "abcdef")+'}]})
    pipeline.ask(0, PROMPTS[0], SequenceSamplingParams(temperature=0.0, grammar=only))
    tokens = pipeline.run()[0]
    assert set(bytes(tokens).decode()) <= set("wxyzabcdef")
    assert pipeline.scheduler.stats().steps <= 4
