"""Compare scheduling policies under bursts, on a real pipeline of two stages.

Requests arrive in groups, with the lengths of Azure's traces scaled down; throttle, sarathi and
prefill-first alternate on the same requests. Run as `python -m benchmarks.cpu.bursts --model
FOLDER`; it prints the figures and writes them to docs/benchmarks/bursts.md. Figures of workloads
that did not run again stay.
"""

import asyncio
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import uvloop

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from gllm.commands.bench.real import LOG_DRAIN_SECONDS, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.step_log import StartEvent, read_step_log
from gllm.sim.metrics.report import format_table, look_up_metric, show_value, summarize_run
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import WorkloadRequest, make_workload, scale_request

POLICIES = ("throttle", "sarathi", "prefill-first")
WORKLOADS = ("azure-code", "azure-conv")
STAGES = 2
LENGTH_SCALE, CONTEXT = 1 / 8, 2048
BURST = 8
"""Requests that arrive at the same moment."""
SHARE = 0.7
"""Request rate as a share of throttle's throughput with all requests queued at once."""
PROBES = 48
"""Number of requests in the run that measures this throughput."""

COLUMNS = [
    ("total_tokens_per_second", "tokens/s", 1.0, True),
    ("ttft.mean", "TTFT mean, ms", 1e3, False),
    ("ttft.p99", "TTFT p99, ms", 1e3, False),
    ("itl.p50", "ITL p50, ms", 1e3, False),
    ("itl.p99", "ITL p99, ms", 1e3, False),
]
"""(path in a run's summary, label, factor, higher is better)."""
EXPLANATIONS = [
    ("steps", "micro-batches", 1.0),
    ("tokens_per_step.mean", "tokens in each", 1.0),
    ("tokens_per_step.p99", "p99", 1.0),
    ("bubble_share", "bubbles by stage, %", 100.0),
]
"""Figures that explain those of COLUMNS: (path, label, factor)."""


class LoggedEngine:
    """An engine and a reader of the new events in its step log."""

    def __init__(self, engine: Engine, log: Path) -> None:
        self._engine = engine
        self._log = log
        self._seen = 0

    async def serve(self, jobs: list[WorkloadRequest], seed: int) -> RunRecord:
        """Serve the jobs and return the record of the run."""
        await serve_workload(self._engine, jobs, seed)
        return await self.read_new_run()

    async def read_new_run(self) -> RunRecord:
        """Return the record of everything logged since the last call."""
        await asyncio.sleep(LOG_DRAIN_SECONDS)
        events = list(read_step_log(self._log))
        new, self._seen = events[self._seen :], len(events)
        start = events[0]
        assert isinstance(start, StartEvent), "read_step_log has checked it"
        return build_run_record([msgspec.structs.replace(start, warm_ups=0), *new])


def make_jobs(workload: str, count: int, rate: float, seed: int) -> list[WorkloadRequest]:
    """Generate scaled requests that arrive in bursts."""
    jobs = make_workload(workload, count, rate, f"burst:{BURST}", seed)
    return [scale_request(job, LENGTH_SCALE, CONTEXT) for job in jobs]


async def measure(
    config: EngineConfig, workloads: list[str], seconds: float, rounds: int
) -> dict[str, Any]:
    """Run every policy on the same requests, round by round, in alternating order."""
    with TemporaryDirectory(prefix="gllm-") as folder:
        engines: dict[str, LoggedEngine] = {}
        started: list[Engine] = []
        try:
            for policy in POLICIES:
                log = Path(folder) / f"{policy}.jsonl"
                scheduler = replace(config.scheduler, policy=policy, prefix_cache=False)
                engine = Engine(replace(config, scheduler=scheduler, step_log=str(log)))
                await engine.start()
                started.append(engine)
                engines[policy] = LoggedEngine(engine, log)
                await engines[policy].read_new_run()
            return {
                workload: await _measure_one(engines, workload, seconds, rounds)
                for workload in workloads
            }
        finally:
            for engine in started:
                await engine.stop()


async def _measure_one(
    engines: dict[str, LoggedEngine], workload: str, seconds: float, rounds: int
) -> dict[str, Any]:
    probes = [job._replace(arrival_seconds=0.0) for job in make_jobs(workload, PROBES, 1.0, seed=1)]
    probe = await engines[POLICIES[0]].serve(probes, seed=1)
    rate = SHARE * PROBES / (probe.end_time() - probe.begin_time())
    count = max(BURST, round(rate * seconds))
    foreign = ForeignCpu()
    summaries: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
    for turn in range(rounds):
        jobs = make_jobs(workload, count, rate, seed=2 + turn)
        for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
            summaries[policy].append(
                summarize_run(await engines[policy].serve(jobs, seed=2 + turn))
            )
    return {
        "rate": rate,
        "requests": count,
        "rounds": rounds,
        "foreign_cores": foreign.cores(),
        "policies": {policy: median_figures(each) for policy, each in summaries.items()},
    }


def median_figures(summaries: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure on the page, per stage where the page shows stages."""
    medians: dict[str, Any] = {}
    for path in [column[0] for column in COLUMNS] + [column[0] for column in EXPLANATIONS]:
        values = [look_up_metric(summary, path) for summary in summaries]
        by_stage = isinstance(values[0], list)
        medians[path] = (
            [median(v) for v in zip(*values, strict=True)] if by_stage else median(values)
        )
    return medians


def format_page(results: dict[str, Any]) -> str:
    """Format the figures in words and tables; the best value of a column is bold."""
    parts = [origin("benchmarks.cpu.bursts")]
    for workload, measured in results.items():
        policies = measured["policies"]
        rows = []
        for policy, figures in policies.items():
            row = [policy]
            for path, _, factor, more in COLUMNS:
                best = (max if more else min)(each[path] for each in policies.values())
                shown = show_value(figures[path], factor)
                row.append(f"**{shown}**" if figures[path] == best else shown)
            rows.append(
                row + [show_value(figures[path], factor) for path, _, factor in EXPLANATIONS]
            )
        header = ["policy", *(c[1] for c in COLUMNS), *(c[1] for c in EXPLANATIONS)]
        parts += [
            f"## {workload}: {measured['requests']} requests, "
            f"{show_value(measured['rate'])} a second",
            f"Medians of {measured['rounds']} rounds; others used {measured['foreign_cores']:.2f} "
            f"cores.\n\n{format_table(header, rows)}",
        ]
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "bursts", rounds=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of arrivals per run")
    options = parser.parse_args()
    config = EngineConfig.from_options(
        options.model,
        pipeline_parallel_size=STAGES,
        dtype=options.dtype,
        max_model_len=CONTEXT,
        kv_cache_memory=2**30,
    )
    older = options.output.with_suffix(".json")
    results = msgspec.json.decode(older.read_bytes()) if older.is_file() else {}
    work = measure(config, list(options.workloads), options.seconds, options.rounds)
    results |= uvloop.run(work)
    title = "Policies under bursts, two stages"
    write_results(options.output, title, format_page(results), results)


if __name__ == "__main__":
    main()
