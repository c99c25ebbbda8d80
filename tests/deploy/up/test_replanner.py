"""A new plan after a shift: search, application to real processes, and its way back."""

import asyncio
import json
import logging
import shlex
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import pytest

from gllm.deploy.server_client import ServerClient
from gllm.deploy.up.replanner import (
    MAX_RETRY_SECONDS,
    RETRY_SECONDS,
    PlanSearch,
    ReplanAttempts,
    Replanner,
    ReplanTimes,
)
from gllm.plan.processes import ProcessSpec, router_url
from gllm.plan.search_command import (
    check_replannable,
    make_search_command,
    with_shift_detection,
)
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    read_plan,
    write_plan,
)
from tests.deploy.up.test_engine_manager import FAIL, SERVE, Rig

COPY = """
import shutil, sys
words = sys.argv[1:]
print("searches", *words, flush=True)
shutil.copy({source!r}, words[-1])
"""
"""Search that finds a plan which the test has written."""
FIRST = """
from pathlib import Path
marker = Path({marker!r})
is_first = not marker.exists()
marker.touch()
exec({script!r} if is_first else {then!r})
"""
"""Engine whose first start is another one than the later ones."""
HANG = "import time; time.sleep(600)"
LENGTHS = "prompt_tokens,output_tokens\n20,10\n"
BY = "gllm plan search --cores 2 --rate 2 --output plan.yaml"


def engine(role: str = "mixed", node: str = "here", **fields: Any) -> EnginePlan:
    """Return an engine on a CPU."""
    return EnginePlan([StagePlan(node, 6)], role, **fields)


def make_plan(
    engines: dict[str, EnginePlan] | None = None, port: int = 8000, by: str = BY
) -> ServingPlan:
    """Return a plan with a router."""
    return ServingPlan(
        "demo",
        {"here": NodePlan("127.0.0.1"), "there": NodePlan("127.0.0.2")},
        engines or {"a": engine()},
        router=RouterPlan("here", port),
        expected=ExpectedFigures(by, 2.0),
    )


class ScriptedRouter:
    """A router that shows the engines that run, and the workload that the test sets."""

    def __init__(self) -> None:
        self.running: Callable[[], Sequence[str]] = list
        self.roles: dict[str, str] = {}
        self.num_resets = 0
        """Times that it was to take a new profile."""
        self.workload: dict[str, Any] | None = None
        router = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path == "/workload":
                    self._answer(LENGTHS)
                    return
                rows = [
                    {"name": name, "state": "ready", "role": router.roles.get(name, "mixed")}
                    for name in router.running()
                ]
                self._answer(json.dumps({"engines": rows, "workload": router.workload}))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                if self.path == "/workload/profile":
                    router.num_resets += 1
                else:
                    router.roles[self.path.split("/")[2]] = json.loads(body)["role"]
                self._answer("{}")

            def _answer(self, text: str) -> None:
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *words: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def shift(self, number: int, is_leader: bool = True) -> None:
        """Publish a shift."""
        after = {"rate": 4.0, "prompt_tokens": 20.0, "output_tokens": 10.0}
        shift = {"quantities": ["prompt tokens"], "before": after, "after": after}
        self.workload = {"is_leader": is_leader, "num_shifts": number, "shift": shift}


class FollowedRig(Rig):
    """Processes of a plan, its router, and a search that finds the plan of the test."""

    def __init__(
        self,
        folder: Path,
        router: ScriptedRouter,
        /,
        start_seconds: float = 60.0,
        search_seconds: float | None = None,
        retry_seconds: float = 60.0,
        nodes: Sequence[str] = ("here",),
        **engines: EnginePlan,
    ) -> None:
        super().__init__({"router": SERVE, **dict.fromkeys(engines, SERVE)})
        self.plan = make_plan(engines, router.server.server_port)
        self.router = router
        router.running = lambda: self.engines
        self.found = folder / "found.yaml"
        self.search_script = COPY.format(source=str(self.found))
        search = PlanSearch(
            self.plan,
            folder / "plan.yaml",
            5.0,
            self.on_line,
            self.make_search_command,
            search_seconds,
        )
        times = ReplanTimes(0.02, 0.02, start_seconds=start_seconds, retry_seconds=retry_seconds)
        self.replanner = Replanner(
            self.manager,
            ServerClient(router_url(self.plan)),
            self.plan,
            nodes,
            self.make_specs,
            search,
            times,
        )

    @property
    def engines(self) -> list[str]:
        return [name for name in self.manager.running if name != "router"]

    def find(self, **engines: EnginePlan) -> None:
        """Set the plan that the next search finds; its engines serve unless they have scripts."""
        write_plan(make_plan(engines), self.found)
        self.scripts = {**dict.fromkeys(engines, SERVE), **self.scripts}

    def make_search_command(self, arguments: list[str]) -> Sequence[str]:
        return [sys.executable, "-S", "-c", self.search_script, *arguments]

    def make_specs(self, plan: ServingPlan) -> list[ProcessSpec]:
        return [self.make_spec(name) for name in ("router", *plan.engines)]

    @asynccontextmanager
    async def run(self, status: int = 0) -> AsyncIterator[None]:
        """Run processes and follower until the block ends; check the exit status."""
        run = asyncio.create_task(self.manager.run())
        await self.until(lambda: self.ready)
        following = asyncio.create_task(self.replanner.run())
        try:
            yield
        finally:
            self.manager.stop()
            ended_with = await run
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        assert ended_with == status


@pytest.fixture
def router() -> Iterator[ScriptedRouter]:
    router = ScriptedRouter()
    yield router
    router.server.shutdown()
    router.server.server_close()


@pytest.fixture(autouse=True)
def all_messages(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gllm")


async def test_each_shift_is_one_search_whose_plan_is_applied(
    tmp_path: Path, router: ScriptedRouter
) -> None:
    rig = FollowedRig(tmp_path, router, p=engine("prefill"), d0=engine("decode"),
                      d1=engine("decode"))  # fmt: skip
    router.roles = {"p": "prefill", "d0": "decode", "d1": "decode"}
    two_stages = EnginePlan([StagePlan("here", 3), StagePlan("here", 3)])
    rig.find(p0=engine("prefill"), p1=engine("prefill"), m=two_stages)
    async with rig.run():
        router.shift(1, is_leader=False)
        await asyncio.sleep(0.2)
        assert rig.replanner.num_searches == 0
        router.shift(1)
        await rig.until(lambda: "m" in rig.replanner.plan.engines)
        # One stays, one flips, one is replaced.
        assert rig.engines == ["p", "d0", "m"]
        assert router.roles["d0"] == "prefill"
        assert [name for name, line in rig.lines if line == "ends"] == ["d1"]
        await asyncio.sleep(0.2)
        assert rig.replanner.num_searches == 1
        before = rig.replanner.plan
        router.shift(2)
        await rig.until(lambda: rig.replanner.plan is not before)
        assert rig.replanner.num_searches == 2
    assert rig.replanner.plan.engines == read_plan(tmp_path / "plan.shift-2.yaml").engines
    # The second plan has changed no engine, but it is the plan of the new workload.
    assert router.num_resets == 2
    assert set(read_plan(tmp_path / "plan.shift-1.yaml").engines) == {"p", "d0", "m"}
    assert (tmp_path / "plan.shift-1.csv").read_text() == LENGTHS
    (words, _) = [line.split()[1:] for name, line in rig.lines if name == "search"]
    assert words[-8:] == [
        "--workload", f"file:{tmp_path}/plan.shift-1.csv", "--budget", "5", "--rate", "4",
        "--output", f"{tmp_path}/plan.shift-1.yaml",
    ]  # fmt: skip


@pytest.mark.parametrize("script", [FAIL, pytest.param(HANG, marks=pytest.mark.full)])
async def test_an_engine_that_does_not_come_takes_the_change_back(
    tmp_path: Path,
    router: ScriptedRouter,
    script: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = FollowedRig(
        tmp_path,
        router,
        start_seconds=2.0,
        a=engine("prefill"),
        b=engine(flags={"threads": 1}),
    )
    router.roles = {"a": "prefill"}
    rig.find(a=engine("decode"), b=engine(flags={"threads": 2}))
    before = rig.replanner.plan
    async with rig.run():
        rig.scripts["b"] = FIRST.format(marker=str(tmp_path / "began"), script=script, then=SERVE)
        router.shift(1)
        await rig.until(lambda: "is taken back" in caplog.text)
        await rig.until(lambda: rig.engines == ["a", "b"] and router.roles["a"] == "prefill")
    assert "is applied: a becomes decode, end b, start b" in caplog.text
    assert rig.replanner.plan == before
    cause = "it exited with 1: no memory" if script == FAIL else "was not ready after 2.0 s"
    assert cause in caplog.text


async def test_a_machine_can_be_several_nodes(tmp_path: Path, router: ScriptedRouter) -> None:
    """As with a plan for GPUs that is emulated here."""
    rig = FollowedRig(tmp_path, router, nodes=("here", "there"), a=engine())
    rig.find(a=engine(), b=engine(node="there"))
    async with rig.run():
        router.shift(1)
        await rig.until(lambda: router.num_resets == 1)
        assert rig.engines == ["a", "b"]


async def test_a_plan_that_cannot_be_restored_ends_all(
    tmp_path: Path, router: ScriptedRouter
) -> None:
    rig = FollowedRig(tmp_path, router, a=engine(), b=engine())
    rig.find(a=engine(scheduler={"policy": "vllm"}), b=engine())
    async with rig.run(status=1):
        rig.scripts = {**rig.scripts, "a": FAIL, "b": FAIL}
        router.shift(1)
        await rig.until(lambda: rig.manager.cause)
    assert "plan.shift-1.yaml could not be restored: the engine" in rig.manager.cause
    assert "it exited with 1: no memory" in rig.manager.cause


@pytest.mark.parametrize(
    ("script", "engines", "words"),
    [
        (FAIL, {}, "no new plan: it exited with 1: no memory"),
        ("", {}, "no new plan: it has written no plan"),
        (HANG, {}, "no new plan: it has not ended after 0.5 s"),
        (COPY, {"a": engine(), "b": engine(node="there")},
         "plan.shift-1.yaml is not applied: engines.b: it would have to start or to end on there"),
    ],
)  # fmt: skip
async def test_the_running_plan_stays_without_a_plan_that_fits(
    script: str,
    engines: dict[str, EnginePlan],
    words: str,
    tmp_path: Path,
    router: ScriptedRouter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig = FollowedRig(tmp_path, router, search_seconds=0.5 if script == HANG else None, a=engine())
    rig.find(**engines)
    rig.search_script = script.format(source=str(rig.found)) if script == COPY else script
    async with rig.run():
        router.shift(1)
        await rig.until(lambda: words in caplog.text)
        assert rig.engines == ["a"]
    assert rig.replanner.num_searches == 1
    assert router.num_resets == 0, "the profile is that of the running plan"


async def test_a_failed_search_is_repeated_until_a_plan_is_adopted(
    tmp_path: Path, router: ScriptedRouter, caplog: pytest.LogCaptureFixture
) -> None:
    rig = FollowedRig(tmp_path, router, retry_seconds=0.01, a=engine())
    rig.find(a=engine(), b=engine())
    then = rig.search_script
    rig.search_script = FIRST.format(marker=str(tmp_path / "began"), script=FAIL, then=then)
    async with rig.run():
        router.shift(1)
        await rig.until(lambda: rig.engines == ["a", "b"] and router.num_resets)
    assert "no new plan: it exited with 1: no memory" in caplog.text
    assert rig.replanner.num_searches == 2
    assert router.num_resets == 1


def test_attempts_are_due_after_a_shift_and_after_failures_with_longer_delays() -> None:
    attempts = ReplanAttempts()
    attempts.on_status(0, 0.0)
    assert not attempts.is_due(1e9)
    attempts.on_status(1, 100.0)
    now, delays = 100.0, []
    for _ in range(12):
        assert attempts.is_due(now)
        delays.append(attempts.on_failure(now))
        assert not attempts.is_due(now + delays[-1] - 0.001)
        attempts.on_status(1, now)
        now += delays[-1]
    assert delays[:3] == [RETRY_SECONDS, 2 * RETRY_SECONDS, 4 * RETRY_SECONDS]
    assert delays[-1] == MAX_RETRY_SECONDS
    # A further shift is a new reason.
    attempts.on_status(2, now - 1.0)
    assert attempts.is_due(now - 1.0)
    assert attempts.on_failure(now) == RETRY_SECONDS
    attempts.on_adopted()
    attempts.on_status(2, now)
    assert not attempts.is_due(1e9)
    # The router has started again.
    attempts.on_status(0, now)
    assert not attempts.is_due(1e9)
    attempts.on_status(1, now)
    assert attempts.is_due(now)


def test_a_router_that_has_started_again_has_no_workload_to_plan_for() -> None:
    attempts = ReplanAttempts()
    attempts.on_status(1, 0.0)
    due = attempts.on_failure(0.0)
    attempts.on_status(0, due)
    assert not attempts.is_due(due), "its status has no shift"
    attempts.on_status(1, due)
    assert attempts.is_due(due)


def test_a_search_may_take_a_multiple_of_its_budget(tmp_path: Path) -> None:
    search = PlanSearch(make_plan(), tmp_path / "plan.yaml", 5.0, lambda name, line: None)
    assert search.limit_seconds == 3 * 5.0 + 120.0


def test_search_commands_repeat_those_of_the_plan() -> None:
    def command(by: str) -> str:
        plan = make_plan(by=by)
        check_replannable(plan)
        return shlex.join(make_search_command(plan, Path("w.csv"), 2.5, Path("p.yaml"), 60))

    added = "--workload file:w.csv --budget 60"
    assert command("gllm plan goodput --rate=3 --slo 'ttft=1,tpot=1'") == (
        f"plan goodput --rate=3 --slo ttft=1,tpot=1 {added} --rate 2.5 --output p.yaml"
    )
    # A command without a rate is one for all devices.
    assert command("gllm plan goodput") == f"plan goodput {added} --output p.yaml"
    assert command("gllm plan hetero --cluster c") == (
        f"plan hetero --cluster c {added} --output p.yaml"
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"router": None}, "router: none"),
        ({"router": RouterPlan("here", flags={"scale": "0:2"})}, "router.flags.scale: a router"),
        ({"router": RouterPlan("here", preset="flow", flags={"routes": "a:b=1"})},
         "router.preset: flow: its flows are fixed .* remove --replan, or make the plan by `gllm"),
        ({"expected": None}, "expected.by: '': --replan repeats"),
        ({"expected": ExpectedFigures("gllm plan capacity", 1.0)}, "expected.by: 'gllm plan cap"),
        ({"expected": ExpectedFigures("by 'hand", 1.0)}, "expected.by: No closing quotation"),
        ({"expected": ExpectedFigures("gllm plan search --config f", 1.0)},
         "expected.by: --config may have the rate"),
    ],
)  # fmt: skip
def test_plans_that_cannot_follow_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        check_replannable(msgspec.structs.replace(make_plan(), **fields))


def test_the_router_of_a_plan_that_follows_detects_shifts() -> None:
    plan = make_plan()
    flags = {"shift-window": 20, "detect-shifts": False}
    plan = msgspec.structs.replace(plan, router=RouterPlan("here", flags=flags))
    detecting = with_shift_detection(plan).router
    assert detecting is not None
    assert detecting.flags == {"shift-window": 20, "detect_shifts": True}
