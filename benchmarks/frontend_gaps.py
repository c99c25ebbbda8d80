"""Measure for how long one request blocks the event loop, field by field.

The real application and the real engine object run without workers. A client in its own process
alternates between plain requests and requests with one field at its maximum permitted size
(gap_cases.py). The table has the longest iteration of the loop by wall clock and by the CPU time of
its thread, as medians over the rounds, and both relative to a plain request. Run as `python -m
benchmarks.frontend_gaps`, on a machine that does nothing else; `--write` writes the table to
docs/benchmarks/frontend-gaps.md.
"""

import argparse
import asyncio
import gc
import http.client
import logging
import platform
import statistics
import sys
from array import array
from asyncio.subprocess import PIPE, Process
from datetime import date
from pathlib import Path

import uvloop
from aiohttp import web

from benchmarks.frontend import EndlessPipeline
from benchmarks.gap_cases import CASES, CHAT, Case, chat
from benchmarks.loop_watch import Gaps, LoopWatch
from gllm.config.engine import EngineConfig
from gllm.config.server import ServerConfig
from gllm.engine.engine import Engine
from gllm.frontend.app import make_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.server import THREAD_SWITCH_SECONDS
from gllm.messages.base import WireMessage
from gllm.messages.requests import SubmitRequest
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams, TokenLogprobs

PAGE = Path(__file__).parent.parent / "docs" / "benchmarks" / "frontend-gaps.md"
MARKS = "<!-- figures, overwritten by the command -->\n", "<!-- end of figures -->\n"
PLAIN = Case("a plain request", CHAT, chat())
BY_NAME = {case.field: case for case in (PLAIN, *CASES)}
WIDTH = 256
"""Dimension of embeddings."""


class ScoringPipeline(EndlessPipeline):
    """Substitute for the driver that also returns log-probabilities and embeddings if requested."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._sampling: dict[int, SequenceSamplingParams] = {}

    def send(self, message: WireMessage) -> None:
        """Receive a message like the driver's link; every choice of a request is a sequence."""
        if isinstance(message, SubmitRequest):
            for seq in range(message.seq, message.seq + message.n):
                self._sampling[seq] = message.sampling
                self._left[seq] = message.max_tokens
        super().send(message)

    def _rows(self, seqs: list[int], tokens: list[int]) -> list[SampleDetails]:
        rows = []
        for seq, token in zip(seqs, tokens, strict=True):
            sampling = self._sampling[seq]
            if sampling.logprobs is not None:
                top = list(range(sampling.logprobs))
                entry = TokenLogprobs(token, -0.5, 1, top, [-1.5] * len(top))
                rows.append(SampleDetails(seq, entry, []))
            elif sampling.embeds:
                rows.append(SampleDetails(seq, None, [], array("f", [0.5] * WIDTH).tobytes()))
        return rows


def ask(port: int) -> None:
    """Run the client: send the requests named on standard input and print the status of each."""
    for line in sys.stdin:
        case = BY_NAME[line.rstrip("\n")]
        body = case.body()
        headers = {"Content-Encoding": "gzip"} if case.is_compressed else {}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        connection.request("POST", case.path, body, headers)
        with connection.getresponse() as response:
            response.read()
            print(response.status, flush=True)
        connection.close()


async def longest_turn(client: Process, case: Case) -> tuple[Gaps, str]:
    """Return the loop's longest iteration during one request, and the status of the response."""
    assert client.stdin is not None
    assert client.stdout is not None
    client.stdin.write(case.field.encode() + b"\n")
    with LoopWatch() as gaps:
        status = await client.stdout.readline()
    return gaps, status.decode().strip()


async def measure(rounds: int) -> dict[str, list[tuple[Gaps, str]]]:
    """Return the longest iterations of all cases, with a plain request before each."""
    config = ServerConfig(port=0, reasoning_parser="none")
    logging.disable()
    engine = Engine(EngineConfig("demo"))
    app = make_app(engine, config)
    pipeline = asyncio.ensure_future(ScoringPipeline(engine).run())
    runner = ConnectionRunner(app, config)
    await runner.setup()
    await web.TCPSite(runner, config.host, 0).start()
    sys.setswitchinterval(THREAD_SWITCH_SECONDS)
    gc.collect()
    gc.freeze()
    port = str(runner.addresses[0][1])
    command = (sys.executable, "-m", "benchmarks.frontend_gaps", "--ask", port)
    client = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    turns: dict[str, list[tuple[Gaps, str]]] = {name: [] for name in BY_NAME}
    await longest_turn(client, PLAIN)
    for _ in range(rounds):
        for case in CASES:
            for request in (PLAIN, case):
                turns[request.field].append(await longest_turn(client, request))
    client.kill()
    await client.wait()
    pipeline.cancel()
    await engine._grammars.close()
    await runner.cleanup()
    return turns


def table(turns: dict[str, list[tuple[Gaps, str]]]) -> str:
    """Format the figures as a Markdown table."""
    rows = {}
    for name, measured in turns.items():
        wall = statistics.median(gaps.wall_seconds for gaps, _ in measured)
        cpu = statistics.median(gaps.cpu_seconds for gaps, _ in measured)
        rows[name] = wall * 1e3, cpu * 1e3, measured[0][1]
    plain, plain_cpu, _ = rows[PLAIN.field]
    lines = [
        "| field and what it holds | longest turn, ms | of a plain request | CPU, ms | of a plain "
        "request's | status |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {name} | {wall:.1f} | {wall / plain:.0f} x | {cpu:.1f} | {cpu / plain_cpu:.0f} x "
        f"| {status} |"
        for name, (wall, cpu, status) in rows.items()
    ]
    return "\n".join(lines) + "\n"


def write(figures: str, rounds: int) -> None:
    """Write the figures to the page."""
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(MARKS[0]) + len(MARKS[0]), text.index(MARKS[1])
    system = f"{platform.machine()}, Python {platform.python_version()}, {date.today()}"
    head = (
        f"\nMade by `python -m benchmarks.frontend_gaps --write`. {system}. Rounds: {rounds}.\n\n"
    )
    PAGE.write_text(text[:begin] + head + figures + "\n" + text[end:], encoding="utf-8")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table to the page")
    parser.add_argument("--ask", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ask:
        ask(options.ask)
        return
    figures = table(uvloop.run(measure(options.rounds)))
    print(figures)
    if options.write:
        write(figures, options.rounds)


if __name__ == "__main__":
    main()
