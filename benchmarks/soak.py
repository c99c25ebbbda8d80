"""Run a server at saturation while workers are killed, and look for leaks and lost requests.

Greedy streams, clients that disconnect, slow readers and bad requests of many kinds are sent at
once, and a random worker is killed by SIGKILL each minute. Memory, descriptors, threads and asyncio
tasks of each process are sampled and may not grow; at moments without requests nothing may be in
use; each answer has the text of an undisturbed run. Run as
`python -m benchmarks.soak --minutes 30 -- --pp 2 --threads 1`, with `--agent COMMAND` for each
further node; it prints the figures, writes them to docs/benchmarks/soak.md and exits with 1 if
something leaked or was lost.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from benchmarks.cpu.page import origin, page_path, write_results
from benchmarks.soak_load import LoadTally, SoakLoad, plan_texts
from benchmarks.soak_samples import (
    FIGURES,
    Drift,
    ProcessSample,
    drift_of_role,
    group_by_role,
    growth_per_recovery,
    measure_drift,
    one_per_minute,
)
from benchmarks.soak_server import SoakServer, describe_command, serving, to_json
from gllm.sim.metrics.report import format_table

MAX_DRIFT = 0.02
"""Growth of a figure between the first and the last third that is no leak."""
JUDGED = ("memory_bytes", "num_descriptors", "num_threads")
"""Figures of FIGURES that may not grow; resident memory includes pages of files, which the kernel
reads and drops by the needs of all processes of the machine."""
MIN_SAMPLES = 6
"""Samples of a role from which on it is judged."""
SETTLE_SECONDS = 3.0
"""Time between the end of the last request and the sample of an idle moment."""
TITLES = "gllm-"
"""Beginning of the titles of processes that serve."""
STARTING = "gllm-standby"
"""Title of a process that imports its modules: it grows until it is assigned a stage."""


class LoopSample(NamedTuple):
    """Figures of the engine and the frontend's event loop at one moment."""

    seconds: float
    is_idle: bool
    num_tasks: float
    num_running: float
    num_waiting: float
    kv_usage: float
    num_recoveries: float


class SoakRecord:
    """Samples of a soak test while it runs.

    Args:
        server: The server.
        load: Its load.
    """

    def __init__(self, server: SoakServer, load: SoakLoad) -> None:
        self._server = server
        self._load = load
        self.busy: list[ProcessSample] = []
        """Samples under load."""
        self.idle: list[ProcessSample] = []
        """Samples without requests."""
        self.loop: list[LoopSample] = []
        self.kills: Counter[str] = Counter()
        self.problems: list[str] = []
        self._is_paused = asyncio.Event()

    async def sample(self, is_idle: bool = False) -> None:
        """Sample everything once."""
        scrape = await self._server.scrape()
        epoch = int(scrape.value("epoch")) if scrape is not None else 0
        samples = await asyncio.to_thread(self._server.sampler.sample, epoch)
        (self.idle if is_idle else self.busy).extend(samples)
        if scrape is not None:
            names = (
                "event_loop_tasks",
                "num_requests_running",
                "num_requests_waiting",
                "kv_cache_usage_perc",
                "recoveries_total",
            )
            values = map(scrape.value, names)
            self.loop.append(LoopSample(self._server.sampler.seconds, is_idle, *values))

    async def sample_regularly(self, seconds: float) -> None:
        """Sample under load, without end."""
        while True:
            await asyncio.sleep(seconds)
            if not self._is_paused.is_set():
                await self.sample()

    async def kill_regularly(self, seconds: float, prefixes: Sequence[str], seed: int) -> None:
        """Kill a random worker, without end."""
        chooser = random.Random(seed)
        while True:
            await asyncio.sleep(seconds)
            role = self._server.kill(chooser, prefixes)
            if role is None:
                self.problems.append("no worker to kill")
            else:
                self.kills[role] += 1

    async def pause(self) -> None:
        """Let all requests end, sample the idle server and record what is still in use."""
        self._is_paused.set()
        await self._load.stop()
        remains = await self._server.wait_until_idle()
        seconds = self._server.sampler.seconds
        self.problems += [f"idle after {seconds:.0f} s: {each}" for each in remains]
        await asyncio.sleep(SETTLE_SECONDS)
        await self.sample(is_idle=True)
        self._is_paused.clear()


async def run_soak(options: argparse.Namespace) -> dict[str, Any]:
    """Run the test; return its results."""
    log = options.server_log or Path(tempfile.mkdtemp()) / "server.log"
    async with serving(options.model, options.flags, options.agent, log) as server:
        load = SoakLoad(
            server.url, options.streams, plan_texts(options.texts, options.max_tokens), options.seed
        )
        await load.record_references()
        record = SoakRecord(server, load)
        warm_up = server.sampler.seconds + options.warm_up_minutes * 60
        end = server.sampler.seconds + options.minutes * 60
        background = [
            asyncio.create_task(record.sample_regularly(options.sample_seconds)),
            asyncio.create_task(
                record.kill_regularly(options.kill_seconds, options.victim, options.seed)
            ),
        ]
        try:
            while (seconds_left := end - server.sampler.seconds) > 0:
                load.start()
                await asyncio.wait(
                    background,
                    timeout=min(seconds_left, options.idle_minutes * 60),
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in background:
                    if task.done():
                        task.result()
                await record.pause()
        finally:
            for task in background:
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*background)
        record.problems += await server.stop()
        if record.problems:
            record.problems.append(f"end of the log: {server.log_end()}")
        return evaluate(record, load.tally, warm_up)


def evaluate(record: SoakRecord, tally: LoadTally, warm_up: float) -> dict[str, Any]:
    """Return drifts, counts and problems as JSON.

    Args:
        record: The samples.
        tally: Counts of the load.
        warm_up: Time until which samples are left out, in seconds.
    """
    problems = list(record.problems)
    drifts = {
        **_role_drifts(record.busy, warm_up, "under load", problems),
        **_role_drifts(record.idle, warm_up, "idle", problems),
        **_task_drifts(record.loop, warm_up, problems),
    }
    for cause, names in (("lost", tally.lost), ("another text", tally.differing),
                         ("bad request", tally.accepted)):  # fmt: skip
        problems += [f"{cause}: {name}" for name in names[:10]]
    return {
        "drifts": drifts,
        "per_recovery": {
            f"{role}: {figure}": growth_per_recovery(samples, figure)._asdict()
            for role, samples in group_by_role(record.busy).items()
            if _is_serving(role, samples)
            for figure in JUDGED
        },
        "sent": dict(tally.num_sent),
        "identical": tally.num_identical,
        "aborted": tally.num_aborted,
        "differing": len(tally.differing),
        "lost": len(tally.lost),
        "refused": dict(tally.refused),
        "not_refused": len(tally.accepted),
        "kills": dict(record.kills),
        "recoveries": max((each.num_recoveries for each in record.loop), default=0),
        "problems": problems,
        "samples": to_json(one_per_minute(record.busy)),
        "idle_samples": to_json(record.idle),
        "loop_samples": [each._asdict() for each in record.loop],
    }


def _is_serving(role: str, samples: Sequence[ProcessSample]) -> bool:
    """Return True if processes of a role serve, and were sampled often enough to be judged."""
    return TITLES in role and STARTING not in role and len(samples) >= MIN_SAMPLES


def _role_drifts(
    samples: Sequence[ProcessSample], warm_up: float, condition: str, problems: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the drifts of all figures of all roles by a description; add leaks to the problems."""
    drifts = {}
    for role, rows in group_by_role(each for each in samples if each.seconds > warm_up).items():
        is_replaced = len({row.pid for row in rows}) > 1
        if not _is_serving(role, rows) or (is_replaced and condition == "idle"):
            continue
        for figure in FIGURES:
            with suppress(ValueError):
                drift = drift_of_role(rows, figure)
                name = f"{role} | {figure} | {condition}"
                drifts[name] = drift._asdict()
                _judge(name, drift, figure in JUDGED, problems)
    return drifts


def _task_drifts(
    samples: Sequence[LoopSample], warm_up: float, problems: list[str]
) -> dict[str, dict[str, Any]]:
    drifts = {}
    for is_idle, condition in ((False, "under load"), (True, "idle")):
        points = [
            (each.seconds, each.num_tasks)
            for each in samples
            if each.is_idle == is_idle and each.seconds > warm_up
        ]
        if len(points) >= MIN_SAMPLES:
            name = f"head gllm-frontend | num_tasks | {condition}"
            drift = measure_drift(points)
            drifts[name] = drift._asdict()
            _judge(name, drift, True, problems)
    return drifts


def _judge(name: str, drift: Drift, is_judged: bool, problems: list[str]) -> None:
    if is_judged and drift.share > MAX_DRIFT:
        problems.append(f"{name} grew by {drift.share:.1%}")


def format_value(figure: str, value: float) -> str:
    """Return a figure as text, bytes in MiB."""
    return f"{value / 2**20:.1f} MiB" if figure.endswith("bytes") else f"{value:.1f}"


def format_page(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Format the results in words and tables."""
    rows = []
    for name, drift in results["drifts"].items():
        role, figure, condition = name.split(" | ")
        rows.append(
            [
                role,
                figure.removesuffix("_bytes").removeprefix("num_"),
                condition,
                format_value(figure, drift["first"]),
                format_value(figure, drift["last"]),
                f"{drift['share']:+.2%}",
                str(drift["num_lives"]),
            ]
        )
    growth = [
        [*name.split(": "), format_value(name, value["growth"]), str(value["num_pairs"])]
        for name, value in results["per_recovery"].items()
    ]
    kills = ", ".join(f"{role} {count}" for role, count in sorted(results["kills"].items()))
    sent = ", ".join(f"{count} {kind}" for kind, count in sorted(results["sent"].items()))
    problems = [line.splitlines()[0] for line in results["problems"]]
    return "\n\n".join(
        [
            f"{origin('benchmarks.soak')} Server: "
            f"{describe_command(options.model, options.flags, options.agent)}. {options.streams} "
            f"requests at once for {options.minutes:g} minutes, the first "
            f"{options.warm_up_minutes:g} as warm-up.",
            f"Requests: {sent}. Identical texts: {results['identical']}; other texts: "
            f"{results['differing']}; lost: {results['lost']}; aborted in mid-stream: "
            f"{results['aborted']}; bad ones that were not refused: {results['not_refused']}. "
            f"Killed: {kills or 'none'}; recoveries: {results['recoveries']:.0f}.",
            format_table(
                ["process", "figure", "state", "first third", "last third", "drift", "processes"],
                rows,
            ),
            "Growth of a process per recovery that it survived:",
            format_table(["process", "figure", "growth", "pairs"], growth),
            "Problems: " + ("; ".join(problems) if problems else "none."),
        ]
    )


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--warm-up-minutes", type=float, help="default: a tenth of --minutes")
    parser.add_argument("--idle-minutes", type=float, default=2, help="time between idle moments")
    parser.add_argument("--sample-seconds", type=float, default=10)
    parser.add_argument("--kill-seconds", type=float, default=60)
    parser.add_argument(
        "--victim", nargs="+", default=["gllm-stage-"], help="beginnings of the titles to kill"
    )
    parser.add_argument("--streams", type=int, default=24, help="requests at once")
    parser.add_argument("--texts", type=int, default=48, help="different requests")
    parser.add_argument("--max-tokens", type=int, default=160)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, or demo")
    parser.add_argument("--agent", action="append", default=[], help="command of another node")
    parser.add_argument("--server-log", type=Path, help="file for the log of the server")
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/soak.md"))
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    options = parser.parse_args(arguments)
    if options.warm_up_minutes is None:
        options.warm_up_minutes = options.minutes / 10
    return options


def main() -> int:
    """Run the test, print the figures and write the page; return the exit status."""
    options = parse_options()
    results = uvloop.run(run_soak(options))
    write_results(options.output, "Soak test", format_page(results, options), results)
    return 1 if results["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
