"""Engines and routers of the measurements, each engine on a core of its own."""

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.cpu.serving import free_port
from benchmarks.fleet_processes import FleetProcess, started

ROLES = {"mixed": ("mixed", "mixed"), "apart": ("prefill", "decode")}
"""Roles of the two engines of a setup."""
ENGINE_FLAGS = ("--threads", "1", "--no-prefix-cache")
"""Flags of every engine: no two prompts are alike, so a prefix cache would not help."""


class Fleet(NamedTuple):
    """A router and its engines."""

    router: FleetProcess
    engines: list[FleetProcess]


@asynccontextmanager
async def running_engine(core: int, flags: Sequence[str]) -> AsyncIterator[FleetProcess]:
    """Run an engine on one core."""
    async with started("gllm.serve", free_port(), [*ENGINE_FLAGS, *flags]) as engine:
        # Before it starts processes of its own, which inherit the core.
        os.sched_setaffinity(engine.pid, {core})
        yield engine


@asynccontextmanager
async def running_fleet(
    session: aiohttp.ClientSession, setup: str, backend: str
) -> AsyncIterator[Fleet]:
    """Run two engines, each on its core, behind a router; requests are handed off in `apart`.

    Args:
        session: for polls.
        setup: of ROLES.
        backend: of KV transfers.
    """
    hub = free_port()
    preset = ["--preset", "distserve"] if setup == "apart" else []
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(
            started("gllm.commands.router", free_port(), ["--hub", str(hub), *preset])
        )
        engines = []
        for core, role in enumerate(ROLES[setup]):
            flags = ["--router", f"127.0.0.1:{hub}", "--name", f"e{core}", "--role", role]
            flags += ["--kv-transfer", backend, "--kv-fetch", "always"]
            engines.append(await stack.enter_async_context(running_engine(core, flags)))
        for engine in engines:
            await engine.wait_until(session, "/ready")
        await router.wait_until(session, "/engines", len(engines))
        await router.wait_until(session, "/ready")
        yield Fleet(router, engines)


async def read_metrics(
    session: aiohttp.ClientSession, engine: FleetProcess
) -> dict[tuple[str, str], float]:
    """Return an engine's metrics about KV blocks by name, without gllm:kv_, and outcome."""
    async with session.get(f"{engine.url}/metrics") as response:
        text = await response.text()
    prefix = "gllm:kv_"
    return {
        (sample.name.removeprefix(prefix), sample.labels.get("outcome", "")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name.startswith(prefix)
    }
