"""Simulation trials: description of a simulation, and parallel runs of many.

Every policy of one comparison gets the same cost model, workload and cache.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from tqdm import tqdm

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.report import steady_throughput, summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import make_workload

MAX_MODEL_LEN = 16384
"""Holds every request of the traces."""


@dataclass(frozen=True)
class HardwareSetting:
    """Hardware and model."""

    model: str
    device: str
    stages: int = 4
    link: str = "pcie"

    def __str__(self) -> str:
        over = " over the network" if self.link == "network" else ""
        return f"{self.model} on {self.stages} x {self.device}{over}"


L20_32B = HardwareSetting("qwen2.5-32b", "L20")
SETTINGS = (
    HardwareSetting("qwen2.5-14b", "L20"),
    L20_32B,
    HardwareSetting("qwen2.5-14b", "A100-40G"),
    HardwareSetting("qwen2.5-32b", "A100-40G"),
    HardwareSetting("llama-100b", "A800-80G", link="network"),
)
"""The paper's: 4 GPUs joined by PCIe, and a model that needs 80 GB each, over a network."""


@dataclass(frozen=True)
class SimulationTrial:
    """One simulation. `options` are fields of SchedulerConfig."""

    setting: HardwareSetting
    workload: str
    policy: str
    rate: float
    requests: int
    arrivals: str = "poisson"
    seed: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    slo: tuple[float, float] | None = None
    """TTFT and TPOT limits, seconds."""
    kv_share: float = 1.0
    """Share of the KV cache that fits on the devices, 0..1."""


def simulate_trial(trial: SimulationTrial) -> RunRecord:
    """Run a trial."""
    jobs = make_workload(trial.workload, trial.requests, trial.rate, trial.arrivals, trial.seed)
    scheduler = SchedulerConfig(policy=trial.policy, **dict(trial.options))
    setting = trial.setting
    deployment = roofline_deployment(
        setting.model, setting.device, setting.stages, MAX_MODEL_LEN, setting.link, scheduler
    )
    config = deployment.scheduler
    config = replace(config, num_blocks=int(config.num_blocks * trial.kv_share))
    return simulate(replace(deployment, scheduler=config), jobs)[0]


def summarize_trial(trial: SimulationTrial) -> dict[str, Any]:
    """Return the figures of a trial (sim.report.summarize)."""
    return summarize_run(simulate_trial(trial), *(trial.slo or (None, None)))


def run_trials(trials: Sequence[SimulationTrial], progress: bool = True) -> list[dict[str, Any]]:
    """Return the figures of all trials, computed in one process per core."""
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        results = pool.map(summarize_trial, trials)
        # None: no bar where the output is no terminal.
        disable = None if progress else True
        return list(tqdm(results, total=len(trials), unit="run", disable=disable))


@cache
def measure_capacity(
    setting: HardwareSetting, workload: str, requests: int, kv_share: float = 1.0
) -> float:
    """Return the capacity in requests per second, the unit of request rates for every policy.

    It is the steady throughput of `throttle` if all requests arrive at the beginning.
    """
    trial = SimulationTrial(
        setting, workload, "throttle", 1.0, requests, "static", kv_share=kv_share
    )
    return steady_throughput(simulate_trial(trial))[1]


def trials_at_rates(trial: SimulationTrial, shares: Sequence[float]) -> list[SimulationTrial]:
    """Return the trial at request rates of these shares of its capacity."""
    most = measure_capacity(trial.setting, trial.workload, trial.requests, trial.kv_share)
    return [replace(trial, rate=share * most) for share in shares]
