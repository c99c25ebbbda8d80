"""Limits of containers from made-up /proc and /sys/fs/cgroup trees."""

import os
from pathlib import Path

import pytest
import torch

from gllm.runtime.worker import device

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """(/proc, /sys/fs/cgroup) of 1000 MiB, no limits."""
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", f"MemTotal: 9 kB\nMemAvailable:   {1000 * 1024} kB\n")
    write(proc / "cpuinfo", "processor : 0\nflags\t: fpu avx2\n")
    cgroups.mkdir()
    return proc, cgroups


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_no_cgroup_leaves_the_machine(machine: tuple[Path, Path]) -> None:
    assert device.count_cores(*machine, 8) == 8
    assert device.available_memory_bytes(*machine) == 1000 * MIB


def test_v2_limits_of_the_group_and_those_above(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self/cgroup", "0::/a/b\n")
    write(cgroups / "a/b/cpu.max", "max 100000\n")
    write(cgroups / "a/cpu.max", "250000 100000\n")
    write(cgroups / "a/b/memory.max", "max\n")
    write(cgroups / "a/memory.max", str(500 * MIB))
    write(cgroups / "a/memory.current", str(300 * MIB))
    write(cgroups / "a/memory.stat", f"anon 5\ninactive_file {100 * MIB}\n")
    assert device.count_cores(proc, cgroups, 8) == 3
    assert device.available_memory_bytes(proc, cgroups) == 300 * MIB


def test_v1_limits_where_the_path_is_the_hosts(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self/cgroup", "4:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/\n")
    write(cgroups / "cpu,cpuacct/cpu.cfs_quota_us", "50000")
    write(cgroups / "cpu,cpuacct/cpu.cfs_period_us", "100000")
    write(cgroups / "memory/memory.limit_in_bytes", str(400 * MIB))
    write(cgroups / "memory/memory.usage_in_bytes", str(450 * MIB))
    assert device.count_cores(proc, cgroups, 8) == 1
    assert device.available_memory_bytes(proc, cgroups) == 0


def test_v1_without_quota(machine: tuple[Path, Path]) -> None:
    proc, cgroups = machine
    write(proc / "self/cgroup", "3:cpu:/\n")
    write(cgroups / "cpu/cpu.cfs_quota_us", "-1")
    write(cgroups / "cpu/cpu.cfs_period_us", "100000")
    assert device.count_cores(proc, cgroups, 8) == 8


def test_this_machine_has_cores_and_memory() -> None:
    assert 1 <= device.count_cores() <= len(os.sched_getaffinity(0))
    assert device.available_memory_bytes() > 0
    (memory,) = device.list_kv_memories(None, [(1, 0, None)])
    assert memory.num_bytes > 0


def test_shares() -> None:
    assert device.threads_per_worker(3, 2) == 3
    assert device.threads_per_worker(None, 1000) == 1


def test_each_memory_has_the_parts_of_its_workers() -> None:
    workers: list[tuple[int, int, int | None]] = [(3, 5, None), (7, 1, None)]
    assert device.list_kv_memories(1000, workers) == [(1000, 10, 6)]
    workers = [(3, 0, 299), (7, 0, 490)]
    assert device.list_kv_memories(None, workers) == [(299, 3, 0), (490, 7, 0)]
    assert device.list_kv_memories(1000, workers) == [(299, 3, 0), (490, 7, 0), (1000, 10, 0)]


def test_gpus_that_are_asked_for_have_to_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for there in (True, False):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert device.count_gpus("auto") == 2 * there
        assert device.count_gpus("cpu") == 0
    with pytest.raises(ValueError, match="device is cuda"):
        device.count_gpus("cuda")


def test_gpus_compute_in_the_checkpoints_own_type() -> None:
    for name in ("bfloat16", "float16", "float32"):
        assert device.choose_compute_dtype("auto", name, "cuda") == getattr(torch, name)
    assert device.choose_compute_dtype("float16", "bfloat16", "cuda") == torch.float16


def test_bfloat16_needs_both_the_checkpoint_and_the_cpu(
    machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    proc, _ = machine
    monkeypatch.delenv("GLLM_CPU_KERNELS", raising=False)
    assert not device.has_native_bfloat16(proc)
    write(proc / "cpuinfo", "flags\t: fpu avx512_bf16 avx2\n")
    assert device.has_native_bfloat16(proc)
    for build, wanted in (
        ("avx2", False),
        ("avx512_bf16", True),
        ("amx_bf16", True),
        ("off", True),
    ):
        monkeypatch.setenv("GLLM_CPU_KERNELS", build)
        assert device.has_native_bfloat16(proc) == wanted
    monkeypatch.delenv("GLLM_CPU_KERNELS")
    for flags, dtype in (("avx512_bf16", torch.bfloat16), ("avx2", torch.float32)):
        write(proc / "cpuinfo", f"flags\t: fpu {flags}\n")
        assert device.choose_compute_dtype("auto", "bfloat16", proc=proc) == dtype
        assert device.choose_compute_dtype("auto", "float16", proc=proc) == torch.float32
    assert device.choose_compute_dtype("float16", "bfloat16") == torch.float16
