"""Engines of a node follow a router's decision: choice of actions, and real processes."""

import asyncio
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from gllm.deploy.server_client import ServerClient
from gllm.deploy.up.engine_scaler import EngineActions, EngineScaler, choose_actions
from gllm.plan.processes import router_api_key, scaling_router_url
from gllm.plan.serving_plan import EnginePlan, NodePlan, RouterPlan, ServingPlan, StagePlan
from tests.deploy.up.test_engine_manager import FAIL, SERVE, Rig

ORDER = ("a", "b", "c")
IDLE: dict[str, Any] = {
    "is_leader": True, "num_wanted": 0, "drain": [], "undrain": [], "removable": [],
}  # fmt: skip


@pytest.mark.parametrize(
    ("own", "running", "attached", "decision", "expected"),
    [
        ("abc", "", {}, {"num_wanted": 2}, EngineActions(start=("a", "b"))),
        ("c", "", {}, {"num_wanted": 2}, EngineActions()),
        ("abc", "a", {}, {"num_wanted": 1}, EngineActions()),
        ("abc", "a", {"a": "loading"}, {"num_wanted": 2}, EngineActions(start=("b",))),
        # b never attaches: a replacement is wanted.
        ("abc", "ab", {"a": "ready"}, {"num_wanted": 3}, EngineActions(start=("c",))),
        ("abc", "ab", {"a": "ready", "b": "ready"}, {"num_wanted": 1, "drain": ["a"]},
         EngineActions(drain=("a",))),
        ("abc", "ab", {"a": "draining", "b": "ready"}, {"num_wanted": 1, "removable": ["a"]},
         EngineActions(stop=("a",))),
        ("abc", "a", {"a": "draining"}, {"num_wanted": 1, "undrain": ["a"]},
         EngineActions(undrain=("a",))),
        ("abc", "", {}, {"num_wanted": 3, "is_leader": False}, EngineActions()),
        # An engine of another node is left to it.
        ("a", "", {"b": "ready"}, {"num_wanted": 0, "drain": ["b"]}, EngineActions()),
    ],
)  # fmt: skip
def test_actions(own, running, attached, decision, expected) -> None:
    assert choose_actions(ORDER, own, running, attached, {**IDLE, **decision}) == expected


class ScriptedRouter:
    """A server of GET /engines whose answer the test sets."""

    def __init__(self) -> None:
        self.attached: dict[str, str] = {}
        self.decision: dict[str, Any] = {**IDLE}
        self.posts: list[str] = []
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                rows = [{"name": n, "state": s} for n, s in router.attached.items()]
                self._answer({"engines": rows, "scaling": router.decision})

            def do_POST(self) -> None:
                router.posts.append(self.path)
                self._answer({})

            def _answer(self, body: Any) -> None:
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()


async def test_processes_follow_the_decision() -> None:
    rig = Rig({"router": SERVE, "a": SERVE, "b": FAIL}, is_scaled=True)
    manager, router = rig.manager, ScriptedRouter()
    scaler = EngineScaler(
        manager,
        ServerClient(router.url),
        ["a", "b"],
        ["a", "b"],
        poll_seconds=0.02,
        retry_seconds=0.05,
    )
    run = asyncio.create_task(manager.run())
    following = asyncio.create_task(scaler.run())
    await rig.until(lambda: rig.ready)
    assert rig.ready == [["router"]]
    router.decision = {**IDLE, "num_wanted": 1}
    await rig.until(lambda: manager.running == ["router", "a"])
    router.attached["a"] = "ready"
    # An engine that dies at its start is started again, and ends nothing else.
    router.decision = {**IDLE, "num_wanted": 2}
    await rig.until(lambda: scaler.num_failures >= 2)
    assert {"router", "a"} <= set(manager.running)
    rig.scripts["b"] = SERVE
    await rig.until(lambda: "b" in manager.running and scaler.num_failures)
    router.attached["b"] = "ready"
    router.decision = {**IDLE, "num_wanted": 1, "drain": ["a"]}
    await rig.until(lambda: router.posts)
    assert router.posts[0] == "/engines/a/drain?scaling=true"
    router.attached["a"] = "draining"
    router.decision = {**IDLE, "num_wanted": 1, "removable": ["a"]}
    await rig.until(lambda: "a" not in manager.running)
    following.cancel()
    manager.stop()
    assert await run == 0
    router.server.shutdown()
    router.server.server_close()


def test_router_is_asked_with_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLLM_API_KEY", raising=False)
    flags: dict[str, Any] = {"scale": "0:2"}
    plan = ServingPlan(
        "demo",
        {"here": NodePlan("127.0.0.1")},
        {"a": EnginePlan([StagePlan("here", 6)])},
        router=RouterPlan("here", 8123, flags=flags),
    )
    assert scaling_router_url(plan) == "http://127.0.0.1:8123"
    assert router_api_key(plan) == ""
    monkeypatch.setenv("GLLM_API_KEY", "first, second")
    assert router_api_key(plan) == "first"
    flags["api-key"] = ["own"]
    assert router_api_key(plan) == "own"
    del flags["scale"]
    assert scaling_router_url(plan) == ""
