"""Resources of the machine: cores, memory, GPUs, and the number formats they support.

It respects CPU affinities and the limits of containers (cgroups v1 and v2). torch is imported only
by functions that need it.
"""

import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.config.engine import QUANTIZATION_DEVICES
from gllm.kernels.native.builds import AMX, BFLOAT16, BUILD_VARIABLE, OFF
from gllm.options.field_types import FieldError
from gllm.runtime.worker.slow_steps import WaitCounters
from gllm.scheduler.kv_memory import KvMemory

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
"""Mount point of the process file system."""
CGROUPS = Path("/sys/fs/cgroup")
"""Mount point of the cgroup file systems."""
KV_SHARE = 0.25
"""Share of the available memory that the KV cache takes by default."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with 8-bit floats (Ada; Hopper is 9.0)."""


def count_cores(proc: Path = PROC, cgroups: Path = CGROUPS, num_allowed: int | None = None) -> int:
    """Return the CPU cores that this process may use, by affinity and cgroup quota; at least 1.

    Args:
        proc: mount point of the process file system.
        cgroups: mount point of the cgroup file systems.
        num_allowed: cores by affinity; None for the affinity of this process.
    """
    allowed = float(num_allowed or len(os.sched_getaffinity(0)))
    for folder in _cgroup_folders("cpu", proc, cgroups):
        quota, period = _read_quota(folder)
        if quota > 0 and period > 0:
            allowed = min(allowed, quota / period)
    return max(1, -int(-allowed // 1))


def read_wait_counters(proc: Path = PROC, cgroups: Path = CGROUPS) -> WaitCounters:
    """Return what has kept this process from computing since it began.

    Args:
        proc: mount point of the process file system.
        cgroups: mount point of the cgroup file systems.
    """
    waited_ns = 0
    for task in (proc / "self/task").iterdir():
        # A thread may have ended, or its kernel does not count.
        with suppress(OSError, IndexError):
            waited_ns += int((task / "schedstat").read_text().split()[1])
    throttled = 0.0
    for folder in _cgroup_folders("cpu", proc, cgroups):
        stat = _read_numbers(folder / "cpu.stat")
        # Microseconds in v2, nanoseconds in v1.
        seconds = stat.get("throttled_usec", 0) / 1e6 + stat.get("throttled_time", 0) / 1e9
        throttled = max(throttled, seconds)
    stolen = 0.0
    with suppress(OSError, IndexError):
        stolen = int((proc / "stat").read_text().split(maxsplit=9)[8]) / os.sysconf("SC_CLK_TCK")
    reads = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    return WaitCounters(waited_ns / 1e9, throttled, stolen, reads)


def available_memory_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Return the bytes that this process may still allocate, by free memory and cgroup limits."""
    available = _read_numbers(proc / "meminfo")["MemAvailable"] * 1024
    for folder in _cgroup_folders("memory", proc, cgroups):
        # The second name of each pair is the name in cgroup v1.
        limit = _read_number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _read_number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        stat = _read_numbers(folder / "memory.stat")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        available = min(available, limit - used + reclaimable)
    return max(available, 0)


def list_kv_memories(
    requested_bytes: int | None, workers: Sequence[tuple[int, int, int | None]]
) -> list[KvMemory]:
    """Return the memories of this machine's workers for KV blocks and states.

    It has to be called with the weights loaded.

    Args:
        requested_bytes: KV cache of all workers together; None for KV_SHARE of this machine's
            available memory and all of the workers' own memory.
        workers: for each worker, the bytes of its parts of a block and of a state slot, and the
            available bytes of its own memory, None for a worker in the memory of this machine.
    """
    memories = [KvMemory(own, block, state) for block, state, own in workers if own is not None]
    if requested_bytes is None and not memories:
        requested_bytes = int(available_memory_bytes() * KV_SHARE)
    if requested_bytes is not None:
        blocks, states, _ = zip(*workers, strict=True)
        memories.append(KvMemory(requested_bytes, sum(blocks), sum(states)))
    return memories


def threads_per_worker(requested: int | None, num_workers: int) -> int:
    """Return the number of compute threads of each worker on a machine.

    Args:
        requested: configured number; None for an equal share of this machine's cores.
        num_workers: workers that share this machine.
    """
    return requested or max(1, count_cores() // num_workers)


def choose_compute_dtype(
    requested: str, checkpoint: str, device: str = "cpu", proc: Path = PROC
) -> "torch.dtype":
    """Return the dtype of weights and activations in computations.

    Args:
        requested: the configuration's `dtype`. auto is the checkpoint's dtype on GPUs; on CPUs
            bfloat16 if the checkpoint has it and the CPU multiplies it natively, else float32.
        checkpoint: dtype of the checkpoint.
        device: type of the device, cpu or cuda.
        proc: mount point of the process file system, which describes the CPU.
    """
    import torch

    if requested == "auto" and device == "cuda":
        requested = checkpoint
    if requested == "auto":
        is_native = checkpoint == "bfloat16" and has_native_bfloat16(proc)
        requested = "bfloat16" if is_native else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        requested
    ]


def choose_cache_dtype(
    requested: str, compute: "torch.dtype", capability: tuple[int, int] | None
) -> "torch.dtype":
    """Return the dtype of the KV cache.

    Args:
        requested: the configuration's `kv_cache_dtype`; auto is the dtype of the computation.
        compute: dtype of weights and activations.
        capability: compute capability of the GPU; None on a CPU.

    Raises:
        FieldError: 8-bit floats are requested on a GPU without them, or 8-bit integers on a GPU.
    """
    import torch

    if requested.startswith("fp8"):
        if capability is not None and capability < FP8_CAPABILITY:
            needed, actual = _format_version(FP8_CAPABILITY), _format_version(capability)
            raise FieldError(
                "kv_cache_dtype",
                f"--kv-cache-dtype {requested} needs a GPU of compute capability {needed} or more, "
                f"but this one has {actual}: choose auto, bfloat16 or float16",
            )
        return torch.float8_e4m3fn
    if requested.startswith("int8"):
        if capability is not None:
            raise FieldError(
                "kv_cache_dtype",
                f"--kv-cache-dtype {requested} has no kernels for GPUs: choose fp8 or auto",
            )
        return torch.int8
    return {"auto": compute, "bfloat16": torch.bfloat16, "float16": torch.float16}[requested]


def check_quantization(requested: str, device: str) -> None:
    """Raise FieldError if a type of device cannot compute the configured `quantization`."""
    devices = QUANTIZATION_DEVICES[requested]
    # torch's meta device computes nothing and takes every format.
    if device != "meta" and device not in devices:
        raise FieldError(
            "quantization",
            f"--quantization {requested} has no kernels for device {device}: leave it out, serve a "
            f"checkpoint whose weights are 8-bit floats, or choose --device {devices[0]}",
        )


def _format_version(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def count_gpus(requested: str) -> int:
    """Return the number of GPUs to use for a configuration's `device`; 0 for other devices.

    Raises:
        FieldError: `cuda` is requested and there is no GPU.
    """
    import torch

    can_use = requested in ("auto", "cuda") and torch.cuda.is_available()
    num_gpus = torch.cuda.device_count() if can_use else 0
    if requested == "cuda" and not num_gpus:
        message = "device is cuda, but PyTorch finds no GPU here: choose cpu or auto"
        raise FieldError("device", message)
    return num_gpus


def describe_device(is_gpu: bool, proc: Path = PROC) -> str:
    """Return the model name of the current GPU if `is_gpu` is set, else of the CPU."""
    if is_gpu:
        import torch

        return torch.cuda.get_device_name()
    try:
        lines = (proc / "cpuinfo").read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line for line in lines if line.startswith("model name")), "unknown")


def find_gpu_models(proc: Path = PROC) -> set[str]:
    """Return the model of each kind of NVIDIA GPU in this machine, without importing torch.

    Returns:
        Lines of the driver's files, such as "Model: NVIDIA H200".
    """
    names = set()
    for path in proc.glob("driver/nvidia/gpus/*/information"):
        with suppress(OSError):
            lines = path.read_text().splitlines()
            names |= {line for line in lines if line.startswith("Model:")}
    return names


def has_native_bfloat16(proc: Path = PROC) -> bool:
    """Return True if the CPU multiplies bfloat16 natively (AVX-512 BF16 or AMX).

    The result is False if GLLM_CPU_KERNELS selects compiled kernels that do not use it.
    """
    if os.environ.get(BUILD_VARIABLE, BFLOAT16) not in (AMX, BFLOAT16, OFF):
        return False
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _cgroup_folders(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and its ancestors, of v2 and v1.

    In a container the path is the host's, of which only a tail or nothing is mounted: missing
    folders are skipped.
    """
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        inner = root / path.lstrip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(root) and folder.is_dir():
                yield folder


def _read_quota(folder: Path) -> tuple[float, float]:
    """Return CPU quota and period in microseconds; (0, 0) for no quota."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        quota_v1 = _read_number(folder / "cpu.cfs_quota_us")
        period_v1 = _read_number(folder / "cpu.cfs_period_us")
        return float(quota_v1 or 0), float(period_v1 or 0)
    return (0.0, 0.0) if quota == "max" else (float(quota), float(period))


def _read_number(*paths: Path) -> int | None:
    """Return the number in the first file that has one."""
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _read_numbers(path: Path) -> dict[str, int]:
    """Return numbers by name from lines like `name: number unit`; empty without the file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
