"""The simulator with DistServe's coefficients compared with DistServe's real runs.

An engine that disaggregates is two simulated engines in a row: the first one computes prompts and
their first tokens, the second one gets each request when its first token is there, and its prompt
costs nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import PaperClaim
from experiments.parallel import map_parallel
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.distserve import DistServeCostModel, read_coefficients, read_kv_capacity
from gllm.sim.data_tables import TableRow, read_table
from gllm.sim.deployment import Deployment, simulate
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.hardware.stages import split_layers_evenly
from gllm.sim.metrics.plots import plot_bars
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest

MODEL = "opt-13b"
RUNS_FILE = "distserve_sharegpt_runs.csv.gz"
MAX_MODEL_LEN = 2048
"""Context of OPT, in tokens."""
DEFAULT_LAYOUT = "c21d11"
"""Layout of DistServe's runs whose files name none."""
POLICY = "vllm"
MAX_BATCHED_TOKENS = 2560
"""Prompt tokens per micro-batch: vLLM's default at the time; DistServe's is not published."""
REFERENCE = "Zhong et al., DistServe, OSDI 2024"
QUICK_RUNS, QUICK_REQUESTS = 4, 60

SETTING = f"""real runs of OPT-13B on A100-80G with ShareGPT's lengths, from the artifact of
DistServe. Simulated: the same requests at the same times, with the coefficients that the
artifact has for both systems; they contain no host time between steps. Each vLLM engine is one
GPU. c21d12: prefill at TP 2, PP 1, decode at TP 1, PP 2; runs that name no layout are
simulated as {DEFAULT_LAYOUT}. Policy of all engines: `{POLICY}`, at most
{MAX_BATCHED_TOKENS:,} prompt tokens per micro-batch; KV caches as published. Transfers of KV
cache take no time, and a prompt leaves the prefill engine's cache when it ends. The real one
keeps it until the decode engine has a place: overloaded decode engines delay prompts in the
real runs only. Decode steps were measured with up to 49,152 tokens of context; loaded engines
have up to 2.6 times as many in a batch, and their times are extrapolated, as DistServe does."""


@dataclass(frozen=True)
class Latencies:
    """Latencies of all requests of a run, in seconds."""

    ttft: list[float]
    tpot: list[float]
    """Only of requests with at least two output tokens."""


@dataclass(frozen=True)
class RealRun:
    """A run of a real system."""

    system: str
    layout: str
    """Such as c21d12: prefill TP 2 PP 1, decode TP 1 PP 2; empty if the file names none."""
    rate: float
    """Requests per second."""
    jobs: tuple[WorkloadRequest, ...]
    real: Latencies

    @property
    def title(self) -> str:
        """System, layout and rate."""
        return f"{self.system} {self.layout or '(not named)'}"


def read_real_runs() -> list[RealRun]:
    """Return all runs, by system, layout and rate."""

    def key(row: TableRow) -> tuple[str, str, float, int]:
        return row["system"], row["layout"], float(row["rate"]), int(row["num_requests"])

    runs = []
    rows = sorted(read_table(RUNS_FILE), key=key)
    for (system, layout, rate, _), group in groupby(rows, key):
        requests = sorted(group, key=lambda row: float(row["arrival_s"]))
        jobs = tuple(
            WorkloadRequest(
                float(row["arrival_s"]), int(row["prompt_tokens"]), int(row["output_tokens"])
            )
            for row in requests
        )
        real = Latencies(
            [float(row["ttft_ms"]) / 1e3 for row in requests],
            [float(row["tpot_ms"]) / 1e3 for row in requests if int(row["output_tokens"]) > 1],
        )
        runs.append(RealRun(system, layout, rate, jobs, real))
    return runs


def simulate_run(run: RealRun) -> Latencies:
    """Return the latencies that the simulator predicts for the requests of a real run."""
    if run.system == "vllm":
        record = simulate(_engine("vllm", 1, 1), list(run.jobs))
        lines = [record.requests[seq].line for seq in range(len(run.jobs))]
        return Latencies(
            [line.ttft for line in lines if line.ttft is not None],
            [line.tpot for line in lines if line.tpot is not None],
        )
    prefill_tp, prefill_pp, decode_tp, decode_pp = (
        int(digit) for digit in (run.layout or DEFAULT_LAYOUT) if digit.isdigit()
    )
    prefills = simulate(
        _engine("distserve", prefill_tp, prefill_pp),
        [job._replace(num_output_tokens=1) for job in run.jobs],
    )
    return _decode(run.jobs, prefills, _engine("distserve", decode_tp, decode_pp, False))


def _decode(jobs: Sequence[WorkloadRequest], prefills: RunRecord, engine: Deployment) -> Latencies:
    """Return the latencies of jobs that are decoded by another engine than their prompts."""
    ttfts = [prefills.requests[seq].line.ttft or 0.0 for seq in range(len(jobs))]
    firsts = [job.arrival_seconds + ttft for job, ttft in zip(jobs, ttfts, strict=True)]
    order = sorted((seq for seq, job in enumerate(jobs) if job.num_output_tokens > 1),
                   key=firsts.__getitem__)  # fmt: skip
    # The prompt's own token comes at once and stands for the one that prefill has returned.
    decodes = simulate(engine, [jobs[seq]._replace(arrival_seconds=firsts[seq]) for seq in order])
    tpots = []
    for index, seq in enumerate(order):
        latency = decodes.requests[index].line.e2el
        if latency is not None:
            tpots.append(latency / (jobs[seq].num_output_tokens - 1))
    return Latencies(ttfts, tpots)


def _engine(system: str, tp: int, pp: int, has_prefill: bool = True) -> Deployment:
    """Return an engine with the published coefficients and KV capacity."""
    config = SchedulerConfig(
        policy=POLICY, max_num_batched_tokens=MAX_BATCHED_TOKENS, prefix_cache=False,
        async_scheduling=False,
    )  # fmt: skip
    layers = split_layers_evenly(MODELS[MODEL].layers, pp)
    blocks = read_kv_capacity(MODEL, tp, pp) // config.block_size
    cost: CostModel = DistServeCostModel(
        read_coefficients(system, MODEL, tp), pp, extrapolates_context=True
    )
    if not has_prefill:
        cost = DecodeOnlyCostModel(cost)
    return Deployment(MODEL, layers, cost, config.resolve(pp, blocks, MAX_MODEL_LEN))


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate every real run and compare the latencies."""
    runs = read_real_runs()
    if options.quick:
        runs = [
            RealRun(
                run.system, run.layout, run.rate, run.jobs[:QUICK_REQUESTS],
                Latencies(run.real.ttft[:QUICK_REQUESTS], run.real.tpot[:QUICK_REQUESTS]),
            )
            for run in runs[:: len(runs) // QUICK_RUNS]
        ]  # fmt: skip
    predicted = map_parallel(simulate_run, runs, options.jobs, options.progress)
    pairs = list(zip(runs, predicted, strict=True))
    text = (
        f"{len(runs)} {SETTING}\n\n"
        + format_table(
            ["system", "rate/s", "requests", "TTFT real, ms", "simulated", "error",
             "TPOT real, ms", "simulated", "error", "mean TPOT real", "simulated"],
            [_row(*pair) for pair in pairs],
        )
        + "\n\nMedians, and means in the last columns.\n"
    )  # fmt: skip
    return ExperimentResult(
        "DistServe's real runs in the simulator",
        text,
        _claims(pairs),
        {"distserve-runs.svg": lambda path: _plot(pairs, path)},
        reference=REFERENCE,
    )


def _error(real: Sequence[float], predicted: Sequence[float]) -> float:
    """Return the relative error of the predicted median."""
    return median(predicted) / median(real) - 1


def _row(run: RealRun, predicted: Latencies) -> list[str]:
    row = [run.title, f"{run.rate:g}", str(len(run.jobs))]
    for real, ours in ((run.real.ttft, predicted.ttft), (run.real.tpot, predicted.tpot)):
        row += [f"{1e3 * median(real):.1f}", f"{1e3 * median(ours):.1f}"]
        row.append(f"{100 * _error(real, ours):+.1f} %")
    return [*row, f"{1e3 * fmean(run.real.tpot):.1f}", f"{1e3 * fmean(predicted.tpot):.1f}"]


def _claims(pairs: Sequence[tuple[RealRun, Latencies]]) -> list[PaperClaim]:
    """Return the mean errors of each system and layout."""
    claims = []
    for title in dict.fromkeys(real.title for real, _ in pairs):
        group = [pair for pair in pairs if pair[0].title == title]
        ttft = fmean(abs(_error(real.real.ttft, ours.ttft)) for real, ours in group)
        tpot = fmean(abs(_error(real.real.tpot, ours.tpot)) for real, ours in group)
        claims.append(
            PaperClaim(
                f"{title}, {len(group)} runs: mean error of the medians",
                "its own simulator: attainment within 2 points",
                None,
                f"TTFT {100 * ttft:.1f} %, TPOT {100 * tpot:.1f} %",
            )
        )
    return claims


def _plot(pairs: Sequence[tuple[RealRun, Latencies]], path: Path) -> None:
    bars = {
        f"{run.title} {run.rate:g}/s": {
            "TTFT": 100 * abs(_error(run.real.ttft, ours.ttft)),
            "TPOT": 100 * abs(_error(run.real.tpot, ours.tpot)),
        }
        for run, ours in pairs
    }
    plot_bars(bars, path, "error of the median, %", "DistServe's real runs in the simulator")
