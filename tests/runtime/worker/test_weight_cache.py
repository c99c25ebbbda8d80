"""Executors with a cache of packed weights compute the same bits from memory that they share."""

import ctypes
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.ranks import Ranks
from gllm.models.weight_cache.part_codec import encode_part
from gllm.options.field_types import FieldError
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.state_slots import create_direct_segments
from tests.support.full_cases import full_but
from tests.support.models.gguf_models import to_gguf
from tests.support.models.packed_models import STYLES, save_both
from tests.support.models.tiny_models import FAMILIES, save

PROMPT = [5, 9, 3, 7]
OPTIONS: list[dict[str, Any]] = [
    {"dtype": "float32"},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "quantization": "int8"},
    {"dtype": "float32", "quantization": "int4"},
]
QUICK = {"llama3", "qwen3-moe", "lfm2", "gemma3"}
"""Families with: a head of its own, experts, recurrent layers, a tied head and float32 scales."""


@pytest.fixture(autouse=True)
def without_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny models have none."""
    monkeypatch.setattr(CpuExecutor, "_create_grammars", lambda self, folder: None)


def load(
    folder: Path, layers: range | None = None, rank: int = 0, num_ranks: int = 1, **options: Any
) -> CpuExecutor:
    """Load some layers of a model, or all."""
    config = read_config(folder)
    layers = layers or range(config.model.num_layers)
    given = {"dtype": "float32", "block_size": 4, "max_model_len": 64, **options}
    engine = EngineConfig.from_options(str(folder), **given)
    executor = CpuExecutor(config, engine, 1, layers, rank=rank, num_ranks=num_ranks)
    executor.load(folder, lambda done, total: None)
    return executor


def compute(executor: CpuExecutor) -> tuple[Tensor, list[int]]:
    """Return logits and tokens of one sequence."""
    executor.allocate(16, 4, num_state_slots=4 if executor.state_bytes else 0)
    executor.register(RegisterSequences(1, 4, PROMPT, SequenceSamplingParams(temperature=0.0)))
    logits: list[Tensor] = []
    tokens: list[int] = []
    for step in range(6):
        count, start = (4, 0) if step == 0 else (1, 3 + step)
        blocks = [15 - start // 4] if start % 4 == 0 else []
        row = ScheduledRow(1, 0, start, count, blocks, tokens[-1:], True)
        segments = create_direct_segments([row]) if executor.state_bytes else ()
        batch = executor.prepare(StepPlan(step, [row], [], state_segments=segments))
        output = executor.compute(batch, None)
        logits.append(output.clone())
        results, _ = executor.sample(batch, output)
        tokens.append(results[0].token_id)
    return torch.cat(logits), tokens


def weight_bits(executor: CpuExecutor) -> list[tuple[Any, list[bytes]]]:
    """Return structure and memory of all parts."""
    encoded = [encode_part(part, executor.stage.ranks) for part in executor.stage.parts]
    return [
        (part.tree, [ctypes.string_at(span.address, span.num_bytes) for span in part.spans])
        for part in encoded
    ]


def read_only_ranges() -> list[range]:
    """Return the addresses of this process that are mapped from files of a cache."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [
        range(*(int(end, 16) for end in line[0].split("-")))
        for line in lines
        if line[1] == "r--s" and line[-1].endswith(".weights")
    ]


def check_shared(executor: CpuExecutor) -> None:
    """All weights are in files that are mapped read-only."""
    ranges = read_only_ranges()
    spans = [span for part in executor.stage.parts for span in encode_part(part, Ranks()).spans]
    assert spans
    for span in spans:
        assert any(span.address in mapped for mapped in ranges)


def files_of(cache: Path) -> dict[str, int]:
    """Return the inode of each file."""
    return {path.name: path.stat().st_ino for path in cache.iterdir()}


EACH_FORMAT = [(family, options) for family in sorted(QUICK) for options in OPTIONS]
FORMAT_IN_TURN = [
    (family, OPTIONS[index % len(OPTIONS)])
    for index, family in enumerate(FAMILIES)
    if family not in QUICK
]


@pytest.mark.parametrize(("family", "options"), full_but(EACH_FORMAT, EACH_FORMAT + FORMAT_IN_TURN))
def test_logits_are_the_same_with_and_without(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    folder, cache = save(family, tmp_path / "model"), tmp_path / "cache"
    try:
        plain = load(folder, **options)
    except (FieldError, ValueError) as error:
        pytest.skip(f"not served so: {error}")
    logits, tokens = compute(plain)
    for _ in range(2):
        executor = load(folder, weight_cache=str(cache), **options)
        check_shared(executor)
        assert executor.weight_bytes == plain.weight_bytes
        again, same_tokens = compute(executor)
        assert torch.equal(again, logits)
        assert same_tokens == tokens
    assert len(files_of(cache)) == len(plain.layers) + 1


def test_a_second_load_reads_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, cache = save("llama3", tmp_path / "model"), tmp_path / "cache"
    load(folder, weight_cache=str(cache))
    files = files_of(cache)
    monkeypatch.setattr("gllm.models.loader.Checkpoint.read_parts", None)
    monkeypatch.setattr("gllm.models.loader.Checkpoint.read_matrices", None)
    with caplog.at_level(logging.INFO):
        load(folder, weight_cache=str(cache))
    assert files_of(cache) == files
    assert f"weight cache {cache}: 5 of 5 parts mapped, 0 written" in caplog.text


def test_another_cut_uses_the_same_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = save("llama3", tmp_path / "model"), str(tmp_path / "cache")
    with caplog.at_level(logging.INFO):
        load(folder, weight_cache=cache)
        for layers, counts in (
            (range(1), "1 of 2 parts mapped, 1 written"),
            (range(1, 3), "2 of 2 parts mapped, 0 written"),
            (range(3, 4), "1 of 2 parts mapped, 1 written"),
            (range(2, 4), "3 of 3 parts mapped, 0 written"),
        ):
            executor = load(folder, layers, weight_cache=cache)
            assert weight_bits(executor) == weight_bits(load(folder, layers))
            assert caplog.records[-1].message.endswith(counts)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_ranks_have_files_of_their_own(tmp_path: Path, quantization: str) -> None:
    folder, cache = save("qwen3-moe", tmp_path / "model", heads=8), tmp_path / "cache"
    for count in (5, 10):
        rank = count // 5 - 1
        options: dict[str, Any] = {"rank": rank, "num_ranks": 2, "quantization": quantization}
        plain = weight_bits(load(folder, **options))
        for _ in range(2):
            assert weight_bits(load(folder, **options, weight_cache=str(cache))) == plain
        assert len(files_of(cache)) == count


@pytest.mark.parametrize("kind", full_but(["Q8_0"], ["Q4_0", "Q5_1", "Q8_0"]))
def test_gguf_files_are_cached(tmp_path: Path, kind: str) -> None:
    checkpoint = save("llama3", tmp_path / "checkpoint", heads=8)
    folder = to_gguf(checkpoint, tmp_path / "gguf", kind)
    plain = weight_bits(load(folder))
    for _ in range(2):
        assert weight_bits(load(folder, weight_cache=str(tmp_path / "cache"))) == plain


def test_weights_go_to_the_next_epoch_in_shared_memory(tmp_path: Path) -> None:
    folder, cache = save("llama3", tmp_path / "model"), str(tmp_path / "cache")
    first = load(folder, weight_cache=cache)
    expected = compute(first)[1]
    first.close()
    second = CpuExecutor(
        read_config(folder),
        EngineConfig.from_options(
            str(folder), dtype="float32", block_size=4, max_model_len=64, weight_cache=cache
        ),
        1,
        range(4),
    )
    second.load(folder, lambda done, total: None, [first])
    check_shared(second)
    assert compute(second)[1] == expected
    second.close()
    second.release_weights()
    assert not read_only_ranges()


def test_a_full_disk_changes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = save("llama3", tmp_path / "model"), tmp_path / "cache"
    expected, _ = compute(load(folder))
    allocate, calls = os.posix_fallocate, []

    def fail_later(descriptor: int, offset: int, size: int) -> None:
        calls.append(size)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        allocate(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", fail_later)
    assert torch.equal(compute(load(folder, weight_cache=str(cache)))[0], expected)
    assert len(files_of(cache)) == 2
    monkeypatch.undo()
    monkeypatch.setattr(CpuExecutor, "_create_grammars", lambda self, folder: None)
    assert torch.equal(compute(load(folder, weight_cache=str(cache)))[0], expected)
    assert len(files_of(cache)) == 5


def test_damaged_layers_are_read_from_the_model(tmp_path: Path) -> None:
    folder, cache = save("llama3", tmp_path / "model"), tmp_path / "cache"
    expected, _ = compute(load(folder, weight_cache=str(cache)))
    for number, path in enumerate(sorted(cache.iterdir())):
        content = bytearray(path.read_bytes())
        content[number * 50] ^= 16
        path.write_bytes(content if number else content[:-10])
    for _ in range(2):
        executor = load(folder, weight_cache=str(cache))
        check_shared(executor)
        assert torch.equal(compute(executor)[0], expected)


@pytest.mark.parametrize("style", full_but(["gptq 64 act-order"], STYLES))
def test_folders_of_few_bits_are_cached(tmp_path: Path, style: str) -> None:
    folder, _ = save_both("Llama", style, tmp_path)
    plain = weight_bits(load(folder))
    for _ in range(2):
        assert weight_bits(load(folder, weight_cache=str(tmp_path / "cache"))) == plain


@pytest.mark.parametrize("device", ["cuda", "emulated:L20"])
def test_other_devices_are_refused_by_name(device: str) -> None:
    with pytest.raises(FieldError, match="weight_cache has weights as the kernels of CPUs") as info:
        EngineConfig.from_options("demo", device=device, weight_cache="/tmp/cache")
    assert info.value.param == "weight_cache"


def test_a_gpu_that_was_found_is_refused(tmp_path: Path) -> None:
    folder = save("llama3", tmp_path)
    engine = EngineConfig.from_options(str(folder), weight_cache="/tmp/cache")
    config = read_config(folder)
    with pytest.raises(FieldError, match="set device to cpu"):
        CpuExecutor(config, engine, 1, range(4), torch.device("cuda"))
