"""Measure the cost of a node secret: messages between a router and an engine, plain and with CURVE.

Two processes on this machine, connected over TCP by a hub and a spoke as a router and an engine
are. The engine's side reports steps (one message per step with a token for each of a number of
sequences), sends single messages and waits for the answer to each, and connects again and again.
Rounds with and without secret alternate. Run as `python -m benchmarks.node_secret`; it prints the
figures and writes them to docs/benchmarks/node-secret.md.
"""

import argparse
import asyncio
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import NamedTuple

import zmq

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from gllm.messages.codec import AnyMessage, decode_for_head, decode_for_worker, encode
from gllm.messages.lifecycle import InitializeCache, StageReady
from gllm.messages.requests import EngineOutputs
from gllm.observability.latency import percentile
from gllm.runtime.messaging.bus import Hub, Spoke
from gllm.runtime.messaging.security import Authenticator, KeyPair, SecretFile, create_secret_file
from gllm.scheduler.plan import SchedulerStats, StepOutput
from gllm.sim.metrics.report import format_table

SEQUENCES = (1, 64)
"""Numbers of sequences whose tokens a message reports."""


class Burst(NamedTuple):
    """Many messages of one size, as fast as possible."""

    num_bytes: int
    """Size of a message."""
    seconds: float
    """Time until the last one was handled, per message."""
    engine_cpu: float
    """CPU seconds of the sender per message, encoding included."""
    router_cpu: float
    """CPU seconds of the receiver per message, decoding included."""


class Round(NamedTuple):
    """Figures of one round."""

    bursts: list[Burst]
    """By number of sequences, as in SEQUENCES."""
    round_trips: list[float]
    """Seconds between a message and its answer."""
    connects: list[float]
    """Seconds from connecting to the answer to the first message."""


class Pinger:
    """The engine's side: a spoke whose StageReady messages are answered in order."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, keys: KeyPair | None):
        self._number = time.monotonic_ns()
        self.spoke = Spoke(context, 0, self._number, address, decode_for_worker, keys)
        self._answers: asyncio.Queue[AnyMessage] = asyncio.Queue()
        self.spoke.start(self._on_messages, lambda cause: None)

    async def ping(self) -> int:
        """Wait for the answer to a message: the other side's CPU time in nanoseconds."""
        self.spoke.send(StageReady(0))
        answer = await self._answers.get()
        assert isinstance(answer, InitializeCache)
        return answer.num_blocks

    def _on_messages(self, messages: list[AnyMessage]) -> None:
        for message in messages:
            self._answers.put_nowait(message)


async def measure_engine_side(
    address: str, keys: KeyPair | None, num_messages: int, num_pings: int, num_connects: int
) -> Round:
    """Return the figures of one round."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    connects = []
    for _ in range(num_connects):
        begin = time.perf_counter()
        visitor = Pinger(context, address, keys)
        await visitor.ping()
        connects.append(time.perf_counter() - begin)
        visitor.spoke.close()
    pinger = Pinger(context, address, keys)
    bursts = [await _measure_burst(pinger, count, num_messages) for count in SEQUENCES]
    round_trips = []
    for _ in range(num_pings):
        begin = time.perf_counter()
        await pinger.ping()
        round_trips.append(time.perf_counter() - begin)
    pinger.spoke.close()
    context.term()
    return Round(bursts, round_trips, connects)


async def _measure_burst(pinger: Pinger, num_sequences: int, num_messages: int) -> Burst:
    outcome = StepOutput(
        [2**31 + index for index in range(num_sequences)], [17_000] * num_sequences, [], []
    )
    message = EngineOutputs(outcome, SchedulerStats(running=1, waiting=1, kv_usage=1, steps=1))
    router_begin = await pinger.ping()
    begin, cpu = time.perf_counter(), time.process_time()
    for number in range(num_messages):
        pinger.spoke.send(message)
        if number % 64 == 63:
            await asyncio.sleep(0)
    router_end = await pinger.ping()
    return Burst(
        len(encode(message)),
        (time.perf_counter() - begin) / num_messages,
        (time.process_time() - cpu) / num_messages,
        1e-9 * (router_end - router_begin) / num_messages,
    )


def run_engine_side(
    results: Connection, address: str, secret_file: str | None, counts: tuple[int, int, int]
) -> None:
    """Send the figures of one round to the parent process."""
    keys = SecretFile(secret_file).keys[0] if secret_file else None
    results.send(asyncio.run(measure_engine_side(address, keys, *counts)))


async def measure_round(secret: SecretFile | None, counts: tuple[int, int, int]) -> Round:
    """Run the router's side here and the engine's in another process."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, secret) if secret else None
    hub = Hub(context, 0, decode_for_head, authenticator, max_guests=1000)
    address = hub.bind("tcp://127.0.0.1:0")

    def on_messages(messages: list[tuple[int, AnyMessage]]) -> None:
        for sender, message in messages:
            if isinstance(message, StageReady):
                hub.send(sender, InitializeCache(time.process_time_ns()))

    hub.start(on_messages, lambda sender, cause: None)
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    arguments = (there, address, str(secret.path) if secret else None, counts)
    process = spawn.Process(target=run_engine_side, args=arguments)
    process.start()
    try:
        figures: Round = await asyncio.to_thread(here.recv)
        await asyncio.to_thread(process.join)
    finally:
        process.kill()
        hub.close()
        context.term()
    return figures


def make_rows(rounds: list[Round]) -> list[list[str]]:
    """Return rows of medians over the rounds: the figure's name, its value."""
    rows = []
    for index, count in enumerate(SEQUENCES):
        bursts = [each.bursts[index] for each in rounds]
        size = bursts[0].num_bytes
        name = f"message of {size} bytes, {count} token{'s' * (count > 1)}"
        for text, value in (
            ("time", [each.seconds for each in bursts]),
            ("CPU of the engine", [each.engine_cpu for each in bursts]),
            ("CPU of the router", [each.router_cpu for each in bursts]),
        ):
            rows.append([f"{name}: {text} (us)", f"{1e6 * median(value):.1f}"])
    figures: list[tuple[str, Callable[[Round], float]]] = [
        ("round trip, median (us)", lambda each: 1e6 * median(each.round_trips)),
        ("round trip, p99 (us)", lambda each: 1e6 * percentile(each.round_trips, 99)),
        ("connecting, median (us)", lambda each: 1e6 * median(each.connects)),
    ]
    rows += [[name, f"{median(map(value, rounds)):.0f}"] for name, value in figures]
    return rows


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--messages", type=int, default=30_000)
    parser.add_argument("--pings", type=int, default=3000)
    parser.add_argument("--connects", type=int, default=100)
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/node-secret.md"))
    options = parser.parse_args()
    counts = (options.messages, options.pings, options.connects)
    foreign = ForeignCpu()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "secret"
        create_secret_file(path)
        secrets: dict[str, SecretFile | None] = {"plain": None, "secret": SecretFile(path)}
        rounds: dict[str, list[Round]] = {name: [] for name in secrets}
        for _ in range(options.rounds):
            for name, secret in secrets.items():
                rounds[name].append(asyncio.run(measure_round(secret, counts)))
    plain, secured = (make_rows(each) for each in rounds.values())
    rows = [
        [name, before, after, f"{float(after) / float(before):.2f}"]
        for (name, before), (_, after) in zip(plain, secured, strict=True)
    ]
    figures = "\n\n".join(
        [
            f"{origin('benchmarks.node_secret')} Medians of {options.rounds} rounds of each. Other "
            f"processes kept {foreign.cores():.2f} cores busy.",
            format_table(["figure", "plain", "with secret", "ratio"], rows),
        ]
    )
    write_results(options.output, "Cost of a node secret", figures, {"rows": rows})


if __name__ == "__main__":
    main()
