"""Facts and load of a machine, with fake sensors."""

import socket
import types

import pytest

from gllm.runtime.node.machine import (
    MachineMonitor,
    NamedGpus,
    NvmlGpus,
    PowerMeter,
    find_own_address,
    is_own_address,
    read_facts,
)


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Gpus:
    def __init__(self):
        self.names = ["A", "B"]

    def read(self):
        return [0.5, None], [200.0, None], [60.0, None]


class Sensors:
    """Sensors of the processors, or a machine without any."""

    def __init__(self, *temperatures):
        self.temperatures = [types.SimpleNamespace(current=each) for each in temperatures]

    def cpu_percent(self):
        return 37.5

    def sensors_temperatures(self):
        if not self.temperatures:
            raise OSError
        return {"coretemp": self.temperatures}


class NvmlError(Exception):
    pass


def make_nvml(broken=()):
    """The library with two GPUs, the calls in `broken` of which fail on the second one."""

    def value(name, result):
        def get(handle, *_):
            if name in broken and handle == 1:
                raise NvmlError
            return result

        return get

    return types.SimpleNamespace(
        NVMLError=NvmlError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetName=lambda handle: f"GPU {handle}" if handle else b"GPU 0",
        nvmlDeviceGetUtilizationRates=value("utilization", types.SimpleNamespace(gpu=25)),
        nvmlDeviceGetPowerUsage=value("power", 150_000),
        nvmlDeviceGetTemperature=value("temperature", 55),
    )


def write_counter(folder, microjoules, package=0):
    counter = folder / f"intel-rapl:{package}" / "energy_uj"
    counter.parent.mkdir(exist_ok=True)
    counter.write_text(f"{microjoules}\n")


def test_load_of_all_sensors(tmp_path):
    clock = Clock()
    write_counter(tmp_path, 1_000_000)
    sensors = Sensors(0, 41.0, 70.5)
    monitor = MachineMonitor(Gpus(), PowerMeter(tmp_path, clock), clock, sensors)
    assert monitor.read().cpu_utilization is None
    clock.now += 2
    write_counter(tmp_path, 21_000_000)
    load = monitor.read()
    assert (load.cpu_utilization, load.gpu_utilization) == (0.375, [0.5, None])
    assert (load.power_watts, load.temperature_celsius) == (210, 70.5)
    assert load.memory_available_bytes
    clock.now += 0.1
    assert monitor.read() is load
    assert monitor.gpu_names == ["A", "B"]


def test_load_without_sensors(tmp_path):
    clock = Clock()
    power = PowerMeter(tmp_path, clock)
    monitor = MachineMonitor(NamedGpus(tmp_path), power, clock, Sensors(), tmp_path)
    clock.now += 1
    load = monitor.read()
    assert load.cpu_utilization == 0.375
    assert load.memory_available_bytes is load.power_watts is load.temperature_celsius is None
    assert load.gpu_utilization == []


def test_power_of_several_packages_and_of_a_counter_that_begins_anew(tmp_path):
    clock = Clock()
    write_counter(tmp_path, 0)
    write_counter(tmp_path, 500_000, package=1)
    meter = PowerMeter(tmp_path, clock)
    assert meter.read() is None
    clock.now += 2
    write_counter(tmp_path, 8_000_000)
    write_counter(tmp_path, 2_500_000, package=1)
    assert meter.read() == 5
    clock.now += 2
    write_counter(tmp_path, 10)
    assert meter.read() is None


def test_gpus_of_nvidias_library():
    gpus = NvmlGpus(make_nvml(broken=("power", "temperature")))
    assert gpus.names == ["GPU 0", "GPU 1"]
    assert gpus.read() == ([0.25, 0.25], [150.0, None], [55.0, None])


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1", ["GPU 1"]), ("1,0,7", ["GPU 1", "GPU 0"]), ("GPU-ab", ["GPU 0", "GPU 1"])],
)
def test_only_visible_gpus_count(visible, names):
    assert NvmlGpus(make_nvml(), visible).names == names


def test_gpus_of_the_drivers_list(tmp_path):
    folder = tmp_path / "driver/nvidia/gpus/0000:01:00.0"
    folder.mkdir(parents=True)
    (folder / "information").write_text("Model: \t NVIDIA H200\nIRQ: 1\n")
    gpus = NamedGpus(tmp_path)
    assert gpus.names == ["NVIDIA H200"]
    assert gpus.read() == ([None], [None], [None])


def test_sensors_of_this_machine():
    clock = Clock()
    monitor = MachineMonitor(clock=clock)
    clock.now += 1
    load = monitor.read()
    assert load.cpu_utilization is not None
    assert load.memory_available_bytes


def test_facts():
    facts = read_facts("127.0.0.1", 29601, devices=["A"])
    assert facts.host_name == socket.gethostname()
    assert facts.num_cores >= 1
    assert facts.memory_bytes > 2**20
    assert "Linux" in facts.system
    assert (facts.address, facts.data_port, facts.devices) == ("127.0.0.1", 29601, ["A"])


def test_own_address():
    assert find_own_address("127.0.0.1", 1) == "127.0.0.1"
    assert is_own_address("127.0.0.1")
    assert is_own_address("localhost")
    assert not is_own_address("192.0.2.1")
    with pytest.raises(OSError, match=r"\S"):
        find_own_address("no-such-host.invalid", 1)
