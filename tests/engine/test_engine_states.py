"""Each public method of Engine in each state: no effect, its result, or an error with a name."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest

from gllm.config.attachment import AttachmentConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine, EngineError
from gllm.engine.interface import (
    EmbeddingError,
    EngineUnavailableError,
    NodeDrainError,
    ProfileError,
    RoleSwitchError,
    UnknownNodeError,
)
from gllm.runtime.head import node as node_module
from tests.support.engines.scripted_engine import scripted_engine
from tests.support.network.ports import free_port
from tests.support.nodes.scripted_node import ScriptedNode

NAMED = (
    EngineError,
    EngineUnavailableError,
    EmbeddingError,
    NodeDrainError,
    ProfileError,
    RoleSwitchError,
    UnknownNodeError,
)
PARAMS = SamplingParams(max_tokens=3, ignore_eos=True)


async def generate(engine: Engine) -> str:
    reason = ""
    async for delta in engine.generate([5, 6], PARAMS):
        reason = delta.error or delta.finish_reason or ""
    return reason


async def submit(engine: Engine) -> None:
    for request in await engine.submit([[5], [6]], PARAMS):
        request.close()


Call = Callable[[Engine], Any]
METHODS: dict[str, Call] = {
    "start": lambda engine: engine.start(),
    "stop": lambda engine: engine.stop(),
    "drain": lambda engine: engine.drain(0),
    "generate": generate,
    "submit": submit,
    "embed": lambda engine: engine.embed([5]),
    "abort": lambda engine: engine.abort(None),
    "sleep": lambda engine: engine.sleep(),
    "wake_up": lambda engine: engine.wake_up(),
    "reset_prefix_cache": lambda engine: engine.reset_prefix_cache(),
    "start_profile": lambda engine: engine.start_profile("x"),
    "stop_profile": lambda engine: engine.stop_profile(),
    "nodes": lambda engine: engine.nodes(),
    "drain_node": lambda engine: engine.drain_node("nobody"),
    "set_role": lambda engine: engine.set_role("prefill"),
    "kv_participant": lambda engine: engine.kv_participant(),
    "release_kv": lambda engine: engine.release_kv([1]),
    "describe": lambda engine: engine.describe(),
    "status": lambda engine: engine.status(),
    "state": lambda engine: engine.state,
    "role": lambda engine: engine.role,
    "fleet": lambda engine: engine.fleet,
    "accepts_requests": lambda engine: engine.accepts_requests,
    "num_requests": lambda engine: engine.num_requests,
}
SERVES = ("generate", "submit", "sleep", "reset_prefix_cache", "start_profile", "stop_profile")
"""Methods that only a running engine can execute; `embed` needs a real model."""
CHANGES = {"stop", "drain", "sleep"}
"""Methods that change the state of a running engine."""
STATES = ("new", "starting", "running", "failed", "stopping", "stopped")


async def new(engine: Engine, node: ScriptedNode) -> None:
    pass


async def starting(engine: Engine, node: ScriptedNode) -> None:
    node.may_load.clear()
    engine.__dict__["test_start"] = asyncio.create_task(ignore_errors(engine.start()))
    while not node.workers:
        await asyncio.sleep(0.002)


async def running(engine: Engine, node: ScriptedNode) -> None:
    await engine.start()


async def failed(engine: Engine, node: ScriptedNode) -> None:
    node.failures_at_load[1] = "the file has no weights"
    with pytest.raises(EngineError, match="the file has no weights"):
        await engine.start()
    node.failures_at_load.clear()


async def stopping(engine: Engine, node: ScriptedNode) -> None:
    await engine.start()
    engine.__dict__["test_stop"] = asyncio.create_task(engine.stop())
    while engine.state != "dead":
        await asyncio.sleep(0)


async def stopped(engine: Engine, node: ScriptedNode) -> None:
    await engine.start()
    await engine.stop()


async def ignore_errors(work: Awaitable[None]) -> None:
    with suppress(*NAMED):
        await work


@asynccontextmanager
async def engine_in(state: str) -> AsyncIterator[Engine]:
    engine, node = scripted_engine()
    try:
        await globals()[state](engine, node)
        yield engine
    finally:
        node.may_load.set()
        await engine.stop()
        assert engine.state == "dead"
        assert not node.workers


async def call(method: Call, engine: Engine) -> Any:
    """Return the result of a method, or its error if that has a name."""
    try:
        result = method(engine)
        return await result if inspect.isawaitable(result) else result
    except NAMED as error:
        return error


def test_the_table_has_each_method() -> None:
    public = {name for name in dir(Engine) if not name.startswith("_")}
    assert public - METHODS.keys() == {"wait_until_dead"}, "it waits in each state but the last"


async def check(name: str, state: str, engine: Engine) -> None:
    """Call a method: it has its result where that is possible, elsewhere an error with a name."""
    before = engine.state
    result = await call(METHODS[name], engine)
    if name == "start" or (name in SERVES and state != "running"):
        assert isinstance(result, NAMED), f"{name} while {state}: {result!r}"
        assert str(result)
    elif name not in ("drain_node", "set_role", "embed"):
        assert not isinstance(result, NAMED), f"{name} while {state}: {result!r}"
    if name not in CHANGES:
        assert engine.state == before, f"{name} while {state}"


@pytest.mark.parametrize("state", STATES)
async def test_each_method_has_no_effect_or_a_named_error(state: str) -> None:
    async with asyncio.timeout(60):
        async with engine_in(state) as engine:
            for name in METHODS:
                if name not in CHANGES and (name, state) != ("start", "new"):
                    await check(name, state, engine)
            if state == "running":
                assert await generate(engine) == "length"
        for name in CHANGES:
            async with engine_in(state) as engine:
                await check(name, state, engine)


async def test_a_second_start_leaves_the_workers_alone() -> None:
    async with engine_in("running") as engine:
        with pytest.raises(EngineError, match="was started before and is ready"):
            await engine.start()
        assert engine.status().epoch == 1
        assert await generate(engine) == "length"


async def test_a_stop_ends_the_start() -> None:
    engine, node = scripted_engine()
    node.may_load.clear()
    start = asyncio.create_task(engine.start())
    while not node.workers:
        await asyncio.sleep(0.002)
    await asyncio.gather(engine.stop(), engine.stop())
    with pytest.raises(EngineError, match="was stopped"):
        await start
    assert not node.workers


async def test_a_stop_that_is_cancelled_goes_on() -> None:
    engine, node = scripted_engine()
    await engine.start()
    stop = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    stop.cancel()
    await asyncio.wait([stop])
    await engine.stop()
    assert not node.workers


async def test_a_start_that_is_cancelled_leaves_nothing() -> None:
    engine, node = scripted_engine()
    node.may_load.clear()
    start = asyncio.create_task(engine.start())
    while not node.workers:
        await asyncio.sleep(0.002)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert not node.workers
    assert (engine.state, engine.status().cause_of_death) == ("dead", "the engine was stopped")


async def test_a_start_that_fails_early_ends_the_workers_and_keeps_its_error() -> None:
    """The hub for routers cannot be bound, after the workers have started."""
    async with engine_in("running"):
        port = free_port()
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
        attachment = AttachmentConfig(hub=f"127.0.0.1:{port}")
        engine, node = scripted_engine(attachment=attachment)
        with pytest.raises(OSError, match=str(port)):
            await engine.start()
        assert (engine.state, node.workers) == ("dead", {})
        assert str(port) in engine.status().cause_of_death
        await engine.stop()
        listener.close()
        await listener.wait_closed()


async def test_processes_that_wait_for_a_start_end_without_it() -> None:
    """`gllm serve` starts the processes before it reads the configuration."""
    node = node_module.LocalNode(1)
    (process,) = node.processes
    engine, _ = scripted_engine(node=node)  # type: ignore[arg-type]
    await engine.stop()
    assert process.returncode is not None
    with pytest.raises(EngineError, match="was stopped"):
        await engine.start()
    assert not node.processes
