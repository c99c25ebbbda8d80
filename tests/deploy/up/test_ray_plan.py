"""Actors of a plan, with a stand-in of Ray."""

import threading
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gllm.deploy.ray.manager import LaunchError
from gllm.deploy.up.ray_actor import ProcessActor, ProcessStatus, find_head
from gllm.deploy.up.ray_groups import ProcessTask
from gllm.deploy.up.ray_plan import RayPlan
from gllm.plan.processes import LaunchOptions
from gllm.plan.serving_plan import PlanError, ServingPlan
from tests.deploy.ray.test_manager import cluster
from tests.plan.test_processes import GPUS, LOCAL
from tests.support.nodes.fake_ray import FakeRay

SERVING = ProcessStatus("http://127.0.0.1:8100", True, False, False)
STARTING = ProcessStatus("http://127.0.0.1:8100", False, False, False)
INVALID = ProcessStatus("", False, True, True, "it exited with 2: no such model")


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

    def _drain(self, name: str) -> None:
        self.drained.append(name)
        if self.states.get(name, SERVING) is None:
            return
        self.ending[name] = self.num_polls
        self.states[name] = msgspec.structs.replace(SERVING, is_ready=False, has_ended=True)


def start(plan: ServingPlan = LOCAL, secret: str | None = None) -> tuple[RayPlan, PlanRay]:
    """Start the processes of a plan in a stand-in of Ray."""
    ray, should_stop = PlanRay(cluster(3)), threading.Event()
    options = LaunchOptions(secret)
    placed = RayPlan(plan, options, "10.0.0.1:6379", should_stop, ray=ray, poll_seconds=0.01)
    placed.start()
    return placed, ray


def test_router_and_engines_are_actors_that_ray_restarts() -> None:
    placed, ray = start()
    assert ray.address == "10.0.0.1:6379"
    assert [actor["name"] for actor in ray.actors] == ["router", "a", "b"]
    assert {actor["kind"] for actor in ray.actors} == {ProcessActor}
    assert [actor["options"]["max_restarts"] for actor in ray.actors] == [-1] * 3
    assert [actor["options"]["num_cpus"] for actor in ray.actors] == [1.0, 2.0, 1.0]
    placed.close()
    assert [actor.name for actor in ray.killed] == ["router", "a", "b"]
    assert len(ray.removed) == 3
    assert not ray.is_initialized()


def test_an_engine_of_several_nodes_is_spread_over_machines() -> None:
    _, ray = start(GPUS, "/secret")
    assert ray.strategy == "STRICT_SPREAD"
    assert [actor["name"] for actor in ray.actors] == ["router", "p0", "d0", "d0"]
    assert [actor["options"]["num_gpus"] for actor in ray.actors] == [0, 2.0, 2.0, 2.0]
    strategies = [actor["options"]["scheduling_strategy"] for actor in ray.actors]
    assert strategies == [("bundle", index) for index in (0, 0, 0, 1)]


def test_the_service_is_ready_when_all_its_processes_are() -> None:
    placed, ray = start()
    urls: list[str] = []
    ray.states = {"a": STARTING, "b": None}
    thread = threading.Thread(target=placed.wait_until_ready, args=(urls.append,))
    thread.start()
    thread.join(0.1)
    assert not urls
    ray.states.clear()
    thread.join(60)
    assert urls == [SERVING.url]


def test_a_process_that_cannot_run_is_the_cause() -> None:
    placed, ray = start()
    ray.states["b"] = INVALID
    with pytest.raises(LaunchError, match=r"engine b: it exited with 2: no such model"):
        placed.wait_until_ready(lambda url: None)
    # An actor that is lost comes back by itself.
    ray.states["b"] = None
    assert placed.poll()[2] is None


def test_the_router_is_drained_before_the_engines() -> None:
    placed, ray = start()
    placed.drain()
    assert ray.drained == ["router", "a", "b"]


def test_the_end_of_processes_is_waited_for_and_lost_actors_are_not() -> None:
    placed, ray = start()
    ray.states["b"], ray.num_polls = None, 3
    placed.drain()
    assert ray.ending == {"router": 0, "a": 0}


def test_a_plan_that_cannot_run_reserves_nothing() -> None:
    with pytest.raises(PlanError, match="router: missing"):
        start(msgspec.structs.replace(LOCAL, router=None))


def test_the_head_is_where_ray_has_placed_the_first_bundle() -> None:
    ray = cluster(3)
    ray.places = {0: ray.machines[1]["NodeID"], 1: ray.machines[2]["NodeID"]}
    assert find_head(ray, None) == "127.0.0.12"
    ray.places = {0: None}
    assert find_head(ray, None) is None
