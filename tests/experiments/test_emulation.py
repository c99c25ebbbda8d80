"""The experiment of emulated serving: what it shows of runs that are given."""

from dataclasses import replace

from experiments import emulation
from experiments.base import ExperimentOptions
from experiments.emulation import ServedLoad
from gllm.config.engine import EngineConfig
from gllm.sim.deployment import simulate
from gllm.sim.workloads.requests import WorkloadRequest


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
    error, bubbles, throughput = result.claims
    assert error.ours == 0
    assert throughput.ours is not None
    assert 0.9 < throughput.ours <= 1
    assert bubbles.ours is not None
    assert "| 0.1 " in result.text


def test_later_tokens_are_an_error():
    result = emulation.run(ExperimentOptions(quick=True, progress=False), serve_late)
    error = result.claims[0]
    assert error.ours is not None
    assert error.ours > 0.05
    assert error.verdict.is_met is False
