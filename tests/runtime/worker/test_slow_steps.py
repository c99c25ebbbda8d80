"""A step that takes several times as long as usual is reported once, with the kernel's reason."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gllm.runtime.worker.device import read_wait_counters
from gllm.runtime.worker.slow_steps import MIN_STEPS, SILENT_SECONDS, SlowSteps, WaitCounters

NOTHING = WaitCounters(0, 0, 0, 0)


class Machine:
    """Steps of a worker one after the other, and the kernel's counters."""

    def __init__(self) -> None:
        self.now = 0.0
        self.counters = NOTHING
        self.num_reads = 0
        self._steps = SlowSteps(self._read)

    def _read(self) -> WaitCounters:
        self.num_reads += 1
        return self.counters

    def step(self, seconds: float, tokens: int = 1, **waited: float) -> str | None:
        begin = self.now
        self.now += seconds
        added = {name: getattr(self.counters, name) + more for name, more in waited.items()}
        self.counters = self.counters._replace(**added)
        return self._steps.add(tokens, begin, self.now)

    def settle(self, seconds: float, tokens: int = 1) -> None:
        assert [self.step(seconds, tokens) for _ in range(MIN_STEPS)] == [None] * MIN_STEPS


@pytest.mark.parametrize(
    ("waited", "reason"),
    [
        ({"core_seconds": 0.3}, "its threads waited 0.30 s for a core that other processes used"),
        ({"throttled_seconds": 0.3}, "the CPU quota of its control group was used up for 0.30 s"),
        ({"stolen_seconds": 0.3}, "the host of this virtual machine ran others"),
        ({"page_reads": 5000}, "5000 pages were read from a disk"),
    ],
)
def test_a_slow_step_is_said_with_its_reason(waited: dict[str, float], reason: str) -> None:
    machine = Machine()
    machine.settle(0.05)
    message = machine.step(0.5, 1, **waited)
    assert message is not None
    assert message.startswith("a step of 1 tokens took 0.50 s instead of 0.050 s: ")
    assert reason in message


@pytest.mark.parametrize(
    "last",
    [
        pytest.param(lambda machine: machine.step(0.5), id="the kernel gives no reason"),
        pytest.param(lambda machine: machine.step(0.5, core_seconds=0.1), id="a small part"),
        pytest.param(lambda machine: machine.step(0.2, core_seconds=0.2), id="not five times"),
        pytest.param(lambda machine: machine.step(0.5, 64, core_seconds=0.5), id="another size"),
    ],
)
def test_other_steps_are_not_reported(last: Callable[[Machine], str | None]) -> None:
    machine = Machine()
    machine.settle(0.05)
    assert last(machine) is None


def test_a_short_step_is_not_reported() -> None:
    machine = Machine()
    machine.settle(0.001)
    assert machine.step(0.04, core_seconds=0.04) is None


def test_it_is_said_again_only_after_a_while() -> None:
    machine = Machine()
    machine.settle(0.05)
    assert machine.step(0.5, core_seconds=0.5)
    assert machine.step(0.5, core_seconds=0.5) is None
    machine.now += SILENT_SECONDS
    machine.settle(0.05)
    assert machine.step(0.5, core_seconds=0.5)


def test_counters_are_read_once_a_second() -> None:
    machine = Machine()
    for _ in range(10_000):
        machine.step(0.001)
    assert machine.num_reads <= 11


def test_counters_come_from_threads_groups_and_the_machine(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    for path, text in {
        proc / "self/task/1/schedstat": "5 1500000000 7\n",
        proc / "self/task/2/schedstat": "5 500000000 7\n",
        proc / "self/cgroup": "0::/a/b\n",
        proc / "stat": "cpu  1 2 3 4 5 6 7 300 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n",
        cgroups / "a/cpu.stat": "usage_usec 9\nthrottled_usec 4000000\n",
        cgroups / "a/b/cpu.stat": "throttled_usec 1000000\n",
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (proc / "self/task/3").mkdir()
    counters = read_wait_counters(proc, cgroups)
    assert counters[:3] == (2.0, 4.0, 3.0)


def test_this_machine_has_them() -> None:
    """Also where a sandbox hides some of them."""
    assert min(read_wait_counters()) >= 0
