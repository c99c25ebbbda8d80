"""Endpoints and metrics of a router's engines."""

from dataclasses import dataclass, field

import pytest

from gllm.engine.fleet_control import (
    EngineRow,
    RouterTotals,
    ScaleStatus,
    UnknownEngineError,
    WorkloadMeans,
    WorkloadShiftStatus,
    WorkloadStatus,
)
from gllm.scheduler.plan import SchedulerStats
from tests.frontend.conftest import serving


def row(name: str, state: str = "ready") -> EngineRow:
    """An engine's row."""
    stats = SchedulerStats(
        running=3, waiting=1, kv_usage=0.5, prefix_queries=40, prefix_hits=20, decode_tokens=50
    )
    return EngineRow(
        name=name, role="mixed", state=state, cause="", address="127.0.0.1:1", version="1",
        attached_seconds=5.0, silent_seconds=0.1, stats=stats.to_numbers(), num_kv_blocks=64,
        block_size=16, num_stages=2, num_requests=2, num_dispatched=7, weight=1.0,
        has_kv_transfer=False,
    )  # fmt: skip


@dataclass
class ScriptedWorkload:
    """Requests whose lengths have doubled; none if the router does not watch them."""

    is_on: bool = True

    def status(self) -> WorkloadStatus | None:
        before, after = WorkloadMeans(2.0, 10.0, 5.0), WorkloadMeans(2.0, 20.0, 10.0)
        shift = WorkloadShiftStatus(["prompt tokens", "output tokens"], before, after)
        return WorkloadStatus(True, 1200, 1, None, shift) if self.is_on else None

    def lengths(self) -> list[tuple[int, int]] | None:
        return [(19, 9), (21, 11)] if self.is_on else None

    def reset_profile(self) -> bool:
        return self.is_on


@dataclass
class ScriptedFleet:
    """Two engines, and what was done to them."""

    done: list[object] = field(default_factory=list)
    workload: ScriptedWorkload = field(default_factory=ScriptedWorkload)

    @property
    def roles(self) -> "ScriptedFleet":
        return self

    @property
    def scaling(self) -> "ScriptedFleet":
        return self

    def status(self) -> ScaleStatus:
        return ScaleStatus(True, 3, ["b"], [], [], 2.5, 1.0, 20.0)

    def set_role(self, name: str, role: str) -> str:
        self.undrain_engine(name)
        self.done[-1] = (name, role)
        return "mixed"

    def engines(self) -> list[EngineRow]:
        return [row("a"), row("b", "draining")]

    def totals(self) -> RouterTotals:
        counts = (4, 7, 0.25, {"lost": 2}, 6, 0.5, {"drained": 1}, 0, 5, {"rejected": 3}, 0, 9)
        return RouterTotals("predict", *counts, "", "", False, {}, "by-prompt", [])

    def drain_engine(self, name: str, migrates: bool, is_scaling: bool = False) -> int:
        if name not in ("a", "b"):
            raise UnknownEngineError(f"no engine is named {name!r}")
        self.done.append((name, migrates, is_scaling) if is_scaling else (name, migrates))
        return 2

    def undrain_engine(self, name: str) -> None:
        self.drain_engine(name, False)


@pytest.fixture
def fleet(engine) -> ScriptedFleet:
    engine.fleet = ScriptedFleet()
    return engine.fleet


async def get(server, path):
    async with server.client.get(path) as response:
        return response.status, await response.json()


async def test_engines_are_listed(engine, fleet):
    async with serving(engine) as server:
        status, body = await get(server, "/engines")
    assert status == 200
    assert [(each["name"], each["state"]) for each in body["engines"]] == [
        ("a", "ready"),
        ("b", "draining"),
    ]
    assert body["engines"][0]["stats"]["running"] == 3
    assert (body["router"]["num_parked"], body["router"]["migrations"]) == (4, {"lost": 2})
    assert (body["scaling"]["num_wanted"], body["scaling"]["drain"]) == (3, ["b"])


async def test_workload_is_published_and_its_lengths_are_a_file(engine, fleet):
    async with serving(engine) as server:
        _, body = await get(server, "/engines")
        assert body["workload"]["num_shifts"] == 1
        assert body["workload"]["shift"]["after"]["prompt_tokens"] == 20.0
        async with server.client.get("/workload") as response:
            assert response.content_type == "text/csv"
            assert await response.text() == "prompt_tokens,output_tokens\n19,9\n21,11\n"
        assert (await server.post("/workload/profile", {})).json == {"status": "ok"}
        fleet.workload.is_on = False
        assert (await server.post("/workload/profile", {})).error["code"] == "no_workload"
        _, body = await get(server, "/engines")
        assert body["workload"] is None
        status, body = await get(server, "/workload")
        assert (status, body["error"]["code"]) == (404, "no_workload")


async def test_drain_and_undrain(engine, fleet):
    async with serving(engine) as server:
        answer = await server.post("/engines/a/drain", {})
        assert (answer.status, answer.json["num_requests"]) == (200, 2)
        assert (await server.post("/engines/b/drain?migrate=true", {})).status == 200
        assert (await server.post("/engines/b/undrain", {})).status == 200
        answer = await server.post("/engines/a/drain?migrate=maybe", {})
        assert (answer.status, answer.error["param"]) == (400, "migrate")
        assert (await server.post("/engines/a/drain?scaling=true", {})).status == 200
        for action in ("drain", "undrain"):
            answer = await server.post(f"/engines/c/{action}", {})
            assert (answer.status, answer.error["code"]) == (404, "engine_not_found")
    assert fleet.done == [("a", False), ("b", True), ("b", False), ("a", False, True)]


async def test_roles_of_engines_are_changed(engine, fleet):
    async with serving(engine) as server:
        answer = await server.post("/engines/a/role", {"role": "decode"})
        assert answer.json == {"name": "a", "role": "decode", "previous_role": "mixed"}
        answer = await server.post("/engines/c/role", {"role": "decode"})
        assert (answer.status, answer.error["code"]) == (404, "engine_not_found")
        for body in ({"role": "idle"}, {}):
            answer = await server.post("/engines/a/role", body)
            assert (answer.status, answer.error["param"]) == (400, "role")
    assert fleet.done == [("a", "decode")]


async def test_roles_are_switched_in_the_form_of_sglang(engine, fleet):
    async with serving(engine) as server:
        for url in ("b", "http://b/"):
            body = {"worker_url": url, "new_role": "prefill", "drain_timeout_secs": 5}
            answer = await server.post("/pd_role_switch", body)
            # Both engines of the fleet have one address, so only the name is clear.
            assert answer.status == (200 if url == "b" else 400)
        answer = await server.post("/pd_role_switch", {"new_role": "prefill"})
        assert (answer.status, answer.error["code"]) == (400, "role_switch_refused")
        answer = await server.post("/pd_role_switch", {"worker_url": "b", "new_role": "mixed"})
        assert answer.json["message"] == "already in target role"
    assert fleet.done == [("b", "prefill"), ("b", "mixed")]


async def test_an_engine_with_routers_switches_its_own_role(engine):
    async with serving(engine) as server:
        answer = await server.post("/pd_role_switch", {"new_role": "decode"})
        assert (answer.status, answer.error["code"]) == (400, "role_switch_refused")
        assert "no routers" in answer.error["message"]
        engine.role, engine.has_routers = "prefill", True
        answer = await server.post("/pd_role_switch", {"new_role": "decode"})
        assert answer.json == {
            "success": True, "message": "ok", "old_role": "prefill", "new_role": "decode",
        }  # fmt: skip
        assert engine.role == "decode"
        answer = await server.post("/pd_role_switch", {"new_role": "both"})
        assert (answer.status, answer.error["param"]) == (400, "new_role")


async def test_an_engine_is_no_router(server):
    for path in ("/engines/a/drain", "/engines/a/undrain"):
        assert (await server.post(path, {})).error["code"] == "not_a_router"
    answer = await server.post("/engines/a/role", {"role": "decode"})
    assert answer.error["code"] == "not_a_router"
    assert (await get(server, "/engines"))[1]["error"]["code"] == "not_a_router"


async def test_metrics_of_a_router(engine, fleet):
    async with serving(engine) as server, server.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    model = f'model_name="{engine.model.name}"'
    for line in (
        f'gllm:router_engines{{{model},state="ready"}} 1.0',
        f'gllm:router_engines{{{model},state="ejected"}} 0.0',
        f'gllm:router_engine_up{{engine="b",{model}}} 0.0',
        f'gllm:router_engine_running{{engine="a",{model}}} 3.0',
        f'gllm:router_engine_state{{engine="b",{model},state="draining"}} 1.0',
        f'gllm:router_engine_prefix_cache_hits_total{{engine="a",{model}}} 20.0',
        f'gllm:router_engine_decode_tokens_total{{engine="a",{model}}} 50.0',
        f'gllm:router_dispatched_requests_total{{engine="a",{model}}} 7.0',
        f'gllm:router_migrations_total{{cause="lost",{model}}} 2.0',
        f'gllm:router_migrations_total{{cause="drained",{model}}} 0.0',
        f"gllm:router_parked_requests{{{model}}} 4.0",
        f"gllm:router_stale_outputs_total{{{model}}} 9.0",
    ):
        assert line in lines


async def test_a_router_without_engines_is_not_ready_and_says_why(engine, fleet):
    engine.state, engine.recovery_cause = "recovering", "no engine is attached"
    engine.recovering_since, engine.is_recovery_overdue = 0.0, True
    async with serving(engine) as server:
        assert (await get(server, "/health"))[0] == 200
        status, body = await get(server, "/ready")
        assert (status, body["error"]["code"]) == (503, "engine_no_engines")
        assert body["error"]["message"] == "no engine is attached"
        answer = await server.complete()
        dropped = answer.headers["x-llm-d-request-dropped-reason"]
        assert (answer.status, dropped) == (503, "rejected-no-endpoints")
