"""How long a device computes a step: its work, not the time that the host takes to hand it over."""

from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import StructuredOutput
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cuda import executor as executor_module
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.cuda.graphs import DecodeGraphs
from gllm.runtime.worker.cuda.readback import OutputReadback
from gllm.runtime.worker.cuda.staging import InputStaging
from gllm.runtime.worker.executor import DeviceTime
from gllm.scheduler.plan import ON_DEVICE
from tests.support.engines.pipeline import GREEDY, Pipeline
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import BLOCK_SIZE, NUM_BLOCKS, as_on_a_device, executor_on
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.models.tiny_models import save
from tests.support.text.grammar_writing import FOLDER, compiled_grammar

SLOW = 10_000.0
"""Seconds of the host's; a step has a few hundred operations of one second each."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama3", tmp_path_factory.mktemp("llama3"))


def slow_down(patch: pytest.MonkeyPatch, queues: FakeQueues, owner: Any, name: str) -> None:
    """Let the host take its time for a function while the device has nothing to do."""
    function = getattr(owner, name)

    def slow(*args: Any) -> Any:
        queues.elapse(SLOW)
        return function(*args)

    patch.setattr(owner, name, slow)


def steps(queues: FakeQueues, executor: CudaExecutor, book: Pipeline) -> list[DeviceTime]:
    """The times of a prompt and three decodes."""
    spent = []
    for tokens in (4, 1, 1, 1):
        given: dict[str, Any] = {} if tokens > 1 else {"token_ids": [ON_DEVICE]}
        batch = executor.prepare(book.plan([book.row(1, tokens, **given)]))
        output = executor.compute(batch, None)
        spent.append(executor.wait(batch))
        executor.sample(batch, output)
    return spent


@pytest.mark.parametrize("graphs", [0, 2])
@pytest.mark.parametrize("slow", full_but([True], [False, True]))
def test_a_slow_host_makes_no_step_longer(
    folder: Path, graphs: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    book.add(1, [5, 9, 3, 7])
    with as_on_a_device(), FakeQueues(1, eagerness=0.5) as queues:
        executor = executor_on(queues, folder, graphs=graphs)
        executor.register(RegisterSequences(1, 4, [5, 9, 3, 7], GREEDY))
        if slow:
            for owner, name in (
                (InputStaging, "put"),
                (DecodeGraphs, "fill_inputs"),
                (CudaExecutor, "_store_cached_tokens"),
                (OutputReadback, "start_copy"),
            ):
                slow_down(monkeypatch, queues, owner, name)
        spent = steps(queues, executor, book)
    for time in spent:
        assert 0 < time.busy <= time.elapsed
        assert time.busy < SLOW


def test_a_wait_for_a_grammar_is_no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = StructuredOutput(regex="[0-9]{9}")
    sampling = SequenceSamplingParams(temperature=0.0, grammar=compiled_grammar(wanted))
    book = Pipeline(FOLDER, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS)
    book.add(1, [5, 9, 3, 7])
    with as_on_a_device(), FakeQueues(1, eagerness=0.5) as queues:
        executor = executor_on(queues, FOLDER)
        begun = executor.register(RegisterSequences(1, 4, [5, 9, 3, 7], sampling))
        assert begun is not None
        begun.result(60)
        slow_down(monkeypatch, queues, executor_module, "collect_grammar_masks")
        spent = steps(queues, executor, book)
    for time in spent:
        assert 0 < time.busy < SLOW
        assert time.elapsed > SLOW
