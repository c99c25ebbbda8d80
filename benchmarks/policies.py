"""How even micro-batches are under each policy, and whether a policy changes any output.

One trace is served by a real pipeline of the demo model once for each policy and round. Run as
`python -m benchmarks.policies`; it prints the page and writes it to docs/benchmarks/policies.md.
With `--profile FILE --output PAGE` a simulated pipeline serves, which nothing else slows down.
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

from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.experiments.real import run_logged, serve_workload
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import simulate
from gllm.sim.options import SimulationConfig, build_deployment
from gllm.sim.report import coefficient_of_variation, format_table, show_value
from gllm.sim.run_record import RunRecord, build_run_record
from gllm.sim.workload import WorkloadRequest, make_workload, scale_request

POLICIES = ("throttle", "throttle-no-wt", "throttle-no-ut", "throttle-paper", "sarathi", "balance")
BASE = "sarathi"
STAGES = 2
LENGTH_SCALE = 0.2
CONTEXT = 1024
"""The demo model's: the trace's lengths, up to 14,050 tokens, are scaled and cut to it."""
SHARES = (0.7, 0.9)
"""Of capacity: loaded, yet no queue that only grows."""
AIM = 0.5
"""Most that throttle's coefficients of variation may be of sarathi's."""
NEIGHBOURS = 16
"""Micro-batches around one, in its running mean."""

Outputs = list[list[int]]
Serve = Callable[[str, list[WorkloadRequest]], tuple[RunRecord, Outputs]]
"""Serves jobs under a policy."""


class Evenness(NamedTuple):
    """The micro-batches of one run."""

    steps: float
    tokens: float
    """Mean."""
    decodes: float
    """Mean of decode rows."""
    tokens_variation: float
    decodes_variation: float
    local_variation: float
    """Of decode rows around their running mean: without what the load itself changes."""
    prefill_share: float
    """Of micro-batches, 0..1."""
    prefill_tokens: float
    """Mean over micro-batches with prefill."""


def evenness(run: RunRecord) -> Evenness:
    """Of all micro-batches from the first request's arrival to the last one's end. A micro-batch
    has at least one row: where there is nothing to do, there is none."""
    tokens = [float(step.work.num_tokens) for step in run.micro_batches]
    decodes = [float(step.num_decode_tokens) for step in run.micro_batches]
    prefills = [step.num_prefill_tokens for step in run.micro_batches if step.num_prefill_tokens]
    around = [
        rows - fmean(decodes[max(0, place - NEIGHBOURS // 2) : place + NEIGHBOURS // 2 + 1])
        for place, rows in enumerate(decodes)
    ]
    return Evenness(
        *(len(tokens), fmean(tokens), fmean(decodes)),
        *(
            coefficient_of_variation(tokens),
            coefficient_of_variation(decodes),
            pstdev(around) / fmean(decodes),
        ),
        *(len(prefills) / len(tokens), fmean(prefills)),
    )


def serve_really(policy: str, jobs: list[WorkloadRequest]) -> tuple[RunRecord, Outputs]:
    """Serve the jobs with an engine of their own.

    In float32: a bfloat16 product rounds differently in a batch of another shape, so that two runs
    of one policy differ.
    """
    outputs: Outputs = []

    async def work(engine: Engine) -> None:
        outputs.extend(await serve_workload(engine, jobs))

    config = EngineConfig.from_options(
        "demo", pipeline_parallel_size=STAGES, policy=policy, dtype="float32"
    )
    return build_run_record(asyncio.run(run_logged(config, work))), outputs


def simulate_it(
    profile: str, policy: str, jobs: list[WorkloadRequest]
) -> tuple[RunRecord, Outputs]:
    """Serve the jobs with a simulated pipeline; there are no outputs."""
    config = SimulationConfig(profile=profile, scheduler=SchedulerConfig(policy=policy))
    return simulate(build_deployment(config, CONTEXT), jobs)[0], []


def jobs_at(rate: float, count: int) -> list[WorkloadRequest]:
    """Lengths of azure-conv within the demo model's context, Poisson arrivals."""
    jobs = make_workload("azure-conv", count, rate, seed=11)
    return [scale_request(job, LENGTH_SCALE, CONTEXT) for job in jobs]


def capacity(serve: Serve, count: int) -> float:
    """Requests a second that throttle serves with all of them there at once."""
    run, _ = serve("throttle", [job._replace(arrival_seconds=0.0) for job in jobs_at(1.0, count)])
    return count / (run.end - run.begin)


@dataclass
class Measured:
    """What came out at one share of capacity."""

    capacities: list[float] = field(default_factory=list)
    """Of each round: what else a machine does changes from one to the next."""
    rounds: dict[str, list[Evenness]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[str, set[bytes]] = field(default_factory=lambda: defaultdict(set))
    """All different ones; none of a simulation."""

    @property
    def figures(self) -> dict[str, Evenness]:
        """Medians over the rounds."""
        return {
            policy: Evenness(*map(median, zip(*self.rounds[policy], strict=True)))
            for policy in POLICIES
        }


def measure(serve: Serve, share: float, count: int, rounds: int) -> Measured:
    """Every policy on the same jobs, round by round, in alternating order."""
    measured = Measured()
    for turn in range(rounds):
        most = capacity(serve, count)
        measured.capacities.append(most)
        jobs = jobs_at(share * most, count)
        for policy in POLICIES if turn % 2 == 0 else reversed(POLICIES):
            run, tokens = serve(policy, jobs)
            measured.rounds[policy].append(evenness(run))
            if tokens:
                measured.outputs[policy].add(repr(tokens).encode())
            print(f"{share:.0%}, round {turn + 1}: {policy} served", file=sys.stderr)
    return measured


def table(measured: Measured) -> str:
    """Policies side by side."""
    header = ["policy", "micro-batches", "decode rows", "CV", f"x {BASE}'s", "around running mean"]
    header += ["tokens", "CV", f"x {BASE}'s", "with prefill, %", "prefill tokens there"]
    figures, outputs = measured.figures, measured.outputs
    base, rows = figures[BASE], []
    for policy, each in figures.items():
        different = len(outputs[policy] | outputs[BASE])
        rows.append(
            [
                *(policy, f"{each.steps:.0f}"),
                *(show_value(each.decodes), show_value(each.decodes_variation)),
                f"{each.decodes_variation / base.decodes_variation:.2f}",
                *(
                    show_value(each.local_variation),
                    show_value(each.tokens),
                    show_value(each.tokens_variation),
                ),
                f"{each.tokens_variation / base.tokens_variation:.2f}",
                *(show_value(each.prefill_share, 100), show_value(each.prefill_tokens)),
                ("-", "yes", "**no**")[min(different, 2)],
            ]
        )
    return format_table([*header, "outputs equal"], rows)


def verdict(figures: dict[str, Evenness]) -> str:
    """What AIM says of throttle."""
    ours, base = figures["throttle"], figures[BASE]
    ratios = {
        "decode rows": ours.decodes_variation / base.decodes_variation,
        "tokens": ours.tokens_variation / base.tokens_variation,
    }
    words = [
        f"{what} {ratio:.2f} x ({'met' if ratio <= AIM else '**missed**'})"
        for what, ratio in ratios.items()
    ]
    return f"throttle's CV beside {BASE}'s, aim {AIM} x: {', '.join(words)}."


def processor() -> str:
    """The CPU's name."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def page(serve: Serve, how: str, requests: int, rounds: int) -> str:
    """Measure, and say what was measured and how."""
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
        f"rows less their mean over {NEIGHBOURS + 1} micro-batches, so without what the load "
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
    """Print the page and write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", help="simulate, by this file of `gllm profile demo --pp 2`")
    parser.add_argument("--output", default="docs/benchmarks/policies.md")
    options = parser.parse_args()
    serve = partial(simulate_it, options.profile) if options.profile else serve_really
    how = "simulated" if options.profile else "real pipeline"
    text = page(serve, how, options.requests, options.rounds)
    Path(options.output).write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
