"""Profiles of this machine, and the plan that `gllm plan search` makes of them."""

import asyncio
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.cpu.serving import free_port
from benchmarks.planned_service.limits import (
    choose_limits,
    shifted_attainments,
    simulate_plan,
)
from gllm.observability.latency import slo_attainment
from gllm.plan.serving_plan import LatencyGoals, ServingPlan, read_plan
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.profile import CostProfile, read_profile, write_profile

MAX_NUM_SEQS = 8
PROMPT_TOKENS, OUTPUT_TOKENS = 100, 32
WORKLOAD = f"fixed:{PROMPT_TOKENS},{OUTPUT_TOKENS}"
TTFT_SECONDS, TPOT_SECONDS = 0.5, 0.1
LIMITS = f"ttft={TTFT_SECONDS},tpot={TPOT_SECONDS}"
"""Latency limits of each request in the search for the capacity, in seconds."""
RUN_SECONDS = "15"
"""Least time of a simulation: many requests, and 30 times the limit of TTFT."""
LOAD_SHARE = 0.7
"""Request rate per predicted capacity of the fleet."""
NUM_ENGINES = 2


class Setup(NamedTuple):
    """One way to run the engines."""

    name: str
    step_seconds: float
    """Minimum time of a step; 0: none."""
    num_rounds: int

    @property
    def profile_flags(self) -> list[str]:
        """Flags of `gllm profile`."""
        flags = ["--threads", "1", "--dtype", "float32", "--max-num-seqs", str(MAX_NUM_SEQS)]
        if self.step_seconds:
            flags += ["--debug-step-seconds", str(self.step_seconds)]
        return flags


async def run_gllm(arguments: Sequence[str], core: int | None = None) -> str:
    """Run a command of gllm, on one core if `core` is given; return its output.

    Raises:
        RuntimeError: it has failed; the message is its output.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gllm", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    if core is not None:
        # Before it starts threads and processes of its own, which inherit the core.
        os.sched_setaffinity(process.pid, {core})
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.kill()
        raise
    text = output.decode()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(['gllm', *arguments])}: {text[-2000:]}")
    return text


async def measure_profiles(setup: Setup, folder: Path) -> Path:
    """Profile the demo model on two cores at once; return the file with the steps of both.

    Each profile's engine is the other one's load.
    """
    cores = sorted(os.sched_getaffinity(0))[:NUM_ENGINES]
    paths = [folder / f"profile-{core}.json" for core in cores]
    async with asyncio.TaskGroup() as group:
        for core, path in zip(cores, paths, strict=True):
            arguments = ["profile", "demo", *setup.profile_flags, "--output", str(path)]
            group.create_task(run_gllm(arguments, core))
    merged = folder / "profile.json"
    write_profile(merge_profiles([read_profile(path) for path in paths]), merged)
    return merged


def merge_profiles(profiles: Sequence[CostProfile]) -> CostProfile:
    """Return the first profile with the measurements of all."""
    names = ("steps", "links", "plans", "sampling", "returns", "spans", "samplers")
    lists = {name: [row for each in profiles for row in getattr(each, name)] for name in names}
    return msgspec.structs.replace(profiles[0], **lists)


class PlannedService(NamedTuple):
    """A plan, and how it was made."""

    plan: ServingPlan
    command: str
    """The search for the fleet, run in the folder of the profile."""
    capacity: float
    """Requests per second that the fleet serves within LIMITS."""
    limits: str
    """Limits of each request in the plan, as `--slo` takes them."""
    shifted: tuple[float, float]
    """Expected attainments (0..1) if all latencies were longer, and shorter, by SHIFT."""


async def search_plan(profile: Path, num_requests: int, folder: Path) -> PlannedService:
    """Return the plan for LOAD_SHARE of what two engines serve.

    The first search finds the capacity of an engine, the second one the fleet for the rate, both
    within LIMITS. A simulation of the fleet gives the limits that `choose_limits` states, and the
    attainment that the plan expects of them.

    Args:
        profile: File of `gllm profile`.
        num_requests: Least number of requests per simulation.
        folder: For the plans.
    """
    path = folder / "plan.yaml"
    arguments = ["plan", "search", "--profile", str(profile), "--cores", str(NUM_ENGINES)]
    arguments += ["--pp", "1", "--workload", WORKLOAD, "--checkpoint", "demo"]
    arguments += [
        "--requests",
        str(num_requests),
        "--run-seconds",
        RUN_SECONDS,
        "--output",
        str(path),
    ]
    await run_gllm([*arguments, "--slo", LIMITS])
    single = read_plan(path)
    expected = single.expected
    assert expected is not None, "gllm plan search writes figures"
    assert expected.capacity is not None, "and the capacity"
    arguments += ["--policies", policy_of(single)]
    arguments += ["--rate", f"{NUM_ENGINES * LOAD_SHARE * expected.capacity:.4g}"]
    await run_gllm([*arguments, "--slo", LIMITS])
    fleet = read_plan(path)
    assert fleet.expected is not None, "gllm plan search writes figures"
    assert fleet.expected.capacity is not None, "and the capacity"
    lines = await asyncio.to_thread(simulate_plan, fleet, profile, WORKLOAD, num_requests)
    limits = choose_limits(lines, TPOT_SECONDS)
    attainment = slo_attainment(lines, limits)
    plan = msgspec.structs.replace(
        fleet,
        slo=LatencyGoals(limits.ttft_seconds, limits.tpot_seconds),
        expected=msgspec.structs.replace(fleet.expected, attainment=attainment),
    )
    if len(plan.engines) != NUM_ENGINES:
        raise RuntimeError(f"the plan has {len(plan.engines)} engines: {path.read_text()}")
    command = fleet.expected.by.replace(f"{folder}/", "")
    text = f"ttft={limits.ttft_seconds:g},tpot={limits.tpot_seconds:g}"
    shifted = shifted_attainments(lines, limits)
    return PlannedService(plan, command, fleet.expected.capacity, text, shifted)


def policy_of(plan: ServingPlan) -> str:
    """Return the policy of a plan's first engine, as `gllm plan search --policies` takes it."""
    scheduler = next(iter(plan.engines.values())).scheduler
    policy, tokens = scheduler.get("policy"), scheduler.get("max_num_batched_tokens")
    return f"{policy or SchedulerConfig().policy}" + (f":{tokens}" if tokens else "")


def select_engines(plan: ServingPlan, num_engines: int) -> ServingPlan:
    """Return a plan of its first engines, on free ports."""
    assert plan.router is not None, "gllm plan search writes a router"
    names = list(plan.engines)[:num_engines]
    hub = f"127.0.0.1:{free_port()}"
    router = msgspec.structs.replace(plan.router, port=free_port(), flags={"hub": hub})
    engines = {name: plan.engines[name] for name in names}
    return msgspec.structs.replace(plan, engines=engines, router=router)
