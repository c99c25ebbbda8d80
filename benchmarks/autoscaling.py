"""Engines that follow the rate: `gllm up` with a router that scales, under a load that changes.

Run as `python -m benchmarks.autoscaling`; `--seconds 30 --output PAGE` for a short look. The
highest rates of one engine and of two are measured first, with all their seats taken. Requests then
arrive at 0.5, 1.6, 0 and 0.5 of one engine's. A minimum time per step keeps two engines on two
cores as fast as two machines. The page has the engines that were wanted and that were ready over
time, and the wait of the request that woke the service.
"""

import argparse
import asyncio
import json
import math
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import uvloop

from benchmarks.cpu.page import origin, write_results
from benchmarks.cpu.serving import free_port
from benchmarks.fleet_processes import open_session, ready_service, serving
from gllm.observability.latency import percentile
from gllm.plan.serving_plan import (
    EnginePlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.sim.metrics.plots import open_picture
from gllm.sim.metrics.report import format_table

PAGE = Path("docs/benchmarks/autoscaling.md")
SHARES = (0.5, 1.6, 0.0, 0.5)
"""Rates of the phases, per highest rate of one engine."""
STEP_SECONDS = 0.05
MAX_NUM_SEQS = 8
ENGINES = "ab"
"""Names of the engines, a letter each."""
OUTPUT_TOKENS = 20
PROMPT = list(range(100, 132))
NUM_LAYERS = 6
"""Layers of the demo model."""
USED_SHARE = 0.85
"""Rate that an engine is given, per highest rate: at the highest one, queues never shrink."""
SAMPLE_SECONDS = 0.25
WAKE_SECONDS = 2.0
"""Time that the request which wakes the service may wait beyond a start."""
SCALING_RANGE = (1.9, 2.1)
"""Highest rate of two engines per highest rate of one."""


class Sample(NamedTuple):
    """Numbers of engines at a time."""

    seconds: float
    num_wanted: int
    num_ready: int


class Answer(NamedTuple):
    """Outcome of a request."""

    arrival: float
    """Seconds since the first phase."""
    seconds: float
    status: int


class Measurement(NamedTuple):
    """Result of a run."""

    highest_rates: list[float]
    """Requests per second that one engine and two serve."""
    startup_seconds: float
    """Time from the start of a router with one engine until it serves."""
    samples: list[Sample]
    """Changes of the numbers, and the last one."""
    answers: list[Answer]
    ready_at_ends: list[int]
    """Ready engines at the end of each phase."""


def make_plan(names: str, scale_flags: dict[str, Any] | None = None) -> ServingPlan:
    """Return a plan of engines of the demo model on this machine, on free ports.

    Args:
        names: Of the engines, a letter each.
        scale_flags: Of a router that decides which of them run; None: all do.
    """
    flags = {
        "threads": 1, "dtype": "float32", "kv-cache-memory": "64MiB", "max-num-seqs": MAX_NUM_SEQS,
        "debug-step-seconds": STEP_SECONDS,
    }  # fmt: skip
    router = {"hub": f"127.0.0.1:{free_port()}", **(scale_flags or {})}
    return ServingPlan(
        "demo",
        {"here": NodePlan("127.0.0.1")},
        {name: EnginePlan([StagePlan("here", NUM_LAYERS)], flags=flags) for name in names},
        router=RouterPlan("here", free_port(), "least-requests", flags=router),
    )


def make_scale_flags(
    highest_rate: float, startup_seconds: float, idle_seconds: float
) -> dict[str, Any]:
    """Return the flags of a router that decides how many of two engines run.

    Args:
        highest_rate: Of one engine.
        startup_seconds: Time from the start of an engine until it serves.
        idle_seconds: Time without requests after which no engine is wanted.
    """
    return {
        "scale": "0:2", "scale-engine-rate": round(USED_SHARE * highest_rate, 3),
        "scale-startup-seconds": round(startup_seconds, 3),
        "scale-idle-seconds": idle_seconds, "scale-down-seconds": idle_seconds,
    }  # fmt: skip


async def complete(session: aiohttp.ClientSession, url: str) -> int:
    """Send a completion; return its status, 0 if the connection failed."""
    body = {
        "model": "demo", "prompt": PROMPT, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True,
        "temperature": 0,
    }  # fmt: skip
    try:
        async with session.post(f"{url}/v1/completions", data=json.dumps(body)) as answer:
            await answer.read()
            return answer.status
    except aiohttp.ClientError:
        return 0


async def measure_highest_rate(names: str, seconds: float) -> tuple[float, float]:
    """Return the highest rate of engines, and the time from their start until all serve."""
    begin = time.monotonic()
    async with ready_service(make_plan(names)) as url, open_session() as session:
        startup = time.monotonic() - begin
        end = time.monotonic() + seconds
        count = 0

        async def keep_busy() -> None:
            nonlocal count
            while time.monotonic() < end:
                await complete(session, url)
                count += time.monotonic() < end

        await asyncio.gather(*(keep_busy() for _ in range(MAX_NUM_SEQS * len(names))))
    return count / seconds, startup


async def measure(seconds: float, idle_seconds: float) -> Measurement:
    """Return the engines and answers of a load whose rate changes.

    Args:
        seconds: Length of each phase.
        idle_seconds: Time without requests after which no engine is wanted.
    """
    highest, startup = await measure_highest_rate(ENGINES[0], min(10.0, seconds))
    both, _ = await measure_highest_rate(ENGINES, min(10.0, seconds))
    plan = make_plan(ENGINES, make_scale_flags(highest, startup, idle_seconds))
    samples: list[Sample] = []
    tasks: list[asyncio.Task[None]] = []
    results: list[Answer] = []
    ready_at_ends: list[int] = []
    rng = random.Random(0)
    async with serving(plan) as url, open_session() as session:
        begin = time.monotonic()

        async def watch() -> None:
            while True:
                sample = await look(session, url, begin)
                if not samples or samples[-1][1:] != sample[1:]:
                    samples.append(sample)
                await asyncio.sleep(SAMPLE_SECONDS)

        async def send() -> None:
            arrival = time.monotonic()
            status = await complete(session, url)
            results.append(Answer(arrival - begin, time.monotonic() - arrival, status))

        watching = asyncio.create_task(watch())
        for index, share in enumerate(SHARES):
            end = begin + (index + 1) * seconds
            while share and (gap := rng.expovariate(share * highest)) < end - time.monotonic():
                await asyncio.sleep(gap)
                tasks.append(asyncio.create_task(send()))
            await asyncio.sleep(max(0.0, end - time.monotonic()))
            ready_at_ends.append((await look(session, url, begin)).num_ready)
        await asyncio.gather(*tasks)
        watching.cancel()
        samples.append(await look(session, url, begin))
    return Measurement([highest, both], startup, samples, results, ready_at_ends)


async def look(session: aiohttp.ClientSession, url: str, begin: float) -> Sample:
    """Return the present numbers of engines."""
    async with session.get(f"{url}/engines") as answer:
        body = await answer.json()
    num_ready = sum(row["state"] == "ready" for row in body["engines"])
    return Sample(time.monotonic() - begin, body["scaling"]["num_wanted"], num_ready)


def format_figures(result: Measurement, seconds: float) -> str:
    """Return the table of phases."""
    rows = []
    for index, share in enumerate(SHARES):
        begin, end = index * seconds, (index + 1) * seconds
        inside = [each for each in result.answers if begin <= each.arrival < end]
        waits = sorted(each.seconds for each in inside)
        rows.append(
            [
                f"{share:g}", str(len(inside)), str(sum(each.status != 200 for each in inside)),
                str(result.ready_at_ends[index]),
                f"{percentile(waits, 50):.2f}" if waits else "",
                f"{waits[-1]:.2f}" if waits else "",
            ]
        )  # fmt: skip
    header = ["rate", "requests", "failed", "engines at its end", "median, s", "longest, s"]
    one, two = result.highest_rates
    return (
        f"{origin('benchmarks.autoscaling')}\n\nOne engine serves {one:.2f} requests/s at most, "
        f"two {two:.2f}. {MAX_NUM_SEQS} seats with {OUTPUT_TOKENS} tokens at {STEP_SECONDS:g} s "
        f"each cannot serve more than {MAX_NUM_SEQS / OUTPUT_TOKENS / STEP_SECONDS:g}. A router "
        f"with one engine serves {result.startup_seconds:.1f} s after its start. Rates are shares "
        f"of what one engine serves; each phase takes {seconds:g} s.\n\n"
        f"{format_table(header, rows)}\n\n"
        f"{format_verdicts(result, seconds)}\n\n"
        "![Wanted and ready engines over time](autoscaling.svg)"
    )


def format_verdicts(result: Measurement, seconds: float) -> str:
    """Return a line per statement, with its verdict."""
    one, two = result.highest_rates
    low, high = SCALING_RANGE
    num_failed = sum(each.status != 200 for each in result.answers)
    num_needed = [math.ceil(share) for share in SHARES]
    idle = SHARES.index(0.0)
    waking = min(
        (each for each in result.answers if each.arrival >= (idle + 1) * seconds),
        key=lambda each: each.arrival,
    )
    limit = result.startup_seconds + OUTPUT_TOKENS * STEP_SECONDS + WAKE_SECONDS
    rows = [
        (f"Two engines serve {two / one:.2f} times as much as one ({low:g} to {high:g}",
         low <= two / one <= high),
        (f"Requests that failed: {num_failed} (none", not num_failed),
        (f"Engines at the ends of the phases: {result.ready_at_ends} (as the rates need",
         result.ready_at_ends == num_needed),
        (f"The request that woke the service took {waking.seconds:.2f} s (at most a start, its "
         f"{OUTPUT_TOKENS} steps and {WAKE_SECONDS:g} s, {limit:.2f} s", waking.seconds <= limit),
    ]  # fmt: skip
    return "\n".join(f"- {text}: {'met' if is_met else '**missed**'})." for text, is_met in rows)


def plot(result: Measurement, path: Path) -> None:
    """Plot the wanted and the ready engines over time."""
    with open_picture(path, 2.6) as figure:
        axes = figure.subplots()
        times = [each.seconds for each in result.samples]
        for label, values in (
            ("wanted", [each.num_wanted for each in result.samples]),
            ("ready", [each.num_ready for each in result.samples]),
        ):
            axes.step(times, values, where="post", label=label)
        axes.set(xlabel="seconds", ylabel="engines", yticks=range(3))
        axes.legend()


def main() -> None:
    """Measure, and write the page, the plot and the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of each phase")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--output", type=Path, default=PAGE)
    values = parser.parse_args()
    result = uvloop.run(measure(values.seconds, values.idle_seconds))
    figures = format_figures(result, values.seconds)
    plot(result, values.output.with_suffix(".svg"))
    write_results(values.output, "Autoscaling on this machine", figures, result._asdict())


if __name__ == "__main__":
    main()
