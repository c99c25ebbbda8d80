"""Theta: the shortest prompt whose KV blocks should travel during its prefill, on this machine.

One engine prefills and another one decodes; the link between them is the mock backend. Both modes
are measured as a client sees them: by the times of tokens 1 and 2.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

import asyncio
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from statistics import median
from typing import Any, NamedTuple

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.transfer_mode import TransferMode
from gllm.config.attachment import AttachmentConfig
from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine, EngineError
from gllm.observability.progress import show_progress
from gllm.router.fleet_engine import FleetEngine
from gllm.sim.metrics.report import format_table

MODEL = "demo"
RATES = (0.01, 0.03, 0.1, 1.0)
"""Rates of the link, in GB/s."""
LENGTHS = (32, 64, 128, 256, 512, 960)
"""Tokens of the prompts; steps of fewer than 32 tokens are not counted by layer."""
REPEATS = 15
PRESET = "splitwise"
"""Chooses the decode engine before the prefill, without which nothing is pushed."""
QUICK_RATES, QUICK_LENGTHS, QUICK_REPEATS = (0.03,), (64, 512), 3
START_SECONDS = 120.0
"""Limit for the start of both engines."""
_PUSH = {TransferMode.SERIALIZED: "off", TransferMode.PER_LAYER: "layer"}


class TokenTimes(NamedTuple):
    """Medians over the requests of one length, in seconds since the request."""

    first: float
    """Token 1, which the prefill engine computes."""
    second: float
    """Token 2, which needs the KV blocks at the decode engine."""

    @property
    def visible(self) -> float:
        """Time of the transfer that the client sees, with one step of the decode engine."""
        return self.second - self.first


Measure = Callable[[float, TransferMode, Sequence[int], int], dict[int, TokenTimes]]
"""Measures prompts of each length: rate in GB/s, mode, lengths, requests per length."""


def find_threshold(
    serialized: dict[int, TokenTimes], per_layer: dict[int, TokenTimes]
) -> int | None:
    """Return the shortest prompt from which on per-layer transfers bring token 2 sooner.

    All longer ones that were measured have to gain too. The time of token 2 has both the visible
    time and the slowdown of the prefill, and the step at the decode engine is the same.

    Returns:
        The number of tokens; None if the longest prompt gains nothing.
    """
    threshold = None
    for length in sorted(serialized, reverse=True):
        if per_layer[length].second >= serialized[length].second:
            break
        threshold = length
    return threshold


def run(options: ExperimentOptions) -> ExperimentResult:
    """Measure all rates on this machine."""
    rates: Sequence[float] = QUICK_RATES if options.quick else RATES
    lengths: Sequence[int] = QUICK_LENGTHS if options.quick else LENGTHS
    repeats = QUICK_REPEATS if options.quick else REPEATS
    with show_progress("link", 2 * len(rates), is_shown=options.progress) as bar:

        def measure(*setting: Any) -> dict[int, TokenTimes]:
            times = measure_fleet(*setting)
            bar.update()
            return times

        return make_result(measure, rates, lengths, repeats)


def make_result(
    measure: Measure, rates: Sequence[float], lengths: Sequence[int], repeats: int
) -> ExperimentResult:
    """Measure both modes at each rate, and describe the figures."""
    rows, thresholds = [], []
    for rate in rates:
        serialized = measure(rate, TransferMode.SERIALIZED, lengths, repeats)
        per_layer = measure(rate, TransferMode.PER_LAYER, lengths, repeats)
        for length in lengths:
            before, after = serialized[length], per_layer[length]
            seconds = (
                before.first,
                after.first - before.first,
                before.visible,
                after.visible,
                after.second - before.second,
            )
            rows.append([f"{rate:g}", str(length), *(f"{1e3 * second:.1f}" for second in seconds)])
        threshold = find_threshold(serialized, per_layer)
        shown = f"none up to {max(lengths)}" if threshold is None else str(threshold)
        if threshold == min(lengths):
            shown = f"at most {threshold}"
        thresholds.append([f"{rate:g}", shown])
    return ExperimentResult(
        "Threshold of transfers during the prefill",
        f"Model `{MODEL}` in float32, one engine per phase, on this machine. The link is "
        "`--kv-transfer mock:RATE`. Medians of "
        f"{repeats} prompts of random tokens, one after another. The visible time is that from "
        "token 1 to token 2, with one step of the decode engine. Theta is the shortest measured "
        "prompt from which on token 2 arrives sooner with `--kv-push layer`; its precision is "
        "that of the measured lengths.\n\n"
        + format_table(["GB/s", "theta, tokens"], thresholds)
        + "\n\n"
        + format_table(
            [
                "GB/s", "prompt tokens", "TTFT serialized, ms", "prefill slower by, ms",
                "visible serialized, ms", "visible per layer, ms", "token 2 later by, ms",
            ],
            rows,
        ),
    )  # fmt: skip


def measure_fleet(
    rate: float, mode: TransferMode, lengths: Sequence[int], repeats: int
) -> dict[int, TokenTimes]:
    """Measure a router with two engines of this machine. See Measure.

    Raises:
        EngineError: The engines do not start, or blocks were not fetched.
    """
    return asyncio.run(_measure_fleet(rate, mode, lengths, repeats))


async def _measure_fleet(
    rate: float, mode: TransferMode, lengths: Sequence[int], repeats: int
) -> dict[int, TokenTimes]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        hub = f"127.0.0.1:{probe.getsockname()[1]}"
    async with AsyncExitStack() as stack:
        router = FleetEngine(RouterConfig(model=MODEL, hub=hub, preset=PRESET))
        await router.start()
        stack.push_async_callback(router.stop)
        engines = []
        for role in ("prefill", "decode"):
            config = EngineConfig.from_options(
                MODEL,
                dtype="float32",
                threads=1,
                kv_cache_memory=2**26,
                preset=PRESET,
                kv_transfer=f"mock:{rate:g}",
                kv_fetch="always",
                kv_push=_PUSH[mode],
                kv_push_threshold=1,
            )
            attachment = AttachmentConfig(router=(hub,), name=role, role=role)
            engine = Engine(config, attachment=attachment)
            engines.append(engine)
            await engine.start()
            stack.push_async_callback(engine.stop)
        await _wait_for_engines(router)
        times = await _measure_lengths(router, lengths, repeats)
        _check_transfers(engines, mode, len(lengths) * (repeats + 1))
        return times


def _check_transfers(engines: list[Engine], mode: TransferMode, num_prompts: int) -> None:
    """Raise EngineError unless all prompts travelled in the mode."""
    served, fetched = (engine.status().kv_transfers for engine in engines)
    num_pushed = 0 if served is None else served.num_pushed
    num_fetched = 0 if fetched is None else fetched.num_fetched
    num_expected = num_prompts if mode is TransferMode.PER_LAYER else 0
    if (num_pushed, num_fetched) != (num_expected, num_prompts):
        raise EngineError(
            f"of {num_prompts} prompts {num_fetched} were fetched, and {num_pushed} of "
            f"{num_expected} were pushed: repeat the experiment when the machine is idle"
        )


async def _wait_for_engines(router: FleetEngine) -> None:
    end = time.monotonic() + START_SECONDS
    while True:
        rows = router.fleet.engines()
        if sum(row.state == "ready" and row.has_kv_transfer for row in rows) == 2:
            return
        if time.monotonic() > end:
            raise EngineError("the engines do not exchange KV blocks")
        await asyncio.sleep(0.05)


async def _measure_lengths(
    router: FleetEngine, lengths: Sequence[int], repeats: int
) -> dict[int, TokenTimes]:
    """Measure one request after another; the first one of each length warms up and is dropped."""
    rng = random.Random(0)
    samples: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    # Lengths take turns, so that other load of the machine meets all of them alike.
    for _ in range(repeats + 1):
        for length in lengths:
            prompt = rng.choices(range(router.model.vocab_size), k=length)
            samples[length].append(await _time_tokens(router, prompt))
    return {
        length: TokenTimes(*(median(values) for values in zip(*pairs[1:], strict=True)))
        for length, pairs in samples.items()
    }


async def _time_tokens(router: FleetEngine, prompt: list[int]) -> tuple[float, float]:
    """Return the times of tokens 1 and 2."""
    begin, times = time.perf_counter(), []
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    async with aclosing(router.generate(prompt, params)) as deltas:
        async for delta in deltas:
            if delta.error:
                raise EngineError(f"a request failed: {delta.error}")
            times += [time.perf_counter() - begin] * len(delta.token_ids)
    first, second = times
    return first, second
