"""Plan a service for this machine from its own profile, start it, and compare it with its plan.

Profiles the demo model on each of two cores, the other one busy as well; searches a plan for 70 %
of what two engines serve; starts it with `gllm up`; loads it with `gllm bench serve`; reads
`gllm plan diff`. The limit of TTFT comes from a simulation of the planned fleet at this rate, so
that 80 % of the simulated requests are within the limits: at 100 % errors of the prediction would
not show. Steps have a minimum time, so that two engines on two cores are as fast as two machines.
The same at full speed follows, whose errors are printed and not judged. Run as
`python -m benchmarks.planned_service` on two idle cores; `--quick` shows that everything works.
"""

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.planned_service.page import format_page
from benchmarks.planned_service.planning import Setup, measure_profiles, search_plan
from benchmarks.planned_service.rounds import measure_round, measure_scaling

PAGE = Path("docs/benchmarks/planned-service.md")
STEP_SECONDS = 0.03
"""Minimum time of a step: several times the demo model's, so that both engines, router and client
have cores to spare."""


async def measure_setup(
    setup: Setup, options: argparse.Namespace, folder: Path, progress: Callable[[str], None]
) -> dict[str, Any]:
    """Return the figures of one setup: its plan, its rounds, and how capacities add up."""
    foreign, begin = ForeignCpu(), time.monotonic()
    profile = await measure_profiles(setup, folder)
    progress(f"{setup.name}: profiles took {time.monotonic() - begin:.0f} s")
    begin = time.monotonic()
    planned = await search_plan(profile, options.requests, folder)
    plan = planned.plan
    assert plan.expected is not None, "gllm plan search writes figures"
    progress(f"{setup.name}: searches took {time.monotonic() - begin:.0f} s: {plan.expected}")
    scaling = []
    if setup.step_seconds:
        scaling = await measure_scaling(plan, planned.capacity, options.seconds / 3)
        progress(f"{setup.name}: one and two engines: {scaling}")
    rounds = []
    for seed in range(setup.num_rounds):
        rounds.append(await measure_round(plan, options.seconds, seed, folder))
        progress(f"{setup.name}: round {seed + 1}: {rounds[-1]}")
    return {
        "setup": setup.name,
        "step_seconds": setup.step_seconds,
        "num_engines": len(plan.engines),
        "capacity": planned.capacity,
        "rate": plan.expected.rate,
        "limits": planned.limits,
        "shifted": planned.shifted,
        "command": planned.command,
        "scaling": scaling,
        "rounds": rounds,
        "foreign_cores": foreign.cores(),
    }


async def measure(
    options: argparse.Namespace, progress: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Return the figures of the setup that is judged, and of the one at full speed."""
    setups = [
        Setup("minimum step time", STEP_SECONDS, options.rounds),
        Setup("full speed", 0.0, 1),
    ]
    results = []
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        for setup in setups:
            results.append(await measure_setup(setup, options, Path(folder), progress))
    return results


def main() -> int:
    """Measure both setups and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="of the judged setup")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each round")
    parser.add_argument("--requests", type=int, default=600, help="least requests per simulation")
    parser.add_argument("--quick", action="store_true", help="short: shows that everything works")
    parser.add_argument("--output", type=page_path, default=PAGE)
    options = parser.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("the engines need a core each: run this on a machine with two cores at least")
    if options.quick:
        options.rounds, options.seconds, options.requests = 1, 12.0, 200
    begin = time.monotonic()

    def progress(text: str) -> None:
        print(f"[{time.monotonic() - begin:4.0f} s] {text}", file=sys.stderr, flush=True)

    results = asyncio.run(measure(options, progress))
    figures = f"{origin('benchmarks.planned_service')}\n\n{format_page(results)}"
    write_results(options.output, "A planned service", figures, {"setups": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
