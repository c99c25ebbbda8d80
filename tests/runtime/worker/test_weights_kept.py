"""An executor takes over the weights of a closed one, and nothing else."""

import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gllm.config.engine import EngineConfig
from gllm.config.sampling import StructuredOutput
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.split import split_layers
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.executor import WeightMemoryError
from gllm.scheduler.plan import ScheduledRow, StepPlan
from tests.support.models.tiny_models import save
from tests.support.text.grammar_writing import FOLDER, compiled_grammar

PROMPT = [5, 9, 3, 7]


def make(folder: Path, stage: int = 0, stages: int = 1, **options: Any) -> CpuExecutor:
    config = read_config(folder)
    given = {"dtype": "float32", "block_size": 4, "max_model_len": 64, **options}
    engine = EngineConfig.from_options(str(folder), pipeline_parallel_size=stages, **given)
    return CpuExecutor(config, engine, stages, split_layers(config.model, stages)[stage])


def load(executor: CpuExecutor, folder: Path, previous: CpuExecutor | None = None) -> CpuExecutor:
    executor.load(folder, lambda done, total: None, [] if previous is None else [previous])
    return executor


def sampled(executor: CpuExecutor, num_blocks: int) -> list[int]:
    """Tokens of one sequence, in a KV cache of this size."""
    executor.allocate(num_blocks, 4)
    executor.register(RegisterSequences(1, 4, PROMPT, SequenceSamplingParams(temperature=0.0)))
    tokens: list[int] = []
    for step in range(8):
        count, start = (4, 0) if step == 0 else (1, 3 + step)
        blocks = [num_blocks - 1 - start // 4] if start % 4 == 0 else []
        row = ScheduledRow(1, 0, start, count, blocks, tokens[-1:], True)
        batch = executor.prepare(StepPlan(step, [row], []))
        results, _ = executor.sample(batch, executor.compute(batch, None))
        tokens.append(results[0].token_id)
    return tokens


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save("llama3", tmp_path)


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """The demo model, which has a tokenizer."""
    return Path(shutil.copytree(FOLDER, tmp_path / "demo"))


def weights_file(folder: Path) -> Path:
    """Return the only file of weights in a folder."""
    (path,) = folder.glob("*.safetensors")
    return path


def replace_weights(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Replace the file, so that weights that were mapped from the old one stay; the folder."""
    path = weights_file(folder)
    save_file(tensors, path.with_suffix(".new"), {"format": "pt"})
    path.with_suffix(".new").rename(path)
    return folder


def layer_of(name: str) -> int | None:
    """Return the layer of a tensor; None for embedding, final norm and LM head."""
    _, found, rest = name.partition("layers.")
    return int(rest.partition(".")[0]) if found else None


def check_released(executor: CpuExecutor) -> None:
    """The executor has no weights any more."""
    with pytest.raises(AttributeError):
        _ = executor.stage


def compiles(executor: CpuExecutor) -> bool:
    """Return True if a sequence with a grammar can be registered; its grammar is compiled."""
    grammar = compiled_grammar(StructuredOutput(regex="[a-z]{40}"))
    sampling = SequenceSamplingParams(temperature=0.0, grammar=grammar)
    compiling = executor.register(RegisterSequences(77, 4, PROMPT, sampling))
    assert compiling is not None
    return bool(compiling.result(60))


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"quantization": "int8"}])
def test_epochs_of_one_stage_sample_the_same(folder: Path, options: dict[str, Any]) -> None:
    executor = load(make(folder, **options), folder)
    expected = sampled(executor, 16)
    # Nothing can be read any more.
    weights_file(folder).unlink()
    # Other sizes, so that a program of an old cache would write where nothing is any more.
    for num_blocks in (20, 8, 32):
        keys = weakref.ref(executor.layer_caches[0][0])
        executor.close()
        assert keys() is None
        previous, executor = executor, make(folder, **options)
        load(executor, folder, previous)
        check_released(previous)
        assert executor.weight_bytes == previous.weight_bytes > 0
        assert sampled(executor, num_blocks) == expected


def test_a_program_is_recorded_again_for_the_new_cache(folder: Path) -> None:
    executor = load(make(folder), folder)
    sampled(executor, 16)
    layers = executor.stage.layers
    if not layers.is_program:
        pytest.skip("this build of kernels records no program")
    executor.close()
    successor = load(make(folder), folder, executor)
    assert successor.stage.layers is layers
    assert [layers.is_program, sampled(successor, 16) != [], layers.is_program] == [
        False,
        True,
        True,
    ]


@pytest.mark.parametrize(
    ("own", "others"),
    [
        ({}, {"dtype": "bfloat16"}),
        ({}, {"quantization": "int8"}),
        ({"stages": 2}, {"stages": 2, "stage": 1}),
        ({}, {"max_model_len": 32}),
    ],
)
def test_other_weights_are_freed_and_read_again(
    folder: Path, own: dict[str, Any], others: dict[str, Any]
) -> None:
    previous = load(make(folder, **others), folder)
    weights = weakref.ref(previous.stage)
    previous.close()
    executor = load(make(folder, **own), folder, previous)
    assert weights() is None
    if executor.is_first and executor.is_last:
        assert sampled(executor, 16) == sampled(load(make(folder), folder), 16)


def test_a_changed_folder_is_read_again(folder: Path, tmp_path: Path) -> None:
    previous = load(make(folder), folder)
    previous.close()
    other = save("llama3", tmp_path / "other", seed=3)
    executor = load(make(other), other, previous)
    assert sampled(executor, 16) == sampled(load(make(other), other), 16)


def test_progress_is_reported_at_once(folder: Path) -> None:
    previous = load(make(folder), folder)
    previous.close()
    progress: list[tuple[int, int]] = []
    executor = make(folder)
    executor.load(folder, lambda done, total: progress.append((done, total)), [previous])
    assert progress == [(executor.weight_bytes, executor.weight_bytes)]


def test_sequences_of_the_old_epoch_are_unknown(folder: Path) -> None:
    previous = load(make(folder), folder)
    sampled(previous, 16)
    previous.close()
    executor = load(make(folder), folder, previous)
    executor.allocate(16, 4)
    with pytest.raises(KeyError):
        executor.prepare(StepPlan(0, [ScheduledRow(1, 0, 0, 1, [0], [], True)], []))


def grammar_threads() -> set[threading.Thread]:
    """Return the threads of grammars in this process."""
    return {each for each in threading.enumerate() if each.name.startswith("grammar-")}


def test_the_vocabulary_of_grammars_is_kept(demo: Path) -> None:
    others = grammar_threads()
    executor = load(make(demo), demo)
    assert compiles(executor)
    # Nobody can read a vocabulary any more.
    (demo / "tokenizer.json").unlink()
    executor.close()
    successor = load(make(demo), demo, executor)
    executor.release_weights()
    assert compiles(successor)
    successor.allocate(16, 4)
    row = ScheduledRow(77, 0, 0, 4, [0], [], True)
    batch = successor.prepare(StepPlan(0, [row], []))
    # The mask of the next token is computed on a thread.
    successor.sample(batch, successor.compute(batch, None))
    assert any(each.name.startswith("grammar-masks") for each in grammar_threads() - others)
    before = torch.get_num_threads()
    successor.close()
    successor.release_weights()
    # The threads end by themselves, although a step still has the sequence's guide.
    assert batch.sampling.states[0].guide is not None
    end = time.monotonic() + 60
    while grammar_threads() - others:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert torch.get_num_threads() == before


def test_a_change_of_layers_reads_only_those_that_are_missing(folder: Path) -> None:
    whole = load(make(folder), folder)
    expected = sampled(whole, 16)
    whole.close()
    tensors = load_file(weights_file(folder))
    # Embedding and LM head share a matrix, so a stage that loses one of them reads the other.
    ends = {name: each for name, each in tensors.items() if layer_of(name) is None}
    replace_weights(folder, ends)
    num_layers = whole.model.num_layers
    first = load(make(folder, stages=2), folder, whole)
    assert first.layers.stop < num_layers
    first.close()
    missing = range(first.layers.stop, num_layers)
    replace_weights(folder, ends)
    with pytest.raises(ModelError, match=f"layers.{missing.start}"):
        load(make(folder), folder, first)
    first = load(make(folder, stages=2), replace_weights(folder, tensors))
    first.close()
    later = {name: each for name, each in tensors.items() if layer_of(name) in missing}
    again = load(make(folder), replace_weights(folder, ends | later), first)
    assert again.weight_bytes == whole.weight_bytes
    assert sampled(again, 16) == expected


def test_layers_are_read_beside_an_executor_that_computes(demo: Path) -> None:
    folder = demo
    expected = sampled(load(make(folder), folder), 16)
    running = load(make(folder, stages=2), folder)
    before = running.weight_bytes
    beside = make(folder)
    beside.load(folder, lambda done, total: None, running=running)
    assert running.weight_bytes == before
    shared = {*running.stage.layers.layers} & {*beside.stage.layers.layers}
    assert len(shared) == len(running.layers)
    running.close()
    successor = make(folder)
    successor.load(folder, lambda done, total: pytest.fail("read") if not total else None, [beside])
    check_released(beside)
    assert compiles(successor)
    assert sampled(successor, 16) == expected


def test_layers_that_do_not_fit_beside_an_executor_are_not_read(folder: Path) -> None:
    running = load(make(folder, stages=2), folder)
    beside = make(folder)
    with pytest.raises(WeightMemoryError, match="MiB of weights are missing"):
        beside.load(folder, lambda done, total: None, running=running, limit_bytes=1000)
    assert running.stage.layers.layers
    beside.load(folder, lambda done, total: None, running=running, limit_bytes=2**30)
