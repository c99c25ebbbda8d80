"""Whole engines over weak links: tokens per second by number of streams, prompts arriving."""

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig
from benchmarks.weak_links.limits import WeakLink, most_tokens_per_second, token_floor_seconds
from benchmarks.weak_links.load import PROMPT_INTERVAL, PROMPT_TOKENS, LoadFigures, run_load
from benchmarks.weak_links.traffic import BASE_LINK, FIFO, OURS, SETUPS, Progress
from benchmarks.weak_model import TOKEN_BYTES
from gllm.observability.latency import percentile

STEP_SECONDS = 0.005
"""Least time of a stage's step: a device that is not shared with the other stages."""
KV_CACHE = "256MiB"
LINK_WARM_UP_SECONDS, WARM_UP_STREAMS = 8.0, 4
"""Load that does not count, in which new connections find the rate of their links."""


class EnginePlan(NamedTuple):
    """Engines to measure, and the lengths of the measurements."""

    num_stages: int
    stream_counts: Sequence[int]
    window_seconds: float
    """Time that counts, per number of streams."""


def engine_flags(name: str, congestion: str, num_stages: int) -> list[str]:
    """Return the flags of an engine.

    FIFO is what MoLink's code does: one queue per link, and as many micro-batches as stages.
    """
    flags = ["--dtype", "float32", "--threads", "1", "--layers", ",".join("1" * num_stages)]
    flags += ["--kv-cache-memory", KV_CACHE, "--no-prefix-cache"]
    flags += ["--debug-step-seconds", str(STEP_SECONDS), "--link-congestion", congestion]
    if name == FIFO:
        flags += ["--lanes", "1", "--link-policy", SETUPS[FIFO][1]]
        flags += ["--max-in-flight", str(num_stages)]
    return flags


@contextmanager
def running_engine(
    model: Path, num_stages: int, flags: Sequence[str], link: WeakLink | None = None
) -> Iterator[tuple[NamespaceRig, RigEngine]]:
    """Run an engine with a machine per stage, from its start on over a link; fast links if None."""
    with (
        tempfile.TemporaryDirectory(prefix="gllm-rig-") as folder,
        NamespaceRig(num_stages) as rig,
    ):
        if link is not None:
            set_links(rig, link)
        with RigEngine(rig, model, Path(folder), flags) as engine:
            yield rig, engine


def set_links(rig: NamespaceRig, link: WeakLink) -> None:
    """Give all pairs of machines a link: each machine's hop has the rate and half of the delay."""
    for machine in range(len(rig.addresses)):
        rig.hop(machine).set_rate(link.bits_per_second)
        rig.hop(machine).set_delay(link.delay_seconds / 2)


def measure_engine(
    name: str, congestion: str, model: Path, plan: EnginePlan, progress: Progress
) -> list[dict[str, Any]]:
    """Return the figures of an engine, one row per number of streams."""
    rows = []
    flags = engine_flags(name, congestion, plan.num_stages)
    with running_engine(model, plan.num_stages, flags) as (rig, engine):
        set_links(rig, BASE_LINK)
        with rig.inside(0):
            asyncio.run(run_load(engine.url, WARM_UP_STREAMS, LINK_WARM_UP_SECONDS, seed=-1))
        for seed, count in enumerate(plan.stream_counts):
            with rig.inside(0):
                figures = asyncio.run(run_load(engine.url, count, plan.window_seconds, seed))
            rows.append(make_row(name, congestion, plan.num_stages, count, figures))
            progress(f"engine: {describe_row(rows[-1])}")
    return rows


def make_row(
    name: str, congestion: str, num_stages: int, num_streams: int, figures: LoadFigures
) -> dict[str, Any]:
    """Return the figures of one number of streams; times are in milliseconds."""
    floor = token_floor_seconds(BASE_LINK, num_stages, TOKEN_BYTES, STEP_SECONDS)
    prompt_tokens = PROMPT_TOKENS / PROMPT_INTERVAL
    limit = most_tokens_per_second(BASE_LINK, num_streams, floor, TOKEN_BYTES, prompt_tokens)
    ttfts, gaps = figures.prompt_ttfts, figures.gaps
    return {
        "setup": name,
        "congestion": congestion,
        "stages": num_stages,
        "streams": num_streams,
        "tokens_per_second": figures.num_tokens / figures.seconds,
        "limit_tokens_per_second": limit,
        "itl_mean_ms": 1e3 * fmean(gaps) if gaps else None,
        "itl_p99_ms": 1e3 * percentile(gaps, 99) if gaps else None,
        "itl_floor_ms": 1e3 * floor,
        "prompt_ttft_mean_ms": 1e3 * fmean(ttfts) if ttfts else None,
        "num_prompts": figures.num_prompts,
        "num_prompts_answered": len(ttfts),
    }


def describe_row(row: dict[str, Any]) -> str:
    """Return a line about a number of streams."""
    return (
        f"{row['setup']}, {row['congestion']}, {row['streams']} streams: "
        f"{row['tokens_per_second']:.0f} tokens/s of at most {row['limit_tokens_per_second']:.0f}"
    )


def measure_engines(
    congestions: Sequence[str], model: Path, plan: EnginePlan, progress: Progress
) -> list[dict[str, Any]]:
    """Return the figures of FIFO and ours with each congestion control."""
    return [
        row
        for congestion in congestions
        for name in (FIFO, OURS)
        for row in measure_engine(name, congestion, model, plan, progress)
    ]
