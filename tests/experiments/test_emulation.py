"""The experiment of emulated serving: what it shows of runs that are given."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct

from experiments import emulation
from experiments.base import ExperimentOptions
from experiments.emulation import FILL, STEADY, TAIL, ServedLoad, phase_bubbles
from gllm.config.engine import EngineConfig
from gllm.observability.latency import RequestTimeline
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.deployment import simulate
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest, make_workload


def serve_exactly(config: EngineConfig, jobs: list[WorkloadRequest]) -> ServedLoad:
    """Serve as the simulator predicts."""
    assert config.device == "emulated:L20"
    return ServedLoad(simulate(emulation.SETTINGS[1].deployment, jobs), 2.0, 1e-4)


def serve_late(config: EngineConfig, jobs: list[WorkloadRequest]) -> ServedLoad:
    """Serve as if each request had arrived a tenth of a second earlier."""
    served = serve_exactly(config, jobs)
    for request in served.run.requests.values():
        request.line = replace(request.line, arrival=request.line.arrival - 0.1)
    return served


def test_equal_runs_have_no_error():
    result = emulation.run(ExperimentOptions(quick=True, progress=False), serve_exactly)
    assert "+0.0 %" in result.text
    error, bubbles, steady, throughput = result.claims
    assert error.ours == 0
    assert throughput.ours is not None
    assert 0.9 < throughput.ours <= 1
    assert bubbles.ours is not None
    assert steady.ours is not None
    assert steady.ours < 0.03
    assert "| 0.1 " in result.text


def test_later_tokens_are_an_error():
    result = emulation.run(ExperimentOptions(quick=True, progress=False), serve_late)
    error = result.claims[0]
    assert error.ours is not None
    assert error.ours > 0.05
    assert error.verdict.is_met is False


def test_a_late_run_is_repeated_and_the_least_late_one_counts():
    config, jobs = emulation.SETTINGS[1].config, make_workload("azure-conv", 2, 2.0)
    exact = serve_exactly(config, jobs)
    step = exact.late_seconds / exact.late_share

    def served(*shares: float) -> list[float]:
        loads = iter([replace(exact, late_seconds=share * step) for share in shares])
        best = emulation.serve_punctually(lambda *_: next(loads), config, jobs)
        return [round(best.late_share, 3), *(load.late_share for load in loads)]

    assert served(0.02, 0.0) == [0.02, 0.0]
    assert served(0.03, 0.01) == [0.01]
    assert served(0.03, 0.05) == [0.03]


def test_a_run_at_a_higher_speed_is_compared_in_the_time_of_the_devices():
    setting = emulation.SETTINGS[1]
    jobs = make_workload("azure-conv", 4, 2.0)
    base, fast = (serve_exactly(setting.config, jobs) for _ in range(2))
    for request in fast.run.requests.values():
        line = request.line
        times = [time / 4 for time in line.times]
        request.line = replace(line, arrival=line.arrival / 4, times=times)
    assert emulation.at_speed(setting, 4).emulated_speed == 4
    row = emulation.speed_row(4, fast, base.run, base)
    assert (row[0], row[-2:]) == ("4", ["0.0 %", "0.0 %"])
    assert emulation.speed_row(2, fast, base.run, base)[-1] == "50.0 %"


def test_bubbles_of_the_parts_of_a_run_by_hand():
    """The second stage is the slower one; every micro-batch could be computed at once."""
    chunk, decode = StageWork(0, 9, ((0, 9),), 0, 0, 1), StageWork(0, 1, (), 1, 9, 1)
    steps = [
        (0.0, chunk, (0.0, 1.0), (1.0, 3.0)),
        (0.0, chunk, (1.0, 2.0), (3.0, 5.0)),
        (3.0, chunk, (3.0, 4.0), (5.0, 7.0)),
        (7.0, decode, (7.0, 8.0), (8.0, 9.0)),
    ]
    line = RequestTimeline(0.0)
    line.record_output(9.0)
    run = RunRecord(
        emulation.SETTINGS[1].deployment.start_event(0.0),
        {0: ServedRequest(9, 1, line)},
        [
            MicroBatch(planned, work, 0, 0, [StepTime(0, *first), StepTime(0, *second)])
            for planned, work, first, second in steps
        ],
        parallelism=[(0.0, 2)],
    )
    run.start = replace_struct(run.start, layers=[1, 1])
    parts = phase_bubbles(run)
    assert parts[FILL] == pytest.approx((1.0, 1 / 2, 1 / 4))
    assert parts[STEADY] == pytest.approx((2.0, 1 / 4, 0.0))
    assert parts[TAIL] == pytest.approx((6.0, 5 / 12, 1 / 6))
