"""`gllm profile`: measures a model on this machine, as it is served, and writes a profile.

Owns the workload that makes a pipeline show its costs. Knows nothing of fits; the measurements are
the step log of a real engine, so scheduling, metadata and links are in them as they are.
"""

import argparse
import asyncio
import platform
import random
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from gllm.config import EngineConfig, add_flags, from_flags
from gllm.engine import Engine, EngineError
from gllm.experiments.real import logged_run, serve_jobs
from gllm.models.errors import ModelError
from gllm.sim.profile import profile_of, write_profile
from gllm.sim.run import run_of
from gllm.sim.workload import Job

DECODE_BATCHES = (1, 2, 4, 8, 16, 32)
DECODE_TOKENS = 40
PREFILLS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
REPEATS = 4
BURSTS = (8, 24, 48)
WHOLE_PROMPTS = 10**9
"""As ridge_tokens: prompts are not cut but by #MaxP, so that large chunks are seen as well."""


def phases(stages: int, context: int, seed: int = 0) -> list[list[Job]]:
    """Workloads to serve one after the other: batches of decodes at a short and a long context,
    single prompts of rising length, and bursts of everything."""
    rng = random.Random(seed)
    longest = min(context - DECODE_TOKENS, 4096)
    made = [
        [Job(0.0, prompt, DECODE_TOKENS)] * (batch * stages)
        for batch in DECODE_BATCHES
        for prompt in (max(1, longest // 64), longest // 2)
    ]
    prompts = [tokens for tokens in PREFILLS if tokens < longest] + [longest]
    made += [[Job(0.0, tokens, 1)] for tokens in prompts for _ in range(REPEATS)]
    for count in BURSTS * 2:
        lengths = [(rng.randint(1, longest // 2), rng.randint(4, 60)) for _ in range(count)]
        made.append([Job(i * rng.uniform(0, 0.05), *pair) for i, pair in enumerate(lengths)])
    return made


def profiled(config: EngineConfig) -> EngineConfig:
    """The configuration under which costs are measured: large chunks, nothing from the cache."""
    scheduler = replace(
        config.scheduler, policy="throttle", ridge_tokens=WHOLE_PROMPTS, prefix_cache=False
    )
    return replace(config, scheduler=scheduler)


async def measure(config: EngineConfig, output: Path, progress: bool = True) -> None:
    """Serve all phases and write the profile."""

    async def work(engine: Engine) -> None:
        workloads = phases(config.pipeline_parallel_size, engine.model.max_model_len)
        total = sum(len(jobs) for jobs in workloads)
        # None: no bar where the output is no terminal.
        disable = None if progress else True
        with tqdm(total=total, unit="request", desc="profile", disable=disable) as bar:
            for seed, jobs in enumerate(workloads):
                await serve_jobs(engine, jobs, seed, bar.update)

    events = await logged_run(profiled(config), work)
    machine = {
        "device": _processor(),
        "threads": str(config.threads or "auto"),
        "dtype": config.dtype,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    write_profile(profile_of(run_of(events), machine), output)


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def main(argv: list[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="gllm profile", description=__doc__.splitlines()[0])
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument("--output", default="profile.json", help="file to write (profile.json)")
    add_flags(parser, EngineConfig)
    values = parser.parse_args(argv)
    values.model = values.model_name or values.model
    try:
        asyncio.run(measure(from_flags(EngineConfig, values), Path(values.output)))
    except (ValueError, OSError, ModelError, EngineError) as error:
        print(f"gllm profile: {error}", file=sys.stderr)
        return 2
    print(f"wrote {values.output}; next: gllm simulate --profile {values.output}")
    return 0
