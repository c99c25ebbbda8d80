"""Emulated serving against the simulator: one cost model, in the real runtime and in virtual time.

What differs is what the runtime costs: processes, queues, messages. Serves Poisson arrivals at
shares of the capacity, and all requests at once, which shows bubbles.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedLimit, PaperClaim
from gllm.commands.bench.real import LOG_DRAIN_SECONDS, run_logged, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.models.config import read_config
from gllm.observability.latency import collect_latencies, percentile
from gllm.observability.progress import show_progress
from gllm.runtime.emulation.deployment import build_emulated_deployment
from gllm.runtime.emulation.model_folder import prepare_emulated_model
from gllm.sim.compare import METRICS
from gllm.sim.costs.roofline import DeviceEfficiency, RooflineCostModel
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

WORKLOAD = "azure-conv"
MAX_MODEL_LEN = 16_384
"""Longest sequence of an engine in tokens; requests of the trace are shorter."""
SHARES = (0.5, 0.85)
"""Request rates, as shares of what the simulator serves with all requests there at once."""
REQUESTS, CAPACITY_REQUESTS = 64, 200
"""Requests of each load, and of the simulation that finds the capacity."""
PERCENTS = (50, 99)
ALLOWED = 0.05
"""Largest error of a latency."""
MAX_BUBBLES, MIN_THROUGHPUT = 0.03, 0.97
"""Limits with all requests there at once, the throughput as a share of an ideal pipeline's."""


@dataclass(frozen=True)
class Setting:
    """A model on emulated devices."""

    model: str
    device: str
    stages: int

    @property
    def name(self) -> str:
        """Name for tables."""
        return f"{self.model} on {self.stages} x {self.device}"

    @property
    def config(self) -> EngineConfig:
        """Configuration of the engine."""
        return EngineConfig.from_options(
            self.model,
            device=f"emulated:{self.device}",
            pipeline_parallel_size=self.stages,
            max_model_len=MAX_MODEL_LEN,
        )

    @property
    def deployment(self) -> Deployment:
        """The same engine in the simulator."""
        model = read_config(prepare_emulated_model(self.model)).model
        return build_emulated_deployment(self.config, model, MAX_MODEL_LEN)


SETTINGS = (Setting("qwen2.5-14b", "L20", 1), Setting("qwen2.5-32b", "L20", 4))
"""A step of the decodes of each stage takes at least 34 and 20 ms: its weights over the memory
bandwidth."""


@dataclass(frozen=True)
class ServedLoad:
    """A load that emulated devices have served."""

    run: RunRecord
    cpu_seconds: float
    """CPU time of all processes, the clients included."""
    late_seconds: float
    """Mean time after the end of a step until its worker noticed it, of the stage where it is
    longest."""


EmulatedServer = Callable[[EngineConfig, list[WorkloadRequest]], ServedLoad]
"""Serves jobs with an engine."""


def serve_emulated(config: EngineConfig, jobs: list[WorkloadRequest]) -> ServedLoad:
    """Serve jobs with an engine of their own. For callers without an event loop."""
    cpu_seconds = late_seconds = 0.0

    async def work(engine: Engine) -> None:
        nonlocal cpu_seconds, late_seconds
        begin = process_seconds()
        await serve_workload(engine, jobs)
        cpu_seconds = process_seconds() - begin
        await asyncio.sleep(LOG_DRAIN_SECONDS)
        loads = engine.status().stage_loads.values()
        late_seconds = max(load.late_seconds / load.num_steps for load in loads)

    events = asyncio.run(run_logged(config, work))
    return ServedLoad(build_run_record(events), cpu_seconds, late_seconds)


def process_seconds() -> float:
    """Return the CPU time of this process and its descendants."""
    own = psutil.Process()
    times = [process.cpu_times() for process in (own, *own.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def run(options: ExperimentOptions, serve: EmulatedServer = serve_emulated) -> ExperimentResult:
    """Serve every load on emulated devices, and simulate it.

    Args:
        options: Of the experiment.
        serve: Serves jobs.
    """
    settings = SETTINGS[1:] if options.quick else SETTINGS
    shares = SHARES[:1] if options.quick else SHARES
    count = 8 if options.quick else REQUESTS
    total = len(settings) * (1 + len(shares))
    rows: list[list[str]] = []
    idle_rows: list[list[str]] = []
    claims: list[PaperClaim] = []
    with show_progress("run", total, is_shown=options.progress) as bar:
        for setting in settings:
            deployment = setting.deployment
            most = throughput(simulate(deployment, static_jobs(CAPACITY_REQUESTS)))
            for share in shares:
                jobs = make_workload(WORKLOAD, count, share * most, seed=7)
                expected = simulate(deployment, jobs)
                measured = serve(setting.config, jobs).run
                title = f"{setting.name}, {share:.0%}"
                rows += compare(title, expected, measured)
                claims.append(claim_of(title, expected, measured))
                bar.update()
            jobs = static_jobs(count)
            served = serve(setting.config, jobs)
            ideal = simulate(make_ideal(deployment), jobs)
            idle_rows.append(idle_row(setting.name, ideal, simulate(deployment, jobs), served))
            claims += idle_claims(setting.name, ideal, served.run)
            bar.update()
    text = (
        f"{count} requests of {WORKLOAD}, Poisson arrivals at shares of what the simulator serves "
        "with all requests there at once. Simulated: virtual time, with the cost model's own times "
        "of the driver. Emulated: `--device emulated`, all processes on this machine.\n\n"
        + format_table(["load", "metric", "simulated, ms", "emulated, ms", "error"], rows)
        + "\n\nAll requests at once. Ideal: a simulated pipeline whose driver takes no time. Late: "
        "mean time until a worker noticed the end of its step. Host: CPU time of all processes, "
        "the clients included, for each micro-batch.\n\n"
        + format_table(
            [
                "engine",
                "requests/s, ideal",
                "simulated",
                "emulated",
                "bubbles, ideal",
                "simulated",
                "emulated",
                "ms of a step",
                "late, ms",
                "host, ms",
            ],
            idle_rows,
        )
    )
    return ExperimentResult(
        "Emulated serving against the simulator",
        text,
        claims,
        reference="none; the limits are this project's",
    )


def static_jobs(count: int) -> list[WorkloadRequest]:
    """Return requests that all arrive at once."""
    return make_workload(WORKLOAD, count, 1.0, "static", seed=7)


def make_ideal(deployment: Deployment) -> Deployment:
    """Return a deployment whose driver takes no time."""
    assert deployment.hardware is not None, "the devices are those of a data sheet"
    free = DeviceEfficiency(plan_overhead=0.0, return_overhead=0.0)
    return replace(deployment, cost=RooflineCostModel(deployment.hardware, free))


def throughput(run: RunRecord) -> float:
    """Return the requests per second of a run."""
    return len(run.requests) / (run.end_time() - run.begin_time())


def bubbles(run: RunRecord) -> float:
    """Return the largest share of a stage's time in which it waits although there is work."""
    return max(use.bubble_share for use in run.stage_usages())


def step_seconds(run: RunRecord) -> float:
    """Return the mean time of a step on a stage."""
    return sum(use.busy for use in run.stage_usages()) / (len(run.micro_batches) * run.max_stages())


def latencies(run: RunRecord, metric: str) -> Sequence[float]:
    """Return a latency of each request in seconds."""
    return collect_latencies([served.line for served in run.requests.values()])[metric]


def errors(expected: RunRecord, measured: RunRecord) -> dict[tuple[str, int], float]:
    """Return the relative error of each percentile of each metric."""
    return {
        (metric, percent): percentile(latencies(measured, metric), percent)
        / percentile(latencies(expected, metric), percent)
        - 1
        for metric in METRICS
        for percent in PERCENTS
    }


def compare(title: str, expected: RunRecord, measured: RunRecord) -> list[list[str]]:
    """Return table rows with the percentiles of each metric."""
    return [
        [
            title,
            f"{metric.upper()} p{percent}",
            *(
                show_value(percentile(latencies(run, metric), percent), 1e3)
                for run in (expected, measured)
            ),
            f"{100 * error:+.1f} %",
        ]
        for (metric, percent), error in errors(expected, measured).items()
    ]


def claim_of(title: str, expected: RunRecord, measured: RunRecord) -> PaperClaim:
    """Return the claim that no percentile has an error above ALLOWED."""
    found = errors(expected, measured)
    (metric, percent), worst = max(found.items(), key=lambda item: abs(item[1]))
    return PaperClaim(
        f"{title}: largest error",
        ExpectedLimit(ALLOWED),
        abs(worst),
        f"({metric.upper()} p{percent} {100 * worst:+.1f} %)",
    )


def idle_row(name: str, ideal: RunRecord, expected: RunRecord, served: ServedLoad) -> list[str]:
    """Return a table row with throughput, bubbles and times of a step, all requests at once."""
    runs = ideal, expected, served.run
    return [
        name,
        *(show_value(throughput(run)) for run in runs),
        *(f"{100 * bubbles(run):.1f} %" for run in runs),
        show_value(step_seconds(served.run), 1e3),
        show_value(served.late_seconds, 1e3),
        show_value(served.cpu_seconds / len(served.run.micro_batches), 1e3),
    ]


def idle_claims(name: str, ideal: RunRecord, measured: RunRecord) -> list[PaperClaim]:
    """Return the claims on bubbles and throughput, all requests at once."""
    return [
        PaperClaim(f"{name}: bubbles", ExpectedLimit(MAX_BUBBLES), bubbles(measured)),
        PaperClaim(
            f"{name}: throughput over the ideal pipeline's",
            ExpectedLimit(MIN_THROUGHPUT, is_minimum=True),
            throughput(measured) / throughput(ideal),
        ),
    ]
