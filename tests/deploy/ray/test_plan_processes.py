"""Actors of a plan, with a stand-in of Ray."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gllm.deploy.ray.plan_processes import (
    ProcessActor,
    ProcessStatus,
    ProcessTask,
    RayPlan,
    find_head,
)
from gllm.deploy.ray.ray_cluster import RayCluster
from gllm.deploy.up.engine_manager import EngineManager
from gllm.plan.processes import LaunchOptions
from gllm.plan.serving_plan import PlanError, ServingPlan
from tests.deploy.ray.test_agents import cluster
from tests.plan.test_processes import GPUS, LOCAL
from tests.support.nodes.fake_ray import FakeRay

SERVING = ProcessStatus(True, False, False)
STARTING = ProcessStatus(False, False, False)
INVALID = ProcessStatus(False, True, True, "it exited with 2: no such model")


class ActorLostError(Exception):
    """Stand-in of Ray's error."""


class PlanRay(FakeRay):
    """A cluster whose actors have the states of `states`, by the name of the process."""

    def __init__(self, fake: FakeRay) -> None:
        super().__init__(fake.machines, fake.own, fake.num_waits)
        self.states: dict[str, ProcessStatus | None] = {}
        self.drained: list[str] = []
        self.num_polls = 0
        """Polls that still find a process serving after it was drained."""
        self.ending: dict[str, int] = {}
        """Such polls that are left, by the name of a drained process."""
        self.strategies: list[str] = []
        """Strategies of all placement groups."""
        self.util.placement_group = self._create_named_group
        self.exceptions = SimpleNamespace(
            RayActorError=ActorLostError, GetTimeoutError=TimeoutError
        )

    def remote(self, kind: type) -> Any:
        def create(**options: Any) -> Any:
            def start(task: bytes, group: Any) -> Any:
                name = msgspec.json.decode(task, type=ProcessTask).name
                self.actors.append({"kind": kind, "options": options, "name": name})
                return SimpleNamespace(
                    name=name,
                    status=SimpleNamespace(remote=lambda: name),
                    drain=SimpleNamespace(remote=lambda: self._drain(name)),
                )

            return SimpleNamespace(remote=start)

        return SimpleNamespace(options=create)

    def get(self, value: Any, timeout: float | None = None) -> Any:
        state = self.states.get(value, SERVING)
        if state is None:
            raise ActorLostError
        if self.ending.get(value):
            self.ending[value] -= 1
            state = SERVING
        return msgspec.json.encode(state)

    def _create_named_group(self, bundles: list[dict[str, float]], strategy: str) -> Any:
        self.strategies.append(strategy)
        return self._create_group(bundles, strategy)

    def _drain(self, name: str) -> None:
        self.drained.append(name)
        if self.states.get(name, SERVING) is None:
            return
        self.ending[name] = self.num_polls
        self.states[name] = msgspec.structs.replace(SERVING, is_ready=False, has_ended=True)


class Rig:
    """A plan in a stand-in of Ray, and its manager."""

    def __init__(
        self, plan: ServingPlan = LOCAL, secret: str | None = None, is_scaled: bool = False
    ) -> None:
        self.ray = PlanRay(cluster(3))
        connection = RayCluster(self.ray, poll_seconds=0.01)
        connection.connect("10.0.0.1:6379")
        placed = RayPlan(plan, LaunchOptions(secret), connection)
        self.ready: list[str] = []
        self.manager = EngineManager(
            placed.specs,
            placed.launch,
            lambda specs: self.ready.append(specs[0].url),
            is_scaled,
            probe_seconds=0.01,
        )
        self.run = asyncio.create_task(self.manager.run())

    @property
    def started(self) -> list[str]:
        """Names of the actors so far."""
        return [actor["name"] for actor in self.ray.actors]

    @property
    def engines(self) -> list[str]:
        """Engines that run and shall not end."""
        return [name for name in self.manager.running if name != "router"]

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.01)

    async def stop(self) -> int:
        """End all processes; return the exit status."""
        self.manager.stop()
        return await self.run


async def test_router_and_engines_are_actors_that_ray_restarts() -> None:
    rig = Rig()
    ray = rig.ray
    await rig.until(lambda: rig.ready)
    assert ray.address == "10.0.0.1:6379"
    actors = {actor["name"]: actor for actor in ray.actors}
    assert sorted(rig.started) == sorted(actors) == ["a", "b", "router"]
    assert {actor["kind"] for actor in ray.actors} == {ProcessActor}
    assert [actor["options"]["max_restarts"] for actor in ray.actors] == [-1] * 3
    num_cpus = {name: actor["options"]["num_cpus"] for name, actor in actors.items()}
    assert num_cpus == {"router": 1.0, "a": 2.0, "b": 1.0}
    assert await rig.stop() == 0
    assert ray.killed[0].name == "router"
    assert sorted(actor.name for actor in ray.killed) == ["a", "b", "router"]
    assert len(ray.removed) == 3


async def test_processes_are_killed_if_the_event_loop_ends_before_them() -> None:
    rig = Rig()
    await rig.until(lambda: rig.ready)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await rig.run
    assert not rig.manager.running
    assert sorted(actor.name for actor in rig.ray.killed) == ["a", "b", "router"]


async def test_an_engine_of_several_nodes_is_spread_over_machines() -> None:
    rig = Rig(GPUS, "/secret")
    await rig.until(lambda: rig.ready)
    actors = sorted(rig.ray.actors, key=lambda actor: actor["name"])
    assert [actor["name"] for actor in actors] == ["d0", "d0", "p0", "router"]
    assert [actor["options"]["num_gpus"] for actor in actors] == [2.0, 2.0, 2.0, 0]
    strategies = [actor["options"]["scheduling_strategy"] for actor in actors]
    assert strategies == [("bundle", index) for index in (0, 1, 0, 0)]
    assert "STRICT_SPREAD" in rig.ray.strategies
    assert await rig.stop() == 0


async def test_the_service_is_ready_when_all_its_processes_are() -> None:
    rig = Rig()
    rig.ray.states = {"a": STARTING, "b": None}
    await asyncio.sleep(0.1)
    assert not rig.ready
    rig.ray.states.clear()
    await rig.until(lambda: rig.ready)
    assert rig.ready == ["http://127.0.0.11:8100"]
    assert await rig.stop() == 0


async def test_a_process_that_cannot_run_is_the_cause_and_a_lost_one_is_waited_for() -> None:
    rig = Rig()
    await rig.until(lambda: rig.ready)
    # An actor that is lost comes back by itself.
    rig.ray.states["b"] = None
    await asyncio.sleep(0.1)
    assert rig.engines == ["a", "b"]
    rig.ray.states["b"] = INVALID
    assert await rig.run == 1
    assert rig.manager.cause == "engine b: it exited with 2: no such model"


async def test_the_router_is_drained_before_the_engines() -> None:
    rig = Rig()
    await rig.until(lambda: rig.ready)
    assert await rig.stop() == 0
    assert rig.ray.drained == ["router", "a", "b"]


async def test_the_end_of_processes_is_waited_for_and_lost_actors_are_not() -> None:
    rig = Rig()
    await rig.until(lambda: rig.ready)
    rig.ray.states["b"], rig.ray.num_polls = None, 3
    assert await rig.stop() == 0
    assert rig.ray.ending == {"router": 0, "a": 0}


async def test_a_plan_that_cannot_run_reserves_nothing() -> None:
    with pytest.raises(PlanError, match="router: missing"):
        Rig(msgspec.structs.replace(LOCAL, router=None))


def test_the_head_is_where_ray_has_placed_the_first_bundle() -> None:
    ray = cluster(3)
    ray.places = {0: ray.machines[1]["NodeID"], 1: ray.machines[2]["NodeID"]}
    assert find_head(ray, None) == "127.0.0.12"
    ray.places = {0: None}
    assert find_head(ray, None) is None
