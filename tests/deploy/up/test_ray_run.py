"""Engines in Ray follow a router that scales, with stand-ins of Ray and of the router."""

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest

from gllm.deploy.ray.manager import LaunchError
from gllm.deploy.up.ray_plan import RayPlan
from gllm.deploy.up.ray_run import RayTimes, follow_router, run_plan
from gllm.plan.processes import LaunchOptions
from gllm.plan.serving_plan import ServingPlan
from tests.deploy.ray.test_manager import cluster
from tests.deploy.up.test_ray_plan import INVALID, SERVING, STARTING, PlanRay
from tests.deploy.up.test_scale_follower import IDLE, ScriptedRouter
from tests.plan.test_processes import LOCAL

TIMES = RayTimes(poll_seconds=0.01, follow_seconds=0.02, retry_seconds=0.05)


def scaled_plan() -> ServingPlan:
    assert LOCAL.router is not None
    router = msgspec.structs.replace(LOCAL.router, flags={**LOCAL.router.flags, "scale": "0:2"})
    return msgspec.structs.replace(LOCAL, router=router)


class Rig:
    """A scaled plan in a stand-in of Ray."""

    def __init__(self) -> None:
        self.ray = PlanRay(cluster(3))
        self.plan = scaled_plan()
        self.should_stop = threading.Event()
        self.placed = RayPlan(
            self.plan,
            LaunchOptions(None),
            "10.0.0.1:6379",
            self.should_stop,
            is_scaled=True,
            ray=self.ray,
            poll_seconds=TIMES.poll_seconds,
        )
        self.placed.start()

    async def follow(self, url: str) -> None:
        """Follow a router until the plan ends."""
        await follow_router(self.placed, self.plan, url, self.should_stop, TIMES)

    def started(self) -> list[str]:
        """Names of the actors so far."""
        return [actor["name"] for actor in self.ray.actors]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)


async def test_actors_of_engines_follow_the_decision(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, router = Rig(), ScriptedRouter()
    ray, placed = rig.ray, rig.placed
    urls: list[str] = []
    placed.wait_until_ready(urls.append)
    assert urls == [SERVING.url]
    assert rig.started() == ["router"]
    ray.states = {"a": STARTING, "b": INVALID}
    following = asyncio.create_task(rig.follow(router.url))
    router.decision = {**IDLE, "num_wanted": 2}
    # One that cannot run returns its resources and is started again.
    await rig.until(lambda: rig.started().count("b") >= 3)
    assert rig.started().count("a") == 1
    assert len(ray.removed) >= 2
    assert "engine b has ended before it was ready: it exited with 2" in caplog.text
    ray.states.clear()
    await rig.until(lambda: placed.running_engines == ["a", "b"])
    router.attached = {"a": "ready", "b": "ready"}
    num_removed, num_started = len(ray.removed), len(ray.actors)
    router.decision = {**IDLE, "num_wanted": 1, "drain": ["a"]}
    await rig.until(lambda: router.posts)
    assert router.posts[0] == "/engines/a/drain"
    assert not ray.drained
    router.attached["a"] = "draining"
    router.decision = {**IDLE, "num_wanted": 1, "removable": ["a"]}
    await rig.until(lambda: placed.running_engines == ["b"] and len(ray.removed) > num_removed)
    assert ray.drained == ["a"]
    assert ray.killed[-1].name == "a"
    # It can be started again.
    del router.attached["a"], ray.states["a"]
    router.decision = {**IDLE, "num_wanted": 2}
    await rig.until(lambda: sorted(placed.running_engines) == ["a", "b"])
    await rig.until(lambda: len(ray.actors) == num_started + 1)
    rig.should_stop.set()
    await following
    assert sorted(placed.running_engines) == ["a", "b"]
    placed.drain()
    assert ray.drained[1:] == ["router", "b", "a"]
    placed.close()
    assert len(ray.removed) == len(ray.killed) == len(ray.actors)
    router.server.shutdown()
    router.server.server_close()


async def test_an_engine_that_cannot_run_any_longer_is_removed_and_the_router_ends_all() -> None:
    rig, router = Rig(), ScriptedRouter()
    following = asyncio.create_task(rig.follow(router.url))
    router.decision = {**IDLE, "num_wanted": 1}
    await rig.until(lambda: rig.placed.running_engines == ["a"])
    router.attached["a"] = "ready"
    await rig.until(lambda: rig.placed.poll()[1:] == [SERVING])
    rig.ray.states["a"] = INVALID
    await rig.until(lambda: not rig.placed.running_engines)
    rig.ray.states["router"] = INVALID
    with pytest.raises(LaunchError, match="router: it exited with 2"):
        await following
    assert rig.should_stop.is_set()
    router.server.shutdown()
    router.server.server_close()


def test_engines_are_started_once_and_only_those_of_the_plan() -> None:
    rig = Rig()
    with pytest.raises(ValueError, match="has no engine 'router'"):
        rig.placed.start_engine("router")
    with pytest.raises(ValueError, match="does not run"):
        rig.placed.drain_engine("a")
    rig.placed.start_engine("a")
    with pytest.raises(ValueError, match="runs already"):
        rig.placed.start_engine("a")
    # Resources are not waited for when all shall end; those that were asked for are returned.
    rig.ray.num_waits = 10**6
    rig.should_stop.set()
    rig.placed.start_engine("b")
    assert rig.started() == ["router", "a"]
    rig.placed.close()
    assert len(rig.ray.removed) == 3


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore this process's handlers of the signals that end a plan."""
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in previous.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("plan", "drained"), [(LOCAL, ["router", "a", "b"]), (scaled_plan(), ["router"])]
)
def test_a_plan_ends_at_a_signal(
    handlers: None, plan: ServingPlan, drained: list[str], number: signal.Signals
) -> None:
    ray = PlanRay(cluster(3))
    run_plan(plan, LaunchOptions(None), None, lambda url: signal.raise_signal(number), ray, TIMES)
    assert ray.drained == drained
    assert not ray.is_initialized()
