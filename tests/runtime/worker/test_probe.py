"""The probe of a worker's speed: what it measures, and when it measures again."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.kernels.threads import using_num_threads
from gllm.messages.reports import StageMeasured
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.models.spec.feed_forward import MLPSpec
from gllm.models.spec.layer import LayerSpec
from gllm.recovery.placement import RankWorker, make_placement
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.probe import (
    DECODES_PER_CHUNK,
    MAX_KINDS,
    LayerProbe,
    ProbeCancelledError,
    StageProbe,
    StepSizes,
    find_kinds,
)
from gllm.runtime.worker.probe_cache import ProbeCache, create_key
from tests.runtime.test_recurrent_engine import make_folder
from tests.support.gpu.device_stage import as_on_a_device


def assign(stage: int, **options: Any) -> StageAssignment:
    """The assignment of one of two stages of the demo."""
    config = EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=2,
        max_model_len=512,
        threads=1,
        dtype="float32",
        **options,
    )
    placement = make_placement(1, [(0, 3), (3, 6)], [RankWorker(1), RankWorker(2)])
    return StageAssignment(placement, stage + 1, config, str(DEMO), "", is_probe=True)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Keep the threads of this process."""
    with using_num_threads(1):
        yield


def measure(assignment: StageAssignment, folder: Path, **options: Any) -> StageMeasured:
    probe = StageProbe(assignment, ProbeCache(folder), **{"measured_seconds": 0.01} | options)
    probe.run()
    return probe.result


class ForgetfulProbe(LayerProbe):
    """Layers on a device that does not keep weights."""

    def load(self) -> None:
        super().load()
        self.executor.keeps_weights = False


class UnloadedProbe(LayerProbe):
    """Layers that must not be loaded."""

    def load(self) -> None:
        raise AssertionError("it is measured again")


class ClockProbe(LayerProbe):
    """Layers with a clock of their own: 2 units per layer, 1 per step and 5 for the head."""

    def decode(self, should_sample: bool) -> float:
        head = 5.0 * (should_sample and self.executor.is_last)
        return 1.0 + 2.0 * len(self.executor.layers) + head

    prefill = decode


def test_layers_and_head_of_the_demo_are_measured(tmp_path: Path) -> None:
    first, last = (measure(assign(stage), tmp_path) for stage in (0, 1))
    for measured in (first, last):
        assert len(measured.layer_seconds) == len(measured.layer_bytes) == 6
        assert all(0 < seconds < 1 for seconds in measured.layer_seconds)
        assert measured.step_seconds >= 0
        assert measured.available_bytes is None
        assert measured.keeps_weights
    assert (first.stage, last.stage) == (0, 1)
    assert first.head_seconds == first.head_bytes == 0
    assert last.head_seconds >= 0
    model = read_config(DEMO).model
    size = model.vocab_size * model.hidden_size * 4
    assert first.embedding_bytes == size
    # The final norm belongs to the head.
    assert 0 <= last.head_bytes - size <= 8 * model.hidden_size
    assert last.embedding_bytes == 0
    weights = model.layers[0].weights_per_token(model.hidden_size)
    assert first.layer_bytes[1] >= 4 * weights


def test_a_measurement_is_kept(tmp_path: Path) -> None:
    assignment = assign(1)
    first = measure(assignment, tmp_path, make_probe=ForgetfulProbe)
    assert not first.keeps_weights
    again = measure(assignment, tmp_path, make_probe=UnloadedProbe)
    assert again.layer_seconds == first.layer_seconds
    assert again.keeps_weights, "nothing was loaded, so the process can go on"
    for path in tmp_path.iterdir():
        path.write_text("{")
    with pytest.raises(AssertionError, match="measured again"):
        measure(assignment, tmp_path, make_probe=UnloadedProbe)


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measure(assign(0), tmp_path / "file" / "folder").layer_seconds


def test_everything_that_decides_the_speed_is_in_the_key(tmp_path: Path) -> None:
    first = assign(0)
    keys = [
        create_key(first, "cpu: portable"),
        create_key(first, "cpu: other kernels"),
        create_key(assign(1), "cpu: portable"),
        create_key(assign(0, debug_slowdown=(2, 1)), "cpu: portable"),
        create_key(replace_config(first, threads=2), "cpu: portable"),
        create_key(replace_config(first, max_model_len=256), "cpu: portable"),
        create_key(replace_config(first, cpu_experts="1"), "cpu: portable"),
    ]
    assert create_key(assign(0, debug_slowdown=(1, 2)), "cpu: portable") == keys[0]
    keys.append(create_key(first, "cpu: portable", lambda is_gpu: "other"))
    other = shutil.copytree(DEMO, tmp_path / "model")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 1.5}))
    keys.append(create_key(replace_config(first, other), "cpu: portable"))
    assert len(set(keys)) == len(keys)


def replace_config(
    assignment: StageAssignment, folder: Path = DEMO, **options: Any
) -> StageAssignment:
    config = replace(assignment.config, **options)
    return StageAssignment(assignment.placement, assignment.sender, config, str(folder), "")


def test_the_factor_of_a_slowed_stage_counts(tmp_path: Path) -> None:
    clock = iter(range(10**9))
    options: dict[str, Any] = {
        "measured_seconds": 10.0,
        "make_probe": partial(LayerProbe, clock=lambda: float(next(clock))),
    }
    plain = measure(assign(0), tmp_path, **options)
    slowed = measure(assign(0, debug_slowdown=(3, 1)), tmp_path, **options)
    assert slowed.layer_seconds == pytest.approx([3 * each for each in plain.layer_seconds])
    assert slowed.step_seconds == pytest.approx(3 * plain.step_seconds)


def test_a_probe_that_nobody_needs_ends(tmp_path: Path) -> None:
    probe = StageProbe(assign(0), ProbeCache(tmp_path))
    probe.cancel()
    with pytest.raises(ProbeCancelledError):
        probe.run()


def test_one_layer_of_each_kind_is_measured() -> None:
    spec = read_config(DEMO).model.layers[0]
    assert isinstance(spec.mlp, MLPSpec)
    wide = replace(spec, mlp=replace(spec.mlp, intermediate_size=999))
    assert find_kinds([spec] * 4) == [1]
    assert find_kinds([spec]) == [0]
    assert find_kinds([spec, wide]) == [0, 1]
    assert find_kinds([wide, spec, spec, spec, wide]) == [1, 0]
    assert find_kinds([spec, wide] * 3) == [2, 1]
    others: list[LayerSpec] = [
        replace(spec, mlp=replace(spec.mlp, intermediate_size=size)) for size in range(9)
    ]
    assert len(find_kinds(others)) == MAX_KINDS


@pytest.mark.parametrize("block_size", [4, 16, 100])
def test_steps_use_each_block_once(block_size: int) -> None:
    sizes = StepSizes(3, 256, 500, block_size)
    rows = [*sizes.decode_rows(1, True), *sizes.chunk_rows(1, True)]
    blocks = [block for row in rows for block in row.new_block_ids]
    assert sorted(blocks) == list(range(sizes.num_blocks))
    for row in rows:
        assert row.start + row.num_tokens <= len(row.new_block_ids) * block_size


def test_a_probe_loads_layers_in_the_middle_on_any_stage() -> None:
    model = read_config(DEMO)
    config = EngineConfig.from_options("demo", pipeline_parallel_size=2)
    parts = [CpuExecutor(model, config, 2, range(begin, begin + 1)) for begin in range(6)]
    assert [each.is_first for each in parts] == [True] + [False] * 5
    assert [each.is_last for each in parts] == [False] * 5 + [True]


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_is_measured_on_a_device(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The groups of a device have more to do than those of a CPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("gllm.runtime.worker.cuda.backend.CudaRuntime", lambda index: HostQueues())
    config = EngineConfig.from_options(
        "demo", tensor_parallel_size=2, max_model_len=512, max_num_batched_tokens=64
    )
    placement = make_placement(1, [(0, 6)], [RankWorker(1), RankWorker(2)], [2])
    assignment = StageAssignment(placement, rank + 1, config, str(DEMO), "", is_probe=True)
    with as_on_a_device():
        measured = measure(assignment, tmp_path, make_probe=partial(LayerProbe, num_gpus=2))
    assert all(0 < seconds < 1 for seconds in measured.layer_seconds)
    assert measured.rank == rank
    assert measured.available_bytes is not None
    assert not measured.keeps_weights


def test_layers_whose_experts_are_on_the_host_take_less_memory_of_a_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr("gllm.runtime.worker.cuda.backend.CudaRuntime", lambda index: HostQueues())
    folder = make_folder("qwen2-moe", tmp_path / "model")
    options: dict[str, Any] = {"max_model_len": 64, "max_num_batched_tokens": 64}
    placement = make_placement(1, [(0, 4)], [RankWorker(1)], [1])

    def measure_bytes(cpu_experts: str) -> list[int]:
        config = EngineConfig.from_options(
            str(folder), dtype="float32", cpu_experts=cpu_experts, **options
        )
        assignment = StageAssignment(placement, 1, config, str(folder), "", is_probe=True)
        with as_on_a_device():
            make_probe = partial(LayerProbe, num_gpus=1)
            return measure(assignment, tmp_path / "cache", make_probe=make_probe).layer_bytes

    on_device, moved = measure_bytes("none"), measure_bytes("all")
    experts = 4 * 5 * 3 * 48 * 32
    # Layer 1 has none.
    saved = [before - after for before, after in zip(on_device, moved, strict=True)]
    assert saved == [experts, 0, experts, experts]


def test_the_head_is_what_sampling_adds(tmp_path: Path) -> None:
    share = 1 + 1 / DECODES_PER_CHUNK
    last = measure(assign(1), tmp_path, make_probe=ClockProbe)
    assert last.layer_seconds == pytest.approx([2.0 * share] * 6)
    assert last.step_seconds == pytest.approx(share)
    assert last.head_seconds == pytest.approx(5.0 * share)
    assert measure(assign(0), tmp_path, make_probe=ClockProbe).head_seconds == 0.0
