"""Simulation trials: description of a simulation, and parallel runs of many.

Every policy of one comparison gets the same cost model, workload and cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

from experiments.base import ExperimentOptions
from experiments.parallel import map_parallel
from gllm.options.slo import NO_SLO, Slo
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.speculative_config import SpeculativeConfig
from gllm.sim.capacity import CAPACITY_RULES, RateTrial, find_capacity
from gllm.sim.deployment import Deployment, roofline_deployment, simulate
from gllm.sim.metrics.delays import measure_rate_trial, steady_throughput
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

MAX_MODEL_LEN = 16384
"""Holds every request of the traces."""
CAPACITY_RULE = CAPACITY_RULES["sustained"]
CAPACITY_REQUESTS = 2000
"""Least number of requests of a simulation in a search for the capacity. In the first half of 1,000
requests, delays are shorter because the pipeline fills up, which looks like overload."""
ESTIMATE_REQUESTS = 400
"""Least number of requests of the simulation with all of them there at once."""
CAPACITY_LINK = "[capacity](README.md#capacity)"
"""Link from a page to the definition."""
START_SHARE = 0.9
"""First rate of a search, as a share of the throughput with all requests at once."""


@dataclass(frozen=True)
class HardwareSetting:
    """Hardware and model."""

    model: str
    device: str
    stages: int = 4
    link: str = "pcie"
    """Between stages, and between the ranks of a stage."""
    ranks: int = 1
    """Tensor-parallel ranks of each stage."""

    def __str__(self) -> str:
        over = " over the network" if self.link == "network" else ""
        if self.link[0].isdigit():
            over = f" over {self.link}"
        return f"{self.model} on {self.stages * self.ranks} x {self.device}{over}"

    def as_tensor_parallel(self) -> "HardwareSetting":
        """Return the setting with all devices as ranks of one stage."""
        return replace(self, stages=1, ranks=self.stages * self.ranks)


L20_32B = HardwareSetting("qwen2.5-32b", "L20")
SETTINGS = (
    HardwareSetting("qwen2.5-14b", "L20"),
    L20_32B,
    HardwareSetting("qwen2.5-14b", "A100-40G"),
    HardwareSetting("qwen2.5-32b", "A100-40G"),
    HardwareSetting("llama-100b", "A800-80G", link="network"),
)
"""The paper's: 4 GPUs joined by PCIe, and a model that needs 80 GB each, over a network."""


PAPER_POLICY, OUR_POLICY = "throttle-paper", "throttle"
"""The paper's policy, which its claims are judged on, and the project's, which stands beside it."""
JUDGED_POLICIES = (PAPER_POLICY, OUR_POLICY, "sarathi")
"""Policies on emulated devices; the last one is the baseline."""
JUDGED_TEXT = (
    f"Claims are judged on `{PAPER_POLICY}`, the paper's own rule; the figures of `{OUR_POLICY}` "
    "stand beside it."
)
"""Sentence for pages whose claims have both policies."""


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
    slo: Slo = NO_SLO
    kv_share: float = 1.0
    """Share of the KV cache that fits on the devices, 0..1."""


@dataclass(frozen=True)
class TrialRun:
    """A trial and its run, simulated or served."""

    trial: SimulationTrial
    record: RunRecord

    @cached_property
    def figures(self) -> dict[str, Any]:
        """As `summarize_run` returns them."""
        return summarize_run(self.record, self.trial.slo)


def describe_option(name: str, value: Any) -> str:
    """Return a scheduler option of a trial as text."""
    if isinstance(value, SpeculativeConfig):
        return describe_speculation(value)
    return f"{name} {value:g}"


def describe_speculation(config: SpeculativeConfig) -> str:
    """Return guesses, acceptance and windows in flight as text."""
    windows = config.max_windows_in_flight or "any number"
    return (
        f"guesses {config.num_speculative_tokens}, right {config.synthetic_acceptance_rate:g}, "
        f"windows {windows}"
    )


def trial_jobs(trial: SimulationTrial) -> list[WorkloadRequest]:
    """Return the requests of a trial."""
    return make_workload(trial.workload, trial.requests, trial.rate, trial.arrivals, trial.seed)


def deploy_trial(trial: SimulationTrial) -> Deployment:
    """Return the simulated engine of a trial."""
    scheduler = SchedulerConfig(policy=trial.policy, **dict(trial.options))
    setting = trial.setting
    deployment = roofline_deployment(
        setting.model,
        setting.device,
        setting.stages,
        MAX_MODEL_LEN,
        setting.link,
        scheduler,
        degrees=(setting.ranks,),
    )
    config = deployment.scheduler
    config = replace(config, num_blocks=int(config.num_blocks * trial.kv_share))
    return replace(deployment, scheduler=config)


def simulate_trial(trial: SimulationTrial) -> RunRecord:
    """Run a trial."""
    return simulate(deploy_trial(trial), trial_jobs(trial))


TrialSimulator = Callable[[SimulationTrial], RunRecord]
"""Runs a trial."""


def summarize_trial(trial: SimulationTrial) -> dict[str, Any]:
    """Return the figures of a trial, as `summarize_run` returns them."""
    return summarize_run(simulate_trial(trial), trial.slo)


def run_trials(
    trials: Sequence[SimulationTrial], options: ExperimentOptions
) -> list[dict[str, Any]]:
    """Return the figures of all trials, computed in `options.jobs` processes."""
    return map_parallel(summarize_trial, trials, options.jobs, options.progress, "run")


@dataclass(frozen=True)
class TrialAtRate:
    """Trial at any request rate, for the search of its capacity."""

    trial: SimulationTrial
    simulate: TrialSimulator = simulate_trial

    def __call__(self, rate: float) -> RateTrial:
        """Simulate the trial at a rate in requests per second."""
        requests = CAPACITY_RULE.num_requests(rate, max(self.trial.requests, CAPACITY_REQUESTS))
        run = self.simulate(replace(self.trial, rate=rate, requests=requests))
        return measure_rate_trial(run.requests.values())


def make_base(trial: SimulationTrial) -> SimulationTrial:
    """Return the trial of throttle with whose capacity the rate of another one is compared."""
    num_requests = max(trial.requests, ESTIMATE_REQUESTS)
    base = SimulationTrial(trial.setting, trial.workload, "throttle", 1.0, num_requests)
    return replace(base, kv_share=trial.kv_share)


def estimate_capacity(trial: SimulationTrial, simulate: TrialSimulator = simulate_trial) -> float:
    """Return the steady throughput in requests per second if all requests arrive at once."""
    return steady_throughput(simulate(replace(trial, arrivals="static")))[1]


def measure_capacity(
    trial: SimulationTrial, jobs: int = 1, simulate: TrialSimulator = simulate_trial
) -> float:
    """Return the highest request rate that a trial sustains, in requests per second.

    Its rule is CAPACITY_RULE, with at least CAPACITY_REQUESTS requests at each rate.

    Raises:
        ValueError: No rate is sustained.
    """
    start_rate = START_SHARE * estimate_capacity(trial, simulate)
    return find_capacity(TrialAtRate(trial, simulate), start_rate, CAPACITY_RULE, jobs).rate


_capacities: dict[tuple[SimulationTrial, bool], float] = {}
"""Capacities that this process knows, by trial and by whether they are estimates."""


def plan_rates(
    trials: Sequence[SimulationTrial],
    shares: Sequence[float],
    options: ExperimentOptions,
    simulate: TrialSimulator = simulate_trial,
) -> list[list[SimulationTrial]]:
    """Return each trial at request rates of these shares of its capacity.

    The capacities are measured once, in `options.jobs` processes; a quick run estimates them.
    """
    unknown = [
        fromkey for fromkey in dict.fromkeys(trials) if (fromkey, options.quick) not in _capacities
    ]
    if options.quick:
        measure = partial(estimate_capacity, simulate=simulate)
    elif len(unknown) == 1:
        measure = partial(measure_capacity, jobs=options.jobs, simulate=simulate)
    else:
        measure = partial(measure_capacity, simulate=simulate)
    measured = map_parallel(measure, unknown, options.jobs, options.progress, "capacity")
    for trial, capacity in zip(unknown, measured, strict=True):
        _capacities[trial, options.quick] = capacity
    return [
        [replace(trial, rate=share * _capacities[trial, options.quick]) for share in shares]
        for trial in trials
    ]


def estimate_capacities(
    trials: Sequence[SimulationTrial], options: ExperimentOptions
) -> dict[SimulationTrial, float]:
    """Return the estimated capacities of the bases (`make_base`) of trials."""
    bases = list(dict.fromkeys(make_base(trial) for trial in trials))
    lines = plan_rates(bases, [1.0], replace(options, quick=True))
    return {base: trial.rate for base, (trial,) in zip(bases, lines, strict=True)}
