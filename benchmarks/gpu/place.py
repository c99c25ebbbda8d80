"""Device of the benchmark and its timer: a GPU with events, or the CPU for a dry run."""

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
    from gllm.runtime.worker.batch import PlanAttention

WARM_UPS = 3
MIN_REPEATS, MAX_REPEATS = 11, 101
"""Minimum and maximum number of timed repeats."""
SECONDS = 0.25
"""Target seconds for all repeats of one row together."""
CYCLES = 2_000_000_000
"""Approximate GPU cycles per second."""
MAX_SLEEP_SECONDS = 0.5
"""Maximum seconds that the device sleeps while work is enqueued."""
MAX_SETS = 32
L2_BYTES = 64 * 2**20
"""Default L2 cache size if PyTorch does not report it."""
PACKAGES = ("torch", "triton", "transformers", "numpy", "safetensors", "flash-attn", "msgspec")


class Place:
    """A device and its type, bfloat16."""

    dtype = torch.bfloat16

    def __init__(self, is_dry: bool) -> None:
        """Select the device.

        A dry run uses the CPU and the reference implementations alone, as on a machine without
        compiled kernels.

        Raises:
            RuntimeError: There is no GPU and this is no dry run.
        """
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
        """Wait for the device.

        Raises:
            RuntimeError: The device is unusable.
        """
        if not self.is_dry:
            torch.cuda.synchronize()

    def queues(self) -> DeviceRuntime:
        """Return the runtime of the device's streams."""
        if self.is_dry:
            from benchmarks.gpu.host import HostQueues

            return HostQueues()
        return CudaRuntime(self.device.index)

    def attention_planner(self, longest: int) -> "PlanAttention | None":
        """Return the planner for contexts up to `longest`; None for the executor's own."""
        if self.is_dry:
            from benchmarks.gpu.host import plan_of_one_layout

            return plan_of_one_layout(longest)
        return None

    def seed(self, name: str) -> None:
        """Seed the random numbers by this name."""
        torch.manual_seed(zlib.crc32(name.encode()))

    def free_bytes(self) -> int:
        """Return the free memory of the device in bytes."""
        if self.is_dry:
            return 2**30
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info(self.device)[0]
        return free

    def capability(self) -> tuple[int, int]:
        """Return the GPU's compute capability; a dry run has one that supports everything."""
        return (9, 0) if self.is_dry else torch.cuda.get_device_capability(self.device)

    def sets(self, num_bytes: int) -> int:
        """Return the number of input sets to cycle through.

        Between two uses of a set, others of three times the L2 cache are used. Small inputs have
        fewer sets and stay in the cache, as in a model.
        """
        if self.is_dry:
            return 2
        properties = torch.cuda.get_device_properties(self.device)
        cache = getattr(properties, "L2_cache_size", L2_BYTES)
        num_sets = max(2, min(1 + -(-3 * cache // max(num_bytes, 1)), MAX_SETS))
        return max(1, min(num_sets, self.free_bytes() // 2 // max(num_bytes, 1)))

    def seconds(self, work: Callable[[int], object], sets: int) -> float:
        """Return the median seconds of `work`, which is called with the number of an input set.

        On a GPU, events around each call measure the time. All calls are enqueued while the device
        sleeps, so the host's time to enqueue them does not count.
        """
        for index in range(WARM_UPS):
            work(index % sets)
        self.synchronize()
        begin = time.perf_counter()
        work(0)
        put = time.perf_counter() - begin
        self.synchronize()
        elapsed = time.perf_counter() - begin
        repeats = max(MIN_REPEATS, min(MAX_REPEATS, int(SECONDS / elapsed)))
        if self.is_dry:
            return median(self._timed(work, index % sets) for index in range(3))
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        torch.cuda._sleep(int(min(2 * put * repeats, MAX_SLEEP_SECONDS) * CYCLES))
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
        """Return the device and versions, for the head of the results."""
        versions = {name: _version(name) for name in PACKAGES}
        versions |= {"python": platform.python_version(), "cuda": torch.version.cuda or ""}
        return {"device": self._described(), "versions": versions}

    def _described(self) -> dict[str, Any]:
        """Describe the device; sizes are in bytes."""
        if self.is_dry:
            names = {"name": "cpu (dry run)", "driver": "", "architecture": ""}
            return {**names, "memory": 0, "l2": 0, "processors": 0}
        properties = torch.cuda.get_device_properties(self.device)
        return {
            "name": properties.name,
            "driver": _driver(),
            "architecture": f"sm_{properties.major}{properties.minor}",
            "memory": properties.total_memory,
            "l2": getattr(properties, "L2_cache_size", 0),
            "processors": properties.multi_processor_count,
        }


def _version(package: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    """Return the GPU driver's version; empty if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n")[0].strip()
