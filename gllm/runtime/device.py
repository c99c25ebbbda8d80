"""What the machine offers to this process: cores, memory, number formats.

Owns how limits of containers (cgroups v1 and v2) and affinities are read. Knows nothing of models;
imports torch only where a torch setting is asked for.
"""

import ctypes
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gllm.config.engine import QUANTIZATION_DEVICES
from gllm.config.field_types import FieldError
from gllm.kernels.native.builds import AMX, BFLOAT16, BUILD_VARIABLE, OFF

if TYPE_CHECKING:
    import torch

PROC = Path("/proc")
CGROUPS = Path("/sys/fs/cgroup")
KV_SHARE = 0.25
"""Share of the memory left that the KV cache takes by default."""
FP8_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with 8-bit floats (Ada; Hopper is 9.0)."""


def cores(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Cores that this process may keep busy: by affinity and by quota, rounded up, at least 1."""
    allowed = float(len(os.sched_getaffinity(0)))
    for folder in _groups("cpu", proc, cgroups):
        quota, period = _quota(folder)
        if quota > 0 and period > 0:
            allowed = min(allowed, quota / period)
    return max(1, -int(-allowed // 1))


def memory_left(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """Bytes this process and its like may still take: by the machine and by its cgroups."""
    left = _fields(proc / "meminfo")["MemAvailable"] * 1024
    for folder in _groups("memory", proc, cgroups):
        # The second name of each pair is that of cgroup v1.
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is None or used is None:
            continue
        stat = _fields(folder / "memory.stat")
        reclaimable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
        left = min(left, limit - used + reclaimable)
    return max(left, 0)


def kv_memory(requested: int | None) -> int:
    """Bytes for the KV cache of all stages.

    `requested`: None for a quarter of the memory left, so ask when the weights are loaded.
    """
    return int(memory_left() * KV_SHARE) if requested is None else requested


def kv_blocks(requested: int | None, stages: Sequence[tuple[int, int | None]]) -> int:
    """KV blocks, the same number on every stage, for stages of (bytes of a block, bytes of room in
    memory of its own or None). `requested`: bytes in all, None for what there is room for."""
    fitting = [room // block for block, room in stages if room is not None]
    if requested is not None or not fitting:
        fitting.append(kv_memory(requested) // sum(block for block, _ in stages))
    return min(fitting)


def threads(requested: int | None, stages: int) -> int:
    """Compute threads of a stage when all stages share this machine."""
    return requested or max(1, cores() // stages)


def set_threads(count: int) -> None:
    """Give this process's tensor operations so many threads; once, before the first of them."""
    import torch

    torch.set_num_threads(count)


def return_memory() -> None:
    """Give freed memory back to the system, which the allocator would keep."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # the GNU C library's
        trim(0)


def compute_dtype(requested: str, checkpoint: str, device: str = "cpu") -> "torch.dtype":
    """The number format for a configuration's `dtype`, the checkpoint's own and a type of device.

    auto: on GPUs the checkpoint's own; on CPUs bfloat16 where the checkpoint has it and the CPU
    multiplies it natively, else float32.
    """
    import torch

    if requested == "auto" and device == "cuda":
        requested = checkpoint
    if requested == "auto":
        requested = "bfloat16" if checkpoint == "bfloat16" and native_bfloat16() else "float32"
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[
        requested
    ]


def cache_dtype(
    requested: str, compute: "torch.dtype", capability: tuple[int, int] | None
) -> "torch.dtype":
    """The number format of the KV cache for a configuration's `kv_cache_dtype` and the arithmetic's
    own. capability: of the GPU, None on a CPU.

    Raises FieldError for 8-bit floats on a GPU without them.
    """
    import torch

    if requested.startswith("fp8"):
        if capability is not None and capability < FP8_CAPABILITY:
            raise FieldError(
                "kv_cache_dtype",
                f"--kv-cache-dtype {requested} needs a GPU of compute capability "
                f"{_dotted(FP8_CAPABILITY)} or more, but this one has {_dotted(capability)}: "
                "choose auto, bfloat16 or float16",
            )
        return torch.float8_e4m3fn
    return {"auto": compute, "bfloat16": torch.bfloat16, "float16": torch.float16}[requested]


def check_quantization(requested: str, device: str) -> None:
    """Raise FieldError for a `quantization` that a type of device cannot compute."""
    devices = QUANTIZATION_DEVICES[requested]
    if device not in devices:
        raise FieldError(
            "quantization",
            f"--quantization {requested} has no kernels for device {device}: leave it out, serve a "
            f"checkpoint whose weights are 8-bit floats, or choose --device {devices[0]}",
        )


def capability(device: "torch.device") -> tuple[int, int] | None:
    """Compute capability of a GPU; None for anything else."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def gpus(requested: str) -> int:
    """GPUs that a configuration's `device` asks for; 0 for the CPU. Raises FieldError where it asks
    for some and there is none."""
    import torch

    found = torch.cuda.device_count() if requested != "cpu" and torch.cuda.is_available() else 0
    if requested == "cuda" and not found:
        message = "device is cuda, but PyTorch finds no GPU here: choose cpu or auto"
        raise FieldError("device", message)
    return found


def native_bfloat16(proc: Path = PROC) -> bool:
    """Whether the CPU multiplies bfloat16 itself (AVX-512 BF16 or AMX), and no build of compiled
    kernels is named that does without."""
    if os.environ.get(BUILD_VARIABLE, BFLOAT16) not in (AMX, BFLOAT16, OFF):
        return False
    try:
        text = (proc / "cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "").split()
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _groups(controller: str, proc: Path, cgroups: Path) -> Iterator[Path]:
    """Folders of this process's cgroup and those above it, under v2 and under v1's `controller`.

    Within a container the path is the host's and only a tail of it, or nothing, is mounted: folders
    that are not there are left out.
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
        yield from (folder for folder in (inner, *inner.parents) if _within(folder, root))


def _within(folder: Path, root: Path) -> bool:
    return folder.is_relative_to(root) and folder.is_dir()


def _quota(folder: Path) -> tuple[float, float]:
    """CPU quota and period in microseconds; (0, 0) for none."""
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except (OSError, ValueError):
        v1 = (_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        quota_v1, period_v1 = v1
        return float(quota_v1 or 0), float(period_v1 or 0)
    return (0.0, 0.0) if quota == "max" else (float(quota), float(period))


def _number(*paths: Path) -> int | None:
    """The number in the first file that has one."""
    for path in paths:
        try:
            return int(path.read_text())
        except (OSError, ValueError):
            continue
    return None


def _fields(path: Path) -> dict[str, int]:
    """Numbers by name from lines like `name: number unit`; empty where there is no file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.replace(":", " ").split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdigit()}
