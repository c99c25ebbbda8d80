"""The server around a scripted engine: exit codes, drain and log lines."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import pytest

from gllm.frontend.server import Server
from gllm.text.tokenizer import Tokenizer
from tests.frontend.conftest import CONFIG, TEXT_PATH
from tests.frontend.test_stream import BulkyTokenizer, until
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw import SECONDS, post
from tests.support.network.ports import free_port


@pytest.fixture(autouse=True)
def restored_process() -> Iterator[None]:
    """Undo what a server changes in its process."""
    interval = sys.getswitchinterval()
    yield
    sys.setswitchinterval(interval)
    gc.unfreeze()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else 0)


async def run_server(engine: FakeEngine, **options: Any) -> "asyncio.Task[int]":
    engine.state = "loading"
    config = replace(CONFIG, **{"port": 0, "host": "127.0.0.1", **options})
    server = Server(engine, config, dead_answer_seconds=0.01)
    task = asyncio.create_task(server.run())
    while engine.state == "loading" and not task.done():
        await asyncio.sleep(0.005)
    return task


async def test_exit_code_is_0_after_sigterm(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gllm")
    task = await run_server(engine)
    os.kill(os.getpid(), signal.SIGTERM)
    assert await task == 0
    assert "KV cache: 1.0 MiB, 64 blocks, 4.0 requests of full length (256 tokens)" in caplog.text
    assert "draining 0 requests" in caplog.text


async def test_a_client_that_reads_nothing_is_not_waited_for(engine: FakeEngine) -> None:
    engine.max_model_len = 10**6
    engine.tokenizer = cast(Tokenizer, BulkyTokenizer(engine.tokenizer, 4000, 5000))
    port = free_port()
    task = await run_server(engine, port=port, shutdown_timeout=0.2)
    body = {"prompt": [5], "stream": True, "max_tokens": 4000}
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        await asyncio.to_thread(stuck.connect, ("127.0.0.1", port))
        stuck.sendall(post(TEXT_PATH, body))
        await until(lambda: engine.calls, SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(SECONDS):
            assert await task == 0


async def test_exit_code_is_1_after_death(
    engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    task = await run_server(engine)
    engine.state, engine.cause = "dead", "stage 1 was killed"
    assert await task == 1
    assert "the engine is down: stage 1 was killed" in caplog.text


async def test_error_of_start_is_raised(engine: FakeEngine) -> None:
    engine.raises = RuntimeError("no memory")
    engine.state = "loading"
    with pytest.raises(RuntimeError, match="no memory"):
        await Server(engine, replace(CONFIG, port=0)).run()
