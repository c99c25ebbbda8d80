"""Engines in Ray follow a router that scales, with stand-ins of Ray and of the router."""

import asyncio
import os
import signal

import msgspec
import pytest

from gllm.deploy.ray.plan_processes import ProcessStatus
from gllm.deploy.server_client import ServerClient
from gllm.deploy.up.engine_scaler import EngineScaler
from gllm.plan.serving_plan import ServingPlan
from tests.deploy.ray.test_plan_processes import INVALID, STARTING, Rig
from tests.deploy.up.test_engine_scaler import IDLE, ScriptedRouter
from tests.plan.test_processes import LOCAL

FAILED = ProcessStatus(False, True, False, "it exited with 1: no memory")


def scaled_plan() -> ServingPlan:
    assert LOCAL.router is not None
    router = msgspec.structs.replace(LOCAL.router, flags={**LOCAL.router.flags, "scale": "0:2"})
    return msgspec.structs.replace(LOCAL, router=router)


class ScaledRig(Rig):
    """A scaled plan in a stand-in of Ray that follows a scripted router."""

    def __init__(self, router: ScriptedRouter) -> None:
        super().__init__(scaled_plan(), is_scaled=True)
        self.router = router
        scaler = EngineScaler(
            self.manager, ServerClient(router.url), ["a", "b"], ["a", "b"], 0.02, retry_seconds=0.05
        )
        self.following = asyncio.create_task(scaler.run())

    async def close(self) -> None:
        """End the loop and the router."""
        self.following.cancel()
        await asyncio.gather(self.following, return_exceptions=True)
        self.router.server.shutdown()
        self.router.server.server_close()


async def test_actors_of_engines_follow_the_decision(caplog: pytest.LogCaptureFixture) -> None:
    router = ScriptedRouter()
    rig = ScaledRig(router)
    ray = rig.ray
    await rig.until(lambda: rig.ready)
    assert rig.started == ["router"]
    ray.states = {"a": STARTING, "b": INVALID}
    router.decision = {**IDLE, "num_wanted": 2}
    # One that cannot run returns its resources and is started again.
    await rig.until(lambda: rig.started.count("b") >= 3)
    assert rig.started.count("a") == 1
    assert len(ray.removed) >= 2
    assert "has ended before it was ready: engine b: it exited with 2" in caplog.text
    # So does one that fails at its start.
    ray.states["b"] = FAILED
    await rig.until(lambda: "engine b: it exited with 1: no memory; it is" in caplog.text)
    ray.states.clear()
    await rig.until(lambda: rig.engines == ["a", "b"])
    router.attached = {"a": "ready", "b": "ready"}
    await asyncio.sleep(0.1)
    # Ray starts a process again that ends later.
    ray.states["b"] = FAILED
    await asyncio.sleep(0.1)
    assert rig.engines == ["a", "b"]
    ray.states.clear()
    num_removed, num_started = len(ray.removed), len(ray.actors)
    router.decision = {**IDLE, "num_wanted": 1, "drain": ["a"]}
    await rig.until(lambda: router.posts)
    assert router.posts[0] == "/engines/a/drain?scaling=true"
    assert not ray.drained
    router.attached["a"] = "draining"
    router.decision = {**IDLE, "num_wanted": 1, "removable": ["a"]}
    await rig.until(lambda: rig.engines == ["b"] and len(ray.removed) > num_removed)
    assert ray.drained == ["a"]
    assert ray.killed[-1].name == "a"
    # It can be started again.
    del router.attached["a"], ray.states["a"]
    router.decision = {**IDLE, "num_wanted": 2}
    await rig.until(lambda: rig.engines == ["b", "a"] and len(ray.actors) == num_started + 1)
    await rig.close()
    assert await rig.stop() == 0
    assert ray.drained[1:] == ["router", "b", "a"]
    assert len(ray.removed) == len(ray.killed) == len(ray.actors)


async def test_an_engine_that_cannot_run_any_longer_is_removed_and_the_router_ends_all() -> None:
    router = ScriptedRouter()
    rig = ScaledRig(router)
    router.decision = {**IDLE, "num_wanted": 1}
    await rig.until(lambda: "a" in rig.started)
    router.attached["a"] = "ready"
    await asyncio.sleep(0.1)
    assert rig.engines == ["a"]
    rig.ray.states["a"] = INVALID
    await rig.until(lambda: not rig.engines)
    rig.ray.states["router"] = INVALID
    assert await rig.run == 1
    assert rig.manager.cause == "router: it exited with 2: no such model"
    await rig.close()


async def test_resources_are_not_waited_for_when_all_shall_end() -> None:
    rig = Rig(scaled_plan(), is_scaled=True)
    await rig.until(lambda: rig.ready)
    rig.ray.num_waits = 10**6
    starting = asyncio.create_task(rig.manager.start_engine("b"))
    await rig.until(lambda: rig.engines == ["b"])
    assert await rig.stop() == 0
    with pytest.raises(ValueError, match="before it was ready: engine b: it has ended before Ray"):
        await starting
    assert rig.started == ["router"]
    assert len(rig.ray.removed) == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("plan", "drained"), [(LOCAL, ["router", "a", "b"]), (scaled_plan(), ["router"])]
)
async def test_a_plan_ends_at_a_signal(
    plan: ServingPlan, drained: list[str], number: signal.Signals
) -> None:
    rig = Rig(plan, is_scaled=plan is not LOCAL)
    await rig.until(lambda: rig.ready)
    os.kill(os.getpid(), number)
    assert await rig.run == 0
    assert rig.ray.drained == drained
