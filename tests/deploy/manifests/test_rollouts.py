"""Every probe of the manifests in deploy/ in a model of a rolling update, asked of the real routes.

The model has what Kubernetes decides: when a container has started, is restarted or ready, and
which pod of a Deployment or a StatefulSet is replaced next. A pod's server loads, is attached by a
router some time later if it has routers, and drains at its end.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import ceil, floor
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gllm.config.server import ServerConfig
from gllm.engine.interface import EngineUnavailableError
from gllm.frontend.context import CONTEXT, ServerContext
from gllm.frontend.routes.server import get_health, get_readiness
from gllm.text.tokenizer import Tokenizer
from tests.frontend.test_engines import ScriptedFleet
from tests.support.http.fake_engine import FakeEngine
from tests.support.sources import ROOT
from tests.support.text import tokenizers

LOAD_SECONDS = 90
"""Time for which a server loads its model."""
ATTACH_SECONDS = 40
"""Time after which a router has attached a loaded engine: two attempts after a refusal."""
DRAIN_SECONDS = 30
TOKENIZER = Tokenizer(tokenizers.byte_level())
ROUTES = {"/health": get_health, "/ready": get_readiness}


def is_good(path: str, engine: FakeEngine) -> bool:
    """Return the answer of a server's route to a probe."""
    context: Any = ServerContext(engine, ServerConfig(), None)  # type: ignore[arg-type]
    request: Any = SimpleNamespace(app={CONTEXT: context})
    try:
        asyncio.run(ROUTES[path](request))
    except EngineUnavailableError:
        return False
    return True


@dataclass
class Pod:
    """A pod and its server."""

    container: Any
    attach_seconds: float
    """Infinite if routers refuse the engine."""
    age: int = 0
    ending: int = 0
    """Seconds since the SIGTERM; 0 before."""
    has_started: bool = False
    is_ready: bool = False
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(ROUTES, 0))
    num_restarts: int = 0

    @property
    def serves(self) -> bool:
        """True if users' requests run on it."""
        return self.age >= LOAD_SECONDS + self.attach_seconds and not self.ending

    def engine(self) -> FakeEngine:
        """Return what the routes see of the server."""
        arguments = self.container["args"]
        is_router = arguments[1] == "router"
        state = "ready" if self.age >= LOAD_SECONDS else "loading"
        if is_router and not self.serves:
            state = "recovering"
        engine = FakeEngine(TOKENIZER, state="draining" if self.ending else state)
        if is_router:
            engine.fleet = ScriptedFleet()
        elif "--router" in arguments and not self.serves:
            engine.num_routers, engine.unattached_cause = 0, "no router has attached the engine"
        return engine

    def tick(self) -> None:
        """Let a second pass."""
        self.age += 1
        self.ending += bool(self.ending)
        engine = self.engine()
        if not self.has_started:
            probe = self.container.get("startupProbe")
            self.has_started = probe is None or self._probe("startup", probe, engine) is True
        if self.has_started:
            self._probe("liveness", self.container["livenessProbe"], engine)
            if self.age % self.container["readinessProbe"]["periodSeconds"] == 0:
                path = self.container["readinessProbe"]["httpGet"]["path"]
                self.is_ready = is_good(path, engine)
        self.is_ready = self.is_ready and not self.ending

    def _probe(self, name: str, probe: Any, engine: FakeEngine) -> bool | None:
        """Return the result of a probe if one is due; too many failures restart the container."""
        if self.age % probe["periodSeconds"]:
            return None
        if is_good(probe["httpGet"]["path"], engine):
            self.failures[name] = 0
            return True
        self.failures[name] = self.failures.get(name, 0) + 1
        if self.failures[name] >= probe.get("failureThreshold", 3):
            self.num_restarts += 1
        return False


class Rollout:
    """A rolling update of a Deployment, or of the pods of a StatefulSet or LeaderWorkerSet."""

    def __init__(self, manifest: Any, new_attach_seconds: float) -> None:
        spec = manifest["spec"]
        self.num_replicas = spec.get("replicas", 1)
        if manifest["kind"] == "Deployment":
            limits = spec.get("strategy", {}).get("rollingUpdate", {})
            self.surge = self._number(limits.get("maxSurge", "25%"), ceil)
            self.unavailable = self._number(limits.get("maxUnavailable", "25%"), floor)
        else:
            # One pod at a time, without a further one.
            self.surge, self.unavailable = 0, 1
        template = spec.get("template") or spec["leaderWorkerTemplate"]["leaderTemplate"]
        (self.container,) = template["spec"]["containers"]
        self.attach_seconds = new_attach_seconds
        self.old = [Pod(self.container, 0.0, age=1000, has_started=True, is_ready=True)
                    for _ in range(self.num_replicas)]  # fmt: skip
        self.new: list[Pod] = []
        self.seconds = 0
        self.least_serving = self.num_replicas

    def _number(self, limit: int | str, rounding: Callable[[float], int]) -> int:
        if isinstance(limit, int):
            return limit
        return rounding(self.num_replicas * int(limit.removesuffix("%")) / 100)

    @property
    def is_over(self) -> bool:
        return not self.old and all(pod.is_ready for pod in self.new)

    @property
    def num_restarts(self) -> int:
        return sum(pod.num_restarts for pod in self.old + self.new)

    def run(self, seconds: int) -> None:
        while not self.is_over and self.seconds < seconds:
            self.step()

    def step(self) -> None:
        """Let a second pass: replace pods as the limits permit, then ask all probes."""
        self.seconds += 1
        living = [pod for pod in self.old if not pod.ending]
        num_total = len(living) + len(self.new)
        missing = self.num_replicas - len(self.new)
        for _ in range(min(missing, self.num_replicas + self.surge - num_total)):
            self.new.append(Pod(self.container, self.attach_seconds))
        num_ready = sum(pod.is_ready for pod in living + self.new)
        for pod in living[: max(0, num_ready - (self.num_replicas - self.unavailable))]:
            pod.ending = 1
        for pod in self.old + self.new:
            pod.tick()
        self.old = [pod for pod in self.old if pod.ending <= DRAIN_SECONDS]
        self.least_serving = min(self.least_serving, sum(p.serves for p in self.old + self.new))


def workloads() -> list[Any]:
    paths = [*sorted((ROOT / "deploy").glob("kubernetes*.yaml")), ROOT / "deploy" / "lws.yaml"]
    objects = [(path.name, each) for path in paths for each in yaml.safe_load_all(path.read_text())]
    kinds = ("Deployment", "StatefulSet", "LeaderWorkerSet")
    return [
        pytest.param(each, id=f"{name}-{each['metadata']['name']}")
        for name, each in objects
        if each["kind"] in kinds
    ]


@pytest.mark.parametrize("manifest", workloads())
def test_a_rolling_update_ends_and_keeps_what_serves(manifest: Any) -> None:
    is_behind_router = "--router" in Rollout(manifest, 0.0).container["args"]
    rollout = Rollout(manifest, ATTACH_SECONDS if is_behind_router else 0.0)
    rollout.run(3600)
    assert rollout.is_over
    assert rollout.num_restarts == 0
    assert rollout.least_serving >= rollout.num_replicas - rollout.unavailable


def test_engines_that_no_router_attaches_replace_none_that_serve() -> None:
    (manifest,) = [
        each.values[0] for each in workloads() if each.id == "kubernetes-router.yaml-gllm-engine"
    ]
    rollout = Rollout(manifest, float("inf"))
    rollout.run(1800)
    assert not rollout.is_over
    assert rollout.least_serving == rollout.num_replicas
    assert rollout.num_restarts == 0
