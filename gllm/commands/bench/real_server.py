"""Jobs for a real server on this machine, sent over HTTP by this process.

Beside the latencies that the client sees, the server's step log has those of the driver.
"""

import asyncio
import os
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gllm.commands.bench.client import ServedModel, open_session, send, wait_until_ready
from gllm.commands.bench.options import ServeConfig
from gllm.commands.bench.real import LOG_DRAIN_SECONDS
from gllm.commands.server_command import KEY_VARIABLE
from gllm.config.engine import EngineConfig
from gllm.config.node_environment import remove_launcher
from gllm.deploy.logged_process import LoggedProcess
from gllm.engine.engine import EngineError
from gllm.observability.child_process import module_command
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import AddEvent, StepLogEvent
from gllm.options.flags import flags_of_config
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest

START_SECONDS = 600.0
"""Longest start of a server."""
DRAIN_SECONDS = 20.0
"""Time in which a server ends, and after which it is killed a little later."""
POLL_SECONDS = 0.1
"""Time between two attempts to reach a server that starts."""


class ClientRequest(NamedTuple):
    """Request that the client has sent, with its times there."""

    prompt: list[int]
    job: WorkloadRequest
    line: RequestTimeline


class RealServer:
    """Server on this machine with a client in this process.

    Args:
        session: HTTP session of the client.
        url: URL of the server, without a path.
        model: Model that it serves.
    """

    def __init__(self, session: Any, url: str, model: ServedModel) -> None:
        self._session = session
        self._url = f"{url}/v1/completions"
        self._model = model
        self.served: list[ClientRequest] = []
        """All requests so far."""

    async def serve_workload(
        self, jobs: list[WorkloadRequest], seed: int = 0, served: Callable[[], None] = lambda: None
    ) -> list[ClientRequest]:
        """Send requests with random prompts at their arrival times, and wait for their outputs.

        Outputs are greedy and have exactly the requested length.

        Args:
            jobs: Arrival times, prompt lengths and output lengths.
            seed: Seed of the random prompts.
            served: Called after each finished request.

        Raises:
            RuntimeError: A request fails.
        """
        rng, loop = random.Random(seed), asyncio.get_running_loop()
        vocabulary = range(self._model.vocab_size)
        prompts = [rng.choices(vocabulary, k=job.num_prompt_tokens) for job in jobs]
        bodies = [
            _request_body(self._model.name, prompt, job)
            for prompt, job in zip(prompts, jobs, strict=True)
        ]
        begin = loop.time()

        async def serve_one(prompt: list[int], job: WorkloadRequest, body: bytes) -> ClientRequest:
            await asyncio.sleep(begin + job.arrival_seconds - loop.time())
            result = await send(self._session, self._url, body, len(prompt))
            if result.failure:
                raise RuntimeError(f"a request failed: {result.failure}: {result.detail}")
            served()
            return ClientRequest(prompt, job, result.timeline)

        requests = await asyncio.gather(*map(serve_one, prompts, jobs, bodies))
        self.served += requests
        return requests


def _request_body(model: str, prompt: list[int], job: WorkloadRequest) -> bytes:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": job.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return msgspec.json.encode(body)


@asynccontextmanager
async def start_server(config: EngineConfig, step_log: Path) -> AsyncIterator[RealServer]:
    """Start `gllm serve` with a configuration and stop it at the end of the block.

    The step log is complete after the block.

    Args:
        config: Configuration of its engine.
        step_log: File for the step log.

    Raises:
        EngineError: The server does not start.
    """
    environment = remove_launcher(os.environ)
    environment.pop(KEY_VARIABLE, None)  # The client has none.
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        flags = Path(folder) / "serve.json"
        flags.write_bytes(msgspec.json.encode(changed_flags(config)))
        arguments = ["serve", "--config", str(flags), "--step-log", str(step_log)]
        arguments += ["--host", "127.0.0.1", "--port", str(port)]
        process = LoggedProcess(lambda line: None)
        process.start(module_command("gllm", *arguments), environment)
        ended = asyncio.ensure_future(process.wait())
        try:
            async with open_session(ServeConfig(), None) as session:
                url = f"http://127.0.0.1:{port}"
                yield RealServer(session, url, await _wait(ended, session, url))
                await asyncio.sleep(LOG_DRAIN_SECONDS)
        finally:
            process.end(DRAIN_SECONDS)
            await ended


def changed_flags(config: EngineConfig) -> dict[str, Any]:
    """Return the flags of a configuration that differ from the defaults, and its model."""
    defaults = flags_of_config(EngineConfig.from_options(config.model))
    flags = flags_of_config(config)
    changed = {name: value for name, value in flags.items() if value != defaults.get(name)}
    return {"model": config.model} | changed


async def _wait(ended: "asyncio.Future[str]", session: Any, url: str) -> ServedModel:
    """Return the model once the server is ready. Raises EngineError if its process ends."""
    ready = asyncio.ensure_future(wait_until_ready(session, url, None, START_SECONDS, POLL_SECONDS))
    futures: tuple[asyncio.Future[Any], ...] = (ready, ended)
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    if not ended.done():
        return ready.result()
    ready.cancel()
    raise EngineError(f"the server that is measured does not start: {ended.result()}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def pair_requests(
    requests: list[ClientRequest], events: list[StepLogEvent], run: RunRecord
) -> list[tuple[RequestTimeline, ServedRequest]]:
    """Return the timelines of requests at the client, each with the record of the server's log.

    Requests are recognized by their prompts, which are random. Prompts of two requests that are
    equal, such as short ones, have the order in which they were sent.

    Args:
        requests: Requests of the client.
        events: Step log of the server.
        run: Record of the same log.
    """
    waiting: dict[tuple[int, ...], list[ServedRequest]] = {}
    for event in events:
        if isinstance(event, AddEvent) and event.seq in run.requests:
            waiting.setdefault(tuple(event.prompt), []).append(run.requests[event.seq])
    pairs = []
    for request in sorted(requests, key=lambda request: request.line.arrival):
        if records := waiting.get(tuple(request.prompt)):
            pairs.append((request.line, records.pop(0)))
    return pairs
