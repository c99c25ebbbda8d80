"""Facts and load of this machine, for the head and the agents of an engine on several machines."""

import math
import os
import platform
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import psutil

from gllm.messages.nodes import NodeFacts, NodeLoad
from gllm.options.addresses import is_loopback
from gllm.options.version import __version__
from gllm.runtime.worker.device import PROC, available_memory_bytes, count_cores, find_gpu_models

POWERCAP = Path("/sys/class/powercap")
"""Folder of the kernel's energy counters (RAPL)."""
MIN_INTERVAL_SECONDS = 0.5
"""Shortest interval over which utilization and power are measured."""


class HostSensors(Protocol):
    """Interface of the CPU utilization and temperature sensors; the module psutil implements it."""

    def cpu_percent(self) -> float:
        """Return the utilization since the last call, in percent."""

    def sensors_temperatures(self) -> Mapping[str, Sequence[Any]]:
        """Return the temperatures by device, each with `current` in degrees Celsius."""


class GpuSample(Protocol):
    """Interface to read name, utilization, power and temperature of this machine's GPUs."""

    names: list[str]
    """Model name of each GPU."""

    def read(self) -> tuple[list[float | None], list[float | None], list[float | None]]:
        """Return utilization (0 to 1), watts and degrees Celsius of each GPU; None if unknown."""


class NvmlGpus:
    """Reads utilization, power and temperature of the GPUs with NVIDIA's NVML library."""

    def __init__(self, nvml: Any, visible: str | None = None) -> None:
        """Find the GPUs.

        Args:
            nvml: module pynvml, of the package nvidia-ml-py.
            visible: CUDA_VISIBLE_DEVICES, of which only numbers are read; None for all GPUs.

        Raises:
            Exception: nvml.NVMLError, without a driver.
        """
        self._nvml = nvml
        nvml.nvmlInit()
        indices = list(range(nvml.nvmlDeviceGetCount()))
        if visible is not None and all(part.strip().isdigit() for part in visible.split(",")):
            indices = [i for i in map(int, visible.split(",")) if i in indices]
        self._handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in indices]
        names = [nvml.nvmlDeviceGetName(handle) for handle in self._handles]
        # Older versions of the package return bytes.
        self.names = [name.decode() if isinstance(name, bytes) else str(name) for name in names]

    def read(self) -> tuple[list[float | None], list[float | None], list[float | None]]:
        """Return utilization (0 to 1), watts and degrees Celsius of each GPU; None if unknown."""
        nvml = self._nvml
        return (
            [self._get(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu / 100, h)
             for h in self._handles],
            [self._get(lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1000, h) for h in self._handles],
            [self._get(lambda h: nvml.nvmlDeviceGetTemperature(h, 0), h) for h in self._handles],
        )  # fmt: skip

    def _get(self, read: Callable[[Any], float], handle: Any) -> float | None:
        """Return a value, or None if the GPU does not report it."""
        try:
            return float(read(handle))
        except self._nvml.NVMLError:
            return None


class NamedGpus:
    """Names of this machine's GPUs where NVML cannot be used; utilization is unknown."""

    def __init__(self, proc: Path = PROC) -> None:
        self.names = sorted(line.partition(":")[2].strip() for line in find_gpu_models(proc))

    def read(self) -> tuple[list[float | None], list[float | None], list[float | None]]:
        """Return utilization (0 to 1), watts and degrees Celsius of each GPU; None if unknown."""
        unknown: list[float | None] = [None] * len(self.names)
        return unknown, unknown, unknown


def find_gpus() -> GpuSample:
    """Return a reader of this machine's GPUs: NVML if pynvml can be imported, else names only."""
    with suppress(Exception):
        # Its errors are of a class of its own, and a broken driver raises others.
        import pynvml

        return NvmlGpus(pynvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return NamedGpus()


class PowerMeter:
    """Measures the CPU power in watts with the kernel's RAPL counters.

    Often only root can read them; the power is then unknown.
    """

    def __init__(
        self, folder: Path = POWERCAP, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # One counter per package; those of its parts are within it.
        self._counters = sorted(folder.glob("*-rapl:[0-9]/energy_uj"))
        self._clock = clock
        self._last = self._read()

    def read(self) -> float | None:
        """Return mean watts since the last call; None if the counters are unreadable.

        It is also None after the counters were reset.
        """
        last, self._last = self._last, self._read()
        if last is None or self._last is None or self._last[0] <= last[0]:
            return None
        joules = (self._last[1] - last[1]) / 1e6
        return joules / (self._last[0] - last[0]) if joules >= 0 else None

    def _read(self) -> tuple[float, float] | None:
        """Return the time and the counters' sum in microjoules."""
        try:
            energies = [float(counter.read_text()) for counter in self._counters]
        except (OSError, ValueError):
            return None
        return (self._clock(), math.fsum(energies)) if energies else None


class MachineMonitor:
    """Measures utilization, memory, power and temperature of this machine.

    It measures at most twice per second, and returns the last result in between.
    """

    def __init__(
        self,
        gpus: GpuSample | None = None,
        power: PowerMeter | None = None,
        clock: Callable[[], float] = time.monotonic,
        sensors: HostSensors = psutil,
        proc: Path = PROC,
    ) -> None:
        """Start to measure.

        Args:
            gpus: GPUs of the machine; None to find them.
            power: power meter of the processors; None for the kernel's counters.
            clock: monotonic time in seconds.
            sensors: utilization and temperatures of the processors.
            proc: mount point of the process file system, which has the memory.
        """
        self._sensors = sensors
        self._proc = proc
        self._gpus = find_gpus() if gpus is None else gpus
        self._power = PowerMeter() if power is None else power
        self._clock = clock
        self._read_at = clock()
        self._load = NodeLoad()
        # The first call begins the interval of the next one.
        sensors.cpu_percent()

    @property
    def gpu_names(self) -> list[str]:
        """Names of the GPUs of the machine."""
        return list(self._gpus.names)

    def read(self) -> NodeLoad:
        """Return the load since the last reading; unknown in the first half second."""
        now = self._clock()
        if now - self._read_at < MIN_INTERVAL_SECONDS:
            return self._load
        self._read_at = now
        utilization, watts, degrees = self._gpus.read()
        powers = [self._power.read(), *watts]
        temperatures = _read_temperatures(self._sensors)
        temperatures += [degree for degree in degrees if degree is not None]
        self._load = NodeLoad(
            cpu_utilization=self._sensors.cpu_percent() / 100,
            memory_available_bytes=_available_memory(self._proc),
            gpu_utilization=utilization,
            power_watts=_sum_known(powers),
            temperature_celsius=max(temperatures, default=None),
        )
        return self._load


def read_facts(
    address: str,
    data_port: int,
    advertised: str = "",
    certificate: bytes = b"",
    devices: list[str] | None = None,
) -> NodeFacts:
    """Return hardware, software versions and data address of this machine, for joining a cluster.

    Args:
        address: IP address by which the machine reaches the head; see `find_own_address`.
        data_port: port at which it accepts activations; 0 for none.
        advertised: HOST:PORT at which others reach the data port; empty if it is address and
            data_port.
        certificate: TLS certificate of the data connections, in DER.
        devices: names of the GPUs that workers use; None for none.
    """
    return NodeFacts(
        host_name=socket.gethostname(),
        system=describe_system(),
        version=__version__,
        address=address,
        data_port=data_port,
        advertised=advertised,
        certificate=certificate,
        devices=devices or [],
        num_cores=count_cores(),
        memory_bytes=_available_memory(PROC) or 0,
    )


def describe_system() -> str:
    """Return the names and versions of the operating system and its kernel."""
    kernel = f"{platform.system()} {platform.release()}"
    try:
        return f"{platform.freedesktop_os_release()['PRETTY_NAME']}, {kernel}"
    except (OSError, KeyError):
        return kernel


def find_own_address(host: str, port: int) -> str:
    """Return the IP address of the network interface by which this machine reaches a host.

    Nothing is sent. The result is a loopback address only if the host's address is one.

    Raises:
        OSError: the name cannot be resolved, or there is no route to the host.
    """
    error = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(
        host, port, type=socket.SOCK_DGRAM
    ):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                return str(probe.getsockname()[0])
        except OSError as failure:
            error = failure
    raise error


def process_age_seconds() -> float:
    """Return the seconds since the start of this process."""
    return max(0.0, time.time() - psutil.Process().create_time())


def is_own_address(host: str) -> bool:
    """Return True if a host name or IP address belongs to this machine.

    Raises:
        OSError: the name cannot be resolved.
    """
    if is_loopback(host):
        return True
    own = {
        str(address.address).partition("%")[0]
        for interface in psutil.net_if_addrs().values()
        for address in interface
    }
    return any(str(info[4][0]) in own for info in socket.getaddrinfo(host, None))


def _available_memory(proc: Path) -> int | None:
    try:
        return available_memory_bytes(proc)
    except (OSError, KeyError):
        return None


def _read_temperatures(sensors: HostSensors) -> list[float]:
    """Return all temperatures in degrees Celsius; empty where there are no sensors."""
    try:
        groups = sensors.sensors_temperatures()
    except (AttributeError, OSError, ValueError):
        return []
    # Absent sensors report 0 or less.
    return [sensor.current for group in groups.values() for sensor in group if sensor.current > 0]


def _sum_known(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) if known else None
