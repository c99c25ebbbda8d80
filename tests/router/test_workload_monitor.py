"""Workload of a router: D15 with requests that end out of order, and requests without lengths."""

import heapq
from collections.abc import Sequence
from typing import Any

import pytest

from gllm.engine.fleet_control import WorkloadStatus
from gllm.engine.interface import OverloadedError
from gllm.messages.fleet import EngineReport
from gllm.messages.sampling import SequenceSamplingParams
from gllm.options.slo import Slo
from gllm.router.client import FleetClient
from gllm.router.workload_monitor import PENDING_WINDOWS, WorkloadMonitor
from gllm.routing.scaling.workload_shifts import ShiftConfig
from gllm.runtime.head.journal import JournalEntry
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.sim.workloads.requests import WorkloadRequest, make_workload
from tests.router.test_fleet import Rig, read

SECONDS_PER_TOKEN = 0.05
"""Time per output token of the engines in a trace: long outputs end after later short ones."""
WINDOW = 10


def watch(**options: Any) -> WorkloadMonitor:
    """Return a monitor that is on."""
    return WorkloadMonitor(ShiftConfig(True, **options), FleetClient(lambda *_: None), lambda: True)


def enter(prompt: Sequence[int] | range, arrival: float, n: int = 1) -> JournalEntry:
    """Return a request that has arrived."""
    prompt_ids: Any = prompt
    return JournalEntry(
        prompt_ids, SequenceSamplingParams(temperature=0), 10**6, [], n, 0, "", arrival
    )


def end(monitor: WorkloadMonitor, entry: JournalEntry, *num_tokens: int) -> None:
    """Let the choices of a request end after numbers of tokens."""
    entry.alive.clear()
    entry.outputs = {choice: [0] * count for choice, count in enumerate(num_tokens)}
    monitor.on_end(entry)


def replay(jobs: Sequence[WorkloadRequest]) -> WorkloadStatus:
    """Return what a monitor reports after requests that arrive and end in simulated time."""
    monitor = watch()
    running: list[tuple[float, int, JournalEntry, int]] = []

    def end_until(now: float) -> None:
        while running and running[0][0] <= now:
            _, _, entry, num_tokens = heapq.heappop(running)
            end(monitor, entry, num_tokens)

    for number, job in enumerate(jobs):
        end_until(job.arrival_seconds)
        entry = enter(range(job.num_prompt_tokens), job.arrival_seconds)
        monitor.on_arrival(entry)
        ends = job.arrival_seconds + SECONDS_PER_TOKEN * job.num_output_tokens
        heapq.heappush(running, (ends, number, entry, job.num_output_tokens))
    end_until(float("inf"))
    status = monitor.status()
    assert status is not None
    assert status.num_samples == len(jobs)
    return status


def double(jobs: Sequence[WorkloadRequest], begin: int) -> list[WorkloadRequest]:
    """Return a trace whose lengths double from a request on."""
    return [
        job if number < begin else WorkloadRequest(
            job.arrival_seconds, 2 * job.num_prompt_tokens, 2 * job.num_output_tokens
        )
        for number, job in enumerate(jobs)
    ]  # fmt: skip


@pytest.mark.parametrize("workload", ["sharegpt", "azure-conv", "azure-code"])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 2, 3))])
def test_lengths_that_double_are_one_shift_and_a_stationary_trace_has_none(
    workload: str, seed: int
) -> None:
    jobs = make_workload(workload, 6000, 5.0, seed=seed)
    assert replay(jobs).num_shifts == 0
    status = replay(double(jobs, 3000))
    assert status.num_shifts == 1
    assert status.shift is not None
    assert set(status.shift.quantities) <= {"prompt tokens", "output tokens"}
    assert status.shift.after.output_tokens > 1.25 * status.shift.before.output_tokens
    assert status.shift.after.rate == pytest.approx(status.shift.before.rate, rel=0.25)
    # No new plan was adopted.
    assert status.profile == status.shift.before


def test_requests_count_in_the_order_of_arrival_behind_the_oldest_that_runs() -> None:
    monitor = watch(shift_window=WINDOW)
    entries = [enter([1] * (number + 1), float(number)) for number in range(4)]
    for entry in entries:
        monitor.on_arrival(entry)
    for number in (2, 1):
        end(monitor, entries[number], number)
    assert monitor.lengths() == []
    end(monitor, entries[0], 7)
    end(monitor, entries[0], 9)
    assert monitor.lengths() == [(1, 7), (2, 1), (3, 2)]


def test_choices_of_a_request_are_one_sample_and_empty_ones_count_as_arrivals() -> None:
    monitor = watch(shift_window=2, shift_change=0.25)
    for number in range(3 * 5):
        entry = enter([1, 2], float(number), n=2)
        monitor.on_arrival(entry)
        # One of three has a token.
        end(monitor, entry, *((3, 4) if number % 3 == 0 else (0, 0)))
    monitor.on_shed(15.0, 3)
    entry = enter([1, 2], 15.0)
    monitor.on_arrival(entry)
    end(monitor, entry, 7)
    assert set(monitor.lengths() or ()) == {(2, 7)}
    status = monitor.status()
    assert status is not None
    assert (status.num_samples, status.num_shifts) == (6, 0)
    assert status.profile is not None
    # 12 gaps from 0 to 12 seconds, and none of the requests that were shed.
    assert status.profile.rate == pytest.approx(1.0)


def test_requests_after_a_reset_are_the_profile() -> None:
    monitor = watch(shift_window=WINDOW)
    for number in range(20 * WINDOW):
        if number == 10 * WINDOW:
            assert monitor.reset_profile()
        entry = enter([1] * (1 if number < 10 * WINDOW else 5), float(number))
        monitor.on_arrival(entry)
        end(monitor, entry, 3)
    status = monitor.status()
    assert status is not None
    assert status.num_shifts == 0
    assert status.profile is not None
    assert status.profile.prompt_tokens == 5


def test_an_endless_request_holds_up_some_windows_only() -> None:
    monitor = watch(shift_window=WINDOW)
    endless = enter([1], 0.0)
    endless.outputs[0] = [0] * 5
    monitor.on_arrival(endless)
    for number in range(PENDING_WINDOWS * WINDOW):
        assert monitor.lengths() == []
        entry = enter([1, 2], number + 1.0)
        monitor.on_arrival(entry)
        end(monitor, entry, 3)
    lengths = monitor.lengths()
    assert lengths is not None
    assert lengths[-1] == (2, 3)
    status = monitor.status()
    assert status is not None
    assert status.num_samples == PENDING_WINDOWS * WINDOW + 1
    end(monitor, endless, 6)
    assert status.num_samples == PENDING_WINDOWS * WINDOW + 1


def test_a_router_reports_the_requests_of_its_engines() -> None:
    rig = Rig(shift_conditions=ShiftConfig(True, shift_window=2))
    a = rig.attach("a")
    for number in range(5):
        stream = rig.submit(*range(number + 1))
        a.answer(a.requests[-1], 10, 11, reason="length")
        read(stream)
        rig.fleet.client.release(stream)
    assert rig.fleet.workload.lengths() == [(2, 2), (3, 2), (4, 2), (5, 2)]
    status = rig.fleet.workload.status()
    assert status is not None
    # The engine names no leader.
    assert (status.is_leader, status.num_samples) == (False, 5)
    off = Rig()
    assert (off.fleet.workload.status(), off.fleet.workload.lengths()) == (None, None)
    assert not off.fleet.workload.reset_profile()


def test_requests_that_a_router_sheds_count_for_the_rate() -> None:
    rig = Rig(shift_conditions=ShiftConfig(True, shift_window=2), shed=True)
    a = rig.attach("a")
    a.report = EngineReport("ready", "", SchedulerStats(), StepCostCoefficients(1.0, 1.0))
    rig.links.on_message(a, a.report)
    arrivals = []
    for _ in range(5):
        with pytest.raises(OverloadedError):
            rig.fleet.check_admission([[1, 2]] * 3, 8, 0, "", Slo(ttft_seconds=0.5))
        arrivals.append(rig.submit().entry.arrival)
        a.answer(a.requests[-1], 10, reason="length")
    status = rig.fleet.workload.status()
    assert status is not None
    assert status.profile is not None
    # Four windows of one request that was served and three that were not.
    assert status.profile.rate == pytest.approx(4 * 4 / (arrivals[-1] - arrivals[0]))
