"""Compare how even micro-batches are under each policy, and check that outputs are equal.

A real pipeline of the demo model serves one trace once per policy and round. Run as `python -m
benchmarks.policies`; it prints the page and writes it to docs/benchmarks/policies.md. With
`--profile FILE --output PAGE` a simulated pipeline serves the trace, undisturbed by other
processes.
"""

import argparse
import asyncio
import datetime
import os
import platform
import shlex
import sys
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median, pstdev
from typing import NamedTuple

from gllm.commands.bench.real import run_logged, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import simulate
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.metrics.statistics import coefficient_of_variation
from gllm.sim.options import SimulationConfig, build_deployment
from gllm.sim.workloads.requests import WorkloadRequest, make_workload, scale_request

POLICIES = ("throttle", "throttle-no-wt", "throttle-no-ut", "throttle-paper", "sarathi", "balance")
BASE = "sarathi"
STAGES = 2
LENGTH_SCALE = 0.2
CONTEXT = 1024
"""Context of the demo model: the trace's lengths, up to 14,050 tokens, are scaled and cut to it."""
SHARES = (0.7, 0.9)
"""Request rates as shares of capacity: under load, but without a growing queue."""
AIM = 0.5
"""Maximum ratio of throttle's coefficients of variation to sarathi's."""
NUM_NEIGHBOURS = 16
"""Neighbouring micro-batches in the running mean."""

Outputs = list[list[int]]
Serve = Callable[[str, list[WorkloadRequest]], tuple[RunRecord, Outputs]]
"""Function that serves jobs under a policy."""


class Evenness(NamedTuple):
    """Evenness of the micro-batches of one run."""

    steps: float
    tokens: float
    """Mean tokens per micro-batch."""
    decodes: float
    """Mean decode rows per micro-batch."""
    tokens_variation: float
    decodes_variation: float
    local_variation: float
    """Variation of decode rows around their running mean: excludes changes of the load itself."""
    prefill_share: float
    """Share of micro-batches with prefill, 0..1."""
    prefill_tokens: float
    """Mean prefill tokens of micro-batches with prefill."""


def evenness(run: RunRecord) -> Evenness:
    """Return the evenness of all micro-batches from the first arrival to the end of the last one.

    A micro-batch has at least one row; an idle pipeline has no micro-batches.
    """
    tokens = [float(step.work.num_tokens) for step in run.micro_batches]
    decodes = [float(step.num_decode_tokens) for step in run.micro_batches]
    prefills = [step.num_prefill_tokens for step in run.micro_batches if step.num_prefill_tokens]
    around = [
        rows - fmean(decodes[max(0, place - NUM_NEIGHBOURS // 2) : place + NUM_NEIGHBOURS // 2 + 1])
        for place, rows in enumerate(decodes)
    ]
    return Evenness(
        steps=len(tokens),
        tokens=fmean(tokens),
        decodes=fmean(decodes),
        tokens_variation=coefficient_of_variation(tokens),
        decodes_variation=coefficient_of_variation(decodes),
        local_variation=pstdev(around) / fmean(decodes),
        prefill_share=len(prefills) / len(tokens),
        prefill_tokens=fmean(prefills),
    )


def serve_with_engine(policy: str, jobs: list[WorkloadRequest]) -> tuple[RunRecord, Outputs]:
    """Serve the jobs with a new engine.

    The engine uses float32: a bfloat16 product rounds differently in a batch of another shape, so
    that two runs of one policy would differ.
    """
    outputs: Outputs = []

    async def work(engine: Engine) -> None:
        outputs.extend(await serve_workload(engine, jobs))

    config = EngineConfig.from_options(
        "demo", pipeline_parallel_size=STAGES, policy=policy, dtype="float32"
    )
    return build_run_record(asyncio.run(run_logged(config, work))), outputs


def serve_simulated(
    profile: str, policy: str, jobs: list[WorkloadRequest]
) -> tuple[RunRecord, Outputs]:
    """Serve the jobs with a simulated pipeline, which has no outputs."""
    config = SimulationConfig(profile=profile, scheduler=SchedulerConfig(policy=policy))
    return simulate(build_deployment(config, CONTEXT), jobs), []


def make_jobs(rate: float, count: int) -> list[WorkloadRequest]:
    """Generate requests with azure-conv's lengths in the demo model's context, Poisson arrivals."""
    jobs = make_workload("azure-conv", count, rate, seed=11)
    return [scale_request(job, LENGTH_SCALE, CONTEXT) for job in jobs]


def measure_capacity(serve: Serve, count: int) -> float:
    """Return the requests per second that throttle serves with all of them queued at once."""
    run, _ = serve("throttle", [job._replace(arrival_seconds=0.0) for job in make_jobs(1.0, count)])
    return count / (run.end_time() - run.begin_time())


@dataclass
class Measured:
    """Results at one share of capacity."""

    capacities: list[float] = field(default_factory=list)
    """Capacity in each round; it changes with the load of the machine."""
    rounds: dict[str, list[Evenness]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """Distinct outputs by policy; empty for a simulation."""

    @property
    def figures(self) -> dict[str, Evenness]:
        """Medians over the rounds, by policy."""
        return {
            policy: Evenness(*map(median, zip(*self.rounds[policy], strict=True)))
            for policy in POLICIES
        }


def measure(serve: Serve, share: float, count: int, rounds: int) -> Measured:
    """Run every policy on the same jobs, round by round, in alternating order."""
    measured = Measured()
    for turn in range(rounds):
        most = measure_capacity(serve, count)
        measured.capacities.append(most)
        jobs = make_jobs(share * most, count)
        for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
            run, tokens = serve(policy, jobs)
            measured.rounds[policy].append(evenness(run))
            if tokens:
                measured.outputs[policy].add(repr(tokens).encode())
            print(f"{share:.0%}, round {turn + 1}: {policy} served", file=sys.stderr)
    return measured


def table(measured: Measured) -> str:
    """Format the table of the policies."""
    header = ["policy", "micro-batches", "decode rows", "CV", f"x {BASE}'s", "around running mean"]
    header += ["tokens", "CV", f"x {BASE}'s", "with prefill, %", "prefill tokens there"]
    figures, outputs = measured.figures, measured.outputs
    base, rows = figures[BASE], []
    for policy, each in figures.items():
        different = len(outputs[policy] | outputs[BASE])
        rows.append(
            [
                policy,
                f"{each.steps:.0f}",
                show_value(each.decodes),
                show_value(each.decodes_variation),
                f"{each.decodes_variation / base.decodes_variation:.2f}",
                show_value(each.local_variation),
                show_value(each.tokens),
                show_value(each.tokens_variation),
                f"{each.tokens_variation / base.tokens_variation:.2f}",
                show_value(each.prefill_share, 100),
                show_value(each.prefill_tokens),
                ("-", "yes", "**no**")[min(different, 2)],
            ]
        )
    return format_table([*header, "outputs equal"], rows)


def verdict(figures: dict[str, Evenness]) -> str:
    """Format the verdict on throttle against AIM."""
    ours, base = figures["throttle"], figures[BASE]
    ratios = {
        "decode rows": ours.decodes_variation / base.decodes_variation,
        "tokens": ours.tokens_variation / base.tokens_variation,
    }
    words = [
        f"{name} {ratio:.2f} x ({'met' if ratio <= AIM else '**missed**'})"
        for name, ratio in ratios.items()
    ]
    return f"throttle's CV beside {BASE}'s, aim {AIM} x: {', '.join(words)}."


def processor() -> str:
    """Return the CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def page(serve: Serve, how: str, requests: int, rounds: int) -> str:
    """Measure, and format the page with a description of the measurement."""
    command = shlex.join(["python", "-m", "benchmarks.policies", *sys.argv[1:]])
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    parts = [
        f"# Policies on one trace, {how}\n\nMade by `{command}`; overwritten by it. "
        f"{os.cpu_count()} cores, {processor()}, {versions}, {datetime.date.today()}.",
        f"The demo model in float32 at --pp {STAGES}, {requests} requests of azure-conv's lengths "
        f"x {LENGTH_SCALE}, cut to {CONTEXT} tokens, prompts of random tokens, no two alike, "
        "greedy. Arrivals are Poisson at a share of capacity, the same for all policies of a "
        "round; capacity is what throttle serves with all requests there at once, measured before "
        f"each round. Rounds: {rounds}; figures are their medians.",
        "Counted are all micro-batches from the first arrival to the last token; each has at "
        "least one row. CV: standard deviation over mean. Around running mean: the same of decode "
        f"rows less their mean over {NUM_NEIGHBOURS + 1} micro-batches, so without what the load "
        "itself changes over time, which no policy takes away. Outputs equal: every token of "
        f"every request, in every round, as {BASE}'s.",
    ]
    for share in SHARES:
        measured = measure(serve, share, requests, rounds)
        rates = ", ".join(show_value(share * most) for most in measured.capacities)
        parts += [
            f"## {share:.0%} of capacity: {rates} requests/s",
            table(measured),
            verdict(measured.figures),
        ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure, print the page and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", help="simulate, by this file of `gllm profile demo --pp 2`")
    parser.add_argument("--output", default="docs/benchmarks/policies.md")
    options = parser.parse_args()
    serve = partial(serve_simulated, options.profile) if options.profile else serve_with_engine
    how = "simulated" if options.profile else "real pipeline"
    text = page(serve, how, options.requests, options.rounds)
    Path(options.output).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
