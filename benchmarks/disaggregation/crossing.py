"""Break-even of fetches against prefills: computed by an engine, and measured.

One engine computes the prompts and keeps their KV blocks. Others continue the requests: one decides
by its own estimates what it fetches, one always fetches, and one never. A hand-off is directed over
HTTP, as by routers of other projects.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp

from benchmarks.disaggregation.engines import read_metrics, running_engine
from benchmarks.fleet_processes import FleetProcess, open_session

LINKS = (0.12, 0.2, 0.4, 1.6)
"""GB/s of the imitated links."""
LENGTHS = (16, 32, 64, 96, 128, 192, 256, 384, 512, 768)
"""Prompt lengths in tokens whose fetch and prefill are timed."""
NUM_TRAINING, TRAINING_TOKENS = 60, 4
"""Requests from which an engine learns its own speed and that of the link, and their outputs: it
fits its step cost anew every 224 steps."""
NUM_PROBES = 3
"""Requests per length of which most decide what the engine does."""
FETCHES = ("auto", "auto", "always", "never")
"""Values of --kv-fetch of the engines; the first one prefills."""
VOCABULARY = 1000
READY_SECONDS = 20.0
Row = dict[str, Any]


class HandoffRig:
    """Engines of the measurement: one prefills, the others continue."""

    def __init__(
        self, session: aiohttp.ClientSession, engines: Sequence[FleetProcess], key: str
    ) -> None:
        """Use engines in the order of FETCHES."""
        self.session = session
        self.prefill, self.deciding, self.fetching, self.computing = engines
        self._headers = {"X-Control-Key": key}
        self._rng = Random(7)

    async def hand_off(self, target: FleetProcess, num_tokens: int, max_tokens: int = 1) -> float:
        """Prefill a new prompt, and return the seconds in which another engine continues it."""
        prompt = self._prompt(num_tokens)
        params = await self._prefill(prompt)
        if params is None:
            raise RuntimeError("the engine that prefills holds no blocks")
        fields = {"kv_transfer_params": params, "max_tokens": max_tokens}
        begin = time.monotonic()
        await self._complete(target, prompt, **fields)
        return time.monotonic() - begin

    async def compute(self, target: FleetProcess, num_tokens: int, max_tokens: int) -> None:
        """Let an engine compute a new prompt."""
        await self._complete(target, self._prompt(num_tokens), max_tokens=max_tokens)

    async def wait_until_ready(self) -> None:
        """Wait until the KV caches are served, a moment after the engines are ready."""
        async with asyncio.timeout(READY_SECONDS):
            while await self._prefill(self._prompt(LENGTHS[0])) is None:
                await asyncio.sleep(0.1)

    async def num_fetched(self, target: FleetProcess) -> float:
        """Return the fetches of an engine so far."""
        return (await read_metrics(self.session, target))["fetches_total", "complete"]

    async def _prefill(self, prompt: list[int]) -> dict[str, Any] | None:
        """Prefill a prompt; return what another engine needs to continue it, or None."""
        params = {"do_remote_decode": True}
        answer = await self._complete(self.prefill, prompt, kv_transfer_params=params)
        result: dict[str, Any] | None = answer["kv_transfer_params"]
        return result

    def _prompt(self, num_tokens: int) -> list[int]:
        return [self._rng.randrange(10, VOCABULARY) for _ in range(num_tokens)]

    async def _complete(
        self, engine: FleetProcess, prompt: list[int], **fields: Any
    ) -> dict[str, Any]:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True, **fields}
        url = f"{engine.url}/v1/completions"
        async with self.session.post(url, json=body, headers=self._headers) as response:
            answer: dict[str, Any] = await response.json()
            if response.status != 200:
                raise RuntimeError(f"{engine.url}: {answer}")
            return answer


@asynccontextmanager
async def running_rig(gigabytes: float) -> AsyncIterator[HandoffRig]:
    """Run the engines; those that fetch share a core, and only one of them works at a time."""
    key = "benchmark-control-key"
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        file = Path(folder) / "key"
        file.write_text(key)
        file.chmod(0o600)
        engines = []
        for core, fetch in zip((0, 1, 1, 1), FETCHES, strict=True):
            flags = ["--control-key-file", str(file), "--kv-fetch", fetch]
            flags += ["--kv-transfer", f"mock:{gigabytes}"]
            engines.append(await stack.enter_async_context(running_engine(core, flags)))
        for engine in engines:
            await engine.wait_until(session, "/ready")
        rig = HandoffRig(session, engines, key)
        await rig.wait_until_ready()
        yield rig


async def measure_crossing(
    options: argparse.Namespace, progress: Callable[[str], None]
) -> list[Row]:
    """Return a row per link."""
    rows = []
    for gigabytes in LINKS[1::2] if options.quick else LINKS:
        async with running_rig(gigabytes) as rig:
            rows.append(await _measure_link(rig, gigabytes, options))
        progress(
            f"break-even at {gigabytes} GB/s: computed {rows[-1]['computed']} tokens, "
            f"measured {rows[-1]['measured']}"
        )
    return rows


async def _measure_link(rig: HandoffRig, gigabytes: float, options: argparse.Namespace) -> Row:
    rng = Random(11)
    for number in range(NUM_TRAINING):
        await rig.hand_off(rig.deciding, rng.choice(LENGTHS), TRAINING_TOKENS)
        await rig.compute(rig.deciding, rng.choice(LENGTHS), TRAINING_TOKENS)
        for target in (rig.fetching, rig.computing):
            await rig.hand_off(target, LENGTHS[number % len(LENGTHS)])
    fetched: dict[int, list[float]] = {length: [] for length in LENGTHS}
    computed: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for _ in range(options.repeats):
        for length in LENGTHS:
            fetched[length].append(await rig.hand_off(rig.fetching, length))
            computed[length].append(await rig.hand_off(rig.computing, length))
    return {
        "gigabytes": gigabytes,
        "fetch_ms": {length: 1e3 * median(fetched[length]) for length in LENGTHS},
        "compute_ms": {length: 1e3 * median(computed[length]) for length in LENGTHS},
        "measured": find_crossing(
            [(length, median(fetched[length]) - median(computed[length])) for length in LENGTHS]
        ),
        "computed": await _find_decision(rig),
    }


async def _find_decision(rig: HandoffRig) -> float | None:
    """Return the prompt length from which on the engine fetches; None if it never does."""
    low, high = LENGTHS[0], LENGTHS[-1]
    if not await _fetches(rig, high):
        return None
    if await _fetches(rig, low):
        return float(low)
    while high > 1.03 * low:
        middle = round((low * high) ** 0.5)
        if middle in (low, high):
            break
        low, high = (low, middle) if await _fetches(rig, middle) else (middle, high)
    return (low * high) ** 0.5


async def _fetches(rig: HandoffRig, length: int) -> bool:
    """Return True if the engine fetches most prompts of a length.

    A long prompt is handed off before: what was not measured lately is fetched in any case.
    """
    count = 0.0
    for _ in range(NUM_PROBES):
        await rig.hand_off(rig.deciding, LENGTHS[-1])
        before = await rig.num_fetched(rig.deciding)
        await rig.hand_off(rig.deciding, length)
        count += await rig.num_fetched(rig.deciding) - before
    return count > NUM_PROBES / 2


def find_crossing(differences: Sequence[tuple[int, float]]) -> float | None:
    """Return the prompt length from which on fetches are faster; None if they never are.

    differences: prompt lengths, ascending, and seconds of a fetch less those of a prefill.
    """
    crossing = None
    for (low, before), (high, after) in pairwise(differences):
        if before > 0 >= after:
            crossing = low + (high - low) * before / (before - after)
    if crossing is None and differences[0][1] <= 0:
        return float(differences[0][0])
    return crossing
