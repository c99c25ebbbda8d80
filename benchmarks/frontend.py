"""Measure the frontend's streaming rate: tokens per second and CPU time per token.

The real application and the real engine object run without workers. Each stream receives one token
at a time, as from the steps of a pipeline, and the next one as soon as all streams have consumed
it. The limit is an aiohttp handler that writes constant bytes of the same length. Each server and
the client run in their own processes. Run as `python -m benchmarks.frontend`.
"""

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass

import uvloop
from aiohttp import web

from gllm.config.engine import EngineConfig
from gllm.config.server import ServerConfig
from gllm.engine.engine import Engine
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.sse import STREAM_HEADERS
from gllm.messages.base import WireMessage
from gllm.messages.requests import AbortSequences, EngineOutputs, SubmitRequest
from gllm.messages.sampling import SampleDetails
from gllm.recovery.records import RecoveryState
from gllm.scheduler.plan import FinishedSequence, FirstToken, SchedulerStats, StepOutput

MESSAGES = [{"role": "user", "content": "Hi"}]
STREAMS: dict[str, tuple[str, dict[str, object], str]] = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    "reasoning": ("/v1/chat/completions", {"messages": MESSAGES}, "max_tokens"),
    "completions": ("/v1/completions", {"prompt": "Hi"}, "max_tokens"),
    "responses": ("/v1/responses", {"input": "Hi"}, "max_output_tokens"),
    "messages": ("/v1/messages", {"messages": MESSAGES, "model": "demo"}, "max_tokens"),
}
"""Requests by kind of stream: path, body, name of the field with the maximum tokens."""
TEXT = "The pipeline moves tokens from stage to stage, and nothing waits for anything else. "
TICK = os.sysconf("SC_CLK_TCK")


class EndlessPipeline:
    """Substitute for the driver: sends a token to each sequence once all consumed the last one."""

    def __init__(self, engine: Engine) -> None:
        self._client = engine._client
        self._ids = engine.tokenizer.encode(TEXT, add_special_tokens=False)
        self._left: dict[int, int] = {}
        self._begun: set[int] = set()
        self._work = asyncio.Event()
        recovery = engine._supervisor.recovery
        recovery.state, recovery.has_been_ready = RecoveryState.READY, True
        self._client.attach(self.send)

    def send(self, message: WireMessage) -> None:
        """Receive a message like the driver's link: requests are added and aborted."""
        match message:
            case SubmitRequest(seq):
                self._left[seq] = message.max_tokens
                self._work.set()
            case AbortSequences(seqs):
                for seq in seqs:
                    self._left.pop(seq, None)

    async def run(self) -> None:
        """Send tokens until cancelled."""
        while True:
            if not self._left:
                self._work.clear()
                await self._work.wait()
            self._step()
            while any(stream.deltas for stream in self._client._streams):
                await asyncio.sleep(0)
            await asyncio.sleep(0)

    def _step(self) -> None:
        seqs = list(self._left)
        tokens = [self._ids[self._left[seq] % len(self._ids)] for seq in seqs]
        firsts = [FirstToken(seq, 0, 0.0) for seq in seqs if seq not in self._begun]
        self._begun.update(seqs)
        ends = []
        for seq in seqs:
            self._left[seq] -= 1
            if not self._left[seq]:
                del self._left[seq]
                ends.append(FinishedSequence(seq, "length"))
        outcome = StepOutput(seqs, tokens, firsts, ends, len(seqs))
        self._client.on_report(EngineOutputs(outcome, SchedulerStats(), self._rows(seqs, tokens)))

    def _rows(self, seqs: list[int], tokens: list[int]) -> list[SampleDetails]:
        """Return the details that sequences report with their tokens; none here."""
        return []


def bare_app(size: int, path: str, limit: str) -> web.Application:
    """Return the app that sets the limit: one event of `size` bytes per requested token."""
    event = b"data: " + b"x" * (size - 8) + b"\n\n"

    async def stream(request: web.Request) -> web.StreamResponse:
        count = json.loads(await request.read())[limit]
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        for _ in range(count):
            await response.write(event)
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response

    app = web.Application()
    app.router.add_post(path, stream)
    return app


async def serve(options: argparse.Namespace) -> None:
    """Run a server until it is killed; print its port on the first line of the output."""
    parser = "think" if options.stream == "reasoning" else "none"
    config = ServerConfig(port=0, reasoning_parser=parser)
    path, _, limit = STREAMS[options.stream]
    if options.serve == "bare":
        app = bare_app(options.size, path, limit)
    else:
        engine = Engine(EngineConfig("demo"))
        app = make_app(engine, config)
        pipeline = asyncio.ensure_future(EndlessPipeline(engine).run())
    runner = ConnectionRunner(app, config)
    await runner.setup()
    await web.TCPSite(runner, config.host, 0).start()
    # The real server freezes the collector's objects, too.
    gc.collect()
    gc.freeze()
    print(runner.addresses[0][1], flush=True)
    await (pipeline if options.serve != "bare" else asyncio.Event().wait())


@dataclass(frozen=True)
class Measured:
    """Figures of one run against one server."""

    tokens_per_second: float
    cpu_us_per_token: float
    """CPU microseconds of the server's process per token."""
    events_per_token: float
    bytes_per_event: float


async def one_connection(port: int, kind: str, tokens: int, rounds: int) -> tuple[int, int]:
    """Request streams one after the other on one connection; return (events, bytes)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    path, fields, limit = STREAMS[kind]
    body = json.dumps({**fields, limit: tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    events = size = 0
    for _ in range(rounds):
        writer.write(head + body)
        tail = b""
        while not tail.endswith(b"0\r\n\r\n"):
            part = await reader.read(2**18)
            assert part, "the server closed the connection"
            events += part.count(b"\ndata: ")
            size += len(part)
            tail = (tail + part)[-5:]
    writer.close()
    return events, size


def cpu_seconds(pid: int) -> float:
    """Return the user and system seconds of a process so far."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / TICK


async def load(port: int, pid: int, options: argparse.Namespace) -> Measured:
    """Stream over all connections at once and return the figures."""
    counts = options.stream, options.tokens, options.rounds
    await one_connection(port, options.stream, 8, 1)
    before, begin = cpu_seconds(pid), time.perf_counter()
    results = await asyncio.gather(
        *(one_connection(port, *counts) for _ in range(options.connections))
    )
    wall, cpu = time.perf_counter() - begin, cpu_seconds(pid) - before
    tokens = options.connections * options.tokens * options.rounds
    events = sum(num_events for num_events, _ in results)
    size = sum(num_bytes for _, num_bytes in results)
    return Measured(tokens / wall, cpu / tokens * 1e6, events / tokens, size / events)


def measure(kind: str, size: int, options: argparse.Namespace) -> Measured:
    """Start a server, load it, stop it."""
    command = [sys.executable, "-m", "benchmarks.frontend", "--serve", kind, "--size", str(size)]
    command += ["--stream", options.stream]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            port = int(process.stdout.readline())
            return uvloop.run(load(port, process.pid, options))
        finally:
            process.kill()


def main() -> None:
    """Measure and print a table of medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stream", choices=STREAMS, default="chat", help="kind of request")
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=896, help="tokens per response")
    parser.add_argument("--rounds", type=int, default=2, help="responses per connection")
    parser.add_argument("--repeat", type=int, default=7, help="runs of each server, in turn")
    parser.add_argument("--serve", choices=("bare", "gllm"), help=argparse.SUPPRESS)
    parser.add_argument("--size", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        uvloop.run(serve(options))
        return
    runs: dict[str, list[Measured]] = {"gllm": [], "bare": []}
    for _ in range(options.repeat):
        runs["gllm"].append(measure("gllm", 0, options))
        runs["bare"].append(measure("bare", round(runs["gllm"][0].bytes_per_event) - 8, options))
    print("| server | tokens/s | CPU us a token | events a token | bytes an event |")
    print("| --- | --- | --- | --- | --- |")
    rates = {}
    for kind, measured in runs.items():
        rate, cpu, events, size = (
            statistics.median(getattr(run, name) for run in measured)
            for name in Measured.__dataclass_fields__
        )
        rates[kind] = rate
        print(f"| {kind} | {rate:,.0f} | {cpu:.1f} | {events:.2f} | {size:.0f} |")
    print(f"\nThe frontend streams {rates['gllm'] / rates['bare']:.2f} of the limit.")


if __name__ == "__main__":
    main()
