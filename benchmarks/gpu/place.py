"""Where the benchmark runs: a GPU and its clock, or for a dry run the CPU and the host's.

Owns the device, how work on it is timed, and what is told of it. Knows nothing of what is measured.
"""

import importlib.metadata
import platform
import subprocess
import time
import zlib
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from gllm.transport.device_streams import CudaRuntime, DeviceRuntime

if TYPE_CHECKING:
    from gllm.runtime.batch import PlanAttention

WARM_UPS = 3
LEAST, MOST = 11, 101
"""Repeats of what is timed."""
SECONDS = 0.25
"""That the repeats of one row should take together."""
CYCLES = 2_000_000_000
"""Of a GPU in a second, about."""
LONGEST_SLEEP = 0.5
"""Seconds that the device is held back at most while its work is put there."""
MOST_SETS = 32
L2_BYTES = 64 * 2**20
"""Taken where PyTorch does not tell."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "flash-attn", "msgspec")


class Place:
    """A device in bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, is_dry: bool) -> None:
        """A dry run is on the CPU, through the references alone, as on a machine without compiled
        kernels. Raises RuntimeError where there is no GPU for another."""
        self.is_dry = is_dry
        self.device = torch.device("cpu" if is_dry else "cuda:0")
        if is_dry:
            from gllm.kernels.native import library

            library.load_library = lambda: None  # type: ignore[assignment]
            torch.set_num_threads(1)
        elif not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no GPU here; --dry-run needs none")
        else:
            torch.cuda.set_device(self.device)

    def synchronize(self) -> None:
        """Wait for the device. Raises RuntimeError where it cannot go on."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def queues(self) -> DeviceRuntime:
        """The device's queues of work."""
        if self.is_dry:
            from benchmarks.gpu.host import HostQueues

            return HostQueues()
        return CudaRuntime(self.device.index)

    def attention_planner(self, longest: int) -> "PlanAttention | None":
        """How attention is planned for the device's executor, for contexts up to `longest`; None
        for its own way."""
        if self.is_dry:
            from benchmarks.gpu.host import plan_of_one_layout

            return plan_of_one_layout(longest)
        return None

    def seed(self, name: str) -> None:
        """Draw what comes now by this name."""
        torch.manual_seed(zlib.crc32(name.encode()))

    def free_bytes(self) -> int:
        """Memory of the device that nobody uses."""
        if self.is_dry:
            return 2**30
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def capability(self) -> tuple[int, int]:
        """The GPU's architecture; of a dry run one that does all."""
        return (9, 0) if self.is_dry else torch.cuda.get_device_capability(self.device)

    def sets(self, num_bytes: int) -> int:
        """How many inputs of this size take turns: between two uses of one, others of three times
        the L2 cache go by. For small ones fewer, which then stay in the cache, as in a model."""
        if self.is_dry:
            return 2
        properties = torch.cuda.get_device_properties(self.device)
        cache = getattr(properties, "L2_cache_size", L2_BYTES)
        wanted = max(2, min(1 + -(-3 * cache // max(num_bytes, 1)), MOST_SETS))
        return max(1, min(wanted, self.free_bytes() // 2 // max(num_bytes, 1)))

    def seconds(self, work: Callable[[int], object], sets: int) -> float:
        """The median time of `work`, called with the number of a set of inputs.

        On a GPU by events around each call, all calls put there while the device sleeps: what the
        host takes to put them there is not in it.
        """
        for index in range(WARM_UPS):
            work(index % sets)
        self.synchronize()
        begin = time.perf_counter()
        work(0)
        put = time.perf_counter() - begin
        self.synchronize()
        taken = time.perf_counter() - begin
        repeats = max(LEAST, min(MOST, int(SECONDS / taken)))
        if self.is_dry:
            return median(self._timed(work, index % sets) for index in range(3))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda._sleep(int(min(2 * put * repeats, LONGEST_SLEEP) * CYCLES))
        for index, (before, after) in enumerate(events):
            before.record()
            work(index % sets)
            after.record()
        self.synchronize()
        return median(before.elapsed_time(after) for before, after in events) / 1000

    def wall(self, work: Callable[[], object]) -> float:
        """Seconds of one call, the device's work included."""
        self.synchronize()
        begin = time.perf_counter()
        work()
        self.synchronize()
        return time.perf_counter() - begin

    def _timed(self, work: Callable[[int], object], index: int) -> float:
        begin = time.perf_counter()
        work(index)
        return time.perf_counter() - begin

    def environment(self) -> dict[str, Any]:
        """Device and versions, for the head of the results."""
        versions = {name: _version(name) for name in PACKAGES}
        versions |= {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
        return {"device": self._described(), "versions": versions}

    def _described(self) -> dict[str, Any]:
        """The device; sizes in bytes."""
        if self.is_dry:
            names = {"name": "cpu (dry run)", "driver": "", "architecture": ""}
            return {**names, "memory": 0, "l2": 0, "processors": 0}
        found = torch.cuda.get_device_properties(self.device)
        return {
            "name": found.name,
            "driver": _driver(),
            "architecture": f"sm_{found.major}{found.minor}",
            "memory": found.total_memory,
            "l2": getattr(found, "L2_cache_size", 0),
            "processors": found.multi_processor_count,
        }


def _version(package: str) -> str:
    """Of an installed package; empty where it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """The GPU driver's version, as far as nvidia-smi tells."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
