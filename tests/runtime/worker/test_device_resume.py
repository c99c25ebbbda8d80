"""Resumed requests on a device, where sampling looks back at tokens in slots of the KV cache."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from tests.runtime.worker.test_device_grammars import GRAMMAR, save_with_bytes
from tests.runtime.worker.test_device_sampling import LOOKING
from tests.support.engines.epochs import (
    CHUNKED,
    ChoiceOutput,
    Epoch,
    Request,
    Stages,
    run_undisturbed,
)
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    LONGEST,
    NUM_BLOCKS,
    as_on_a_device,
    executor_on,
)
from tests.support.gpu.fake_streams import FakeQueues

PROMPT = [5, 9, 3, 7, 7, 41, 42, 8, 9]
REQUESTS = {
    "looking back": LOOKING,
    "prompt log-probabilities": SequenceSamplingParams(seed=3, logprobs=1, prompt_logprobs=1),
    "grammar": SequenceSamplingParams(seed=5, presence_penalty=0.5, grammar=GRAMMAR),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_bytes(tmp_path_factory.mktemp("llama3"))


@pytest.fixture
def queues() -> Iterator[FakeQueues]:
    with as_on_a_device(), FakeQueues(6) as made:
        yield made


def stages_on(queues: FakeQueues, folder: Path, num_stages: int, **options: Any) -> Stages:
    config = EngineConfig.from_options(
        str(folder), **{"block_size": BLOCK_SIZE, "max_model_len": LONGEST} | CHUNKED | options
    )
    guesses = options.get("speculative_config")
    executors = [
        executor_on(queues, folder, stage, num_stages, graphs=4, speculative_config=guesses)
        for stage in range(num_stages)
    ]
    scheduler = config.scheduler.resolve(num_stages, NUM_BLOCKS, LONGEST)
    return Stages(executors, scheduler, True, queues.synchronize)


def reported(output: ChoiceOutput) -> tuple:
    """Return the parts of an output that do not depend on the last bits of logits."""
    return (
        output.tokens,
        [(entry.token, entry.top_ids) for entry in output.logprobs],
        [(entry.token, entry.top_ids) for entry in output.prompt_logprobs],
        output.num_first_tokens,
        output.end,
    )


@pytest.mark.parametrize(
    ("request_name", "every", "options"),
    [
        ("looking back", 4, {}),
        *(pytest.param(name, 1, {}, marks=pytest.mark.full) for name in REQUESTS),
        pytest.param("looking back", 1, {"async_scheduling": False}, marks=pytest.mark.long),
    ],
)
def test_death_at_every_position(
    queues: FakeQueues, folder: Path, request_name: str, every: int, options: dict[str, Any]
) -> None:
    """Or, in `make test`, at some of them."""
    stages = stages_on(queues, folder, 1, **options)
    request = Request(PROMPT, REQUESTS[request_name], 9, stop_ids=[0])
    (whole,) = run_undisturbed(stages, request)[-1]
    assert len(whole.tokens) > 6
    for length in range(0, len(whole.tokens), every):
        was_told = length % 3 > 0
        (output,) = Epoch(stages, request, [whole.cut(length, was_told)]).run()
        assert reported(output) == reported(whole), length


@pytest.mark.parametrize(
    ("num_stages", "prefix_cache"),
    [
        pytest.param(1, False, marks=pytest.mark.long),
        pytest.param(2, True, marks=pytest.mark.full),
    ],
)
def test_death_of_several_choices(
    queues: FakeQueues, folder: Path, num_stages: int, prefix_cache: bool
) -> None:
    """The last of two stages has tokens only from the prompt and from rows."""
    stages = stages_on(queues, folder, num_stages, prefix_cache=prefix_cache)
    request = Request(PROMPT, LOOKING, 8, n=3)
    snapshots = run_undisturbed(stages, request)
    whole = [reported(output) for output in snapshots[-1]]
    for outputs in snapshots[:-1:3]:
        resumed = Epoch(stages, request, outputs).run()
        assert [reported(output) for output in resumed] == whole
