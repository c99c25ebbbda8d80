"""`gllm up --replan`: lengths that double lead to one search, and its plan serves under load."""

import asyncio
import random
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gllm.commands.plan.command import main
from gllm.deploy.logged_process import LocalProcess
from gllm.deploy.server_client import ServerClient
from gllm.deploy.up.engine_manager import EngineManager
from gllm.deploy.up.replanner import PlanSearch, Replanner
from gllm.plan.processes import LaunchOptions, commands_for
from gllm.plan.serving_plan import (
    EnginePlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
    read_plan,
)
from gllm.sim.costs.profile import StepSample, write_profile
from tests.e2e.test_up import FLAGS, free_block
from tests.sim.test_fitted import profile as make_profile
from tests.support.network.ports import free_ports
from tests.support.servers.plans import running_up

RATE = 6.0
"""Requests per second; one engine is predicted to sustain 9.9 of LENGTHS and 4.3 of twice that."""
LENGTHS = (40, 16)
"""Tokens of prompt and output before they double."""
WINDOW = 40
SLOWDOWN = 20.0
"""Predicted step time per step time of the made-up profile, so that some requests need two."""


def make_plan(folder: Path) -> ServingPlan:
    """Return the plan of a search for a rate of short requests, with free ports."""

    def slow(step: StepSample) -> StepSample:
        return msgspec.structs.replace(step, stages=[SLOWDOWN * each for each in step.stages])

    measured = make_profile([6])
    spans = [msgspec.structs.replace(span, step=slow(span.step)) for span in measured.spans]
    steps = [slow(step) for step in measured.steps]
    write_profile(
        msgspec.structs.replace(measured, steps=steps, spans=spans), folder / "profile.json"
    )
    path = folder / "plan.yaml"
    argv = ["--profile", str(folder / "profile.json"), "--cores", "2", "--checkpoint", "demo"]
    argv += ["--pp", "1", "--policies", "sarathi:512", "--max-num-seqs", "16", "--closed-form"]
    argv += ["--workload", "fixed:{},{}".format(*LENGTHS), "--rate", str(RATE), "--jobs", "1"]
    assert main(["search", *argv, "--output", str(path)]) == 0
    plan = read_plan(path)
    ports = free_ports("router", "hub")
    flags = {"hub": ports["hub"], "detect-shifts": True, "shift-window": WINDOW}
    return msgspec.structs.replace(
        plan,
        router=RouterPlan("local", ports["router"], "predict", flags=flags),
        engines={
            name: msgspec.structs.replace(each, flags=each.flags | FLAGS, port=free_block())
            for name, each in plan.engines.items()
        },
    )


class Load:
    """Requests at a rate, of lengths that the test changes."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.lengths = LENGTHS
        self.statuses: list[int] = []
        self._session = session
        self._url = url
        self._tasks: list[asyncio.Task[None]] = []

    async def run(self) -> None:
        """Send requests until this task is cancelled."""
        rng = random.Random(0)
        while True:
            prompt = [rng.randrange(300, 400) for _ in range(self.lengths[0])]
            self._tasks.append(asyncio.create_task(self._send(prompt, self.lengths[1])))
            await asyncio.sleep(1 / RATE)

    async def finish(self) -> None:
        """Wait for the requests that were sent."""
        await asyncio.gather(*self._tasks)

    async def _send(self, prompt: list[int], num_tokens: int) -> None:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
            await answer.read()
            self.statuses.append(answer.status)


async def get_state(session: aiohttp.ClientSession, url: str) -> tuple[dict[str, Any], list[str]]:
    """Return the workload that a router publishes, and its ready engines."""
    async with session.get(f"{url}/engines") as answer:
        body = await answer.json()
    names = sorted(row["name"] for row in body["engines"] if row["state"] == "ready")
    return body["workload"], names


async def wait_for_profile(session: aiohttp.ClientSession, url: str) -> None:
    """Wait until a router compares its requests with a profile."""
    while (await get_state(session, url))[0]["profile"] is None:
        await asyncio.sleep(0.2)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_lengths_that_double_start_a_second_engine_once(tmp_path: Path) -> None:
    plan = make_plan(tmp_path)
    assert list(plan.engines) == ["engine-0"]
    assert plan.router is not None
    url = f"http://127.0.0.1:{plan.router.port}"
    with running_up(plan, tmp_path, "--replan", "--replan-budget", "20") as up:
        await asyncio.to_thread(up.wait_until_ready)
        async with aiohttp.ClientSession() as session, asyncio.timeout(240):
            load = Load(session, url)
            running = asyncio.create_task(load.run())
            await wait_for_profile(session, url)
            # Further windows of the same lengths are no shift.
            await asyncio.sleep(3 * WINDOW / RATE)
            workload, names = await get_state(session, url)
            assert (workload["num_shifts"], names) == (0, ["engine-0"])
            load.lengths = (2 * LENGTHS[0], 2 * LENGTHS[1])
            while "is the running plan" not in up.log:
                assert up.process.poll() is None, up.log[-3000:]
                await asyncio.sleep(0.2)
            # The new lengths are the new profile.
            await asyncio.sleep(4 * WINDOW / RATE)
            running.cancel()
            await load.finish()
            workload, names = await get_state(session, url)
            assert (workload["num_shifts"], names) == (1, ["engine-0", "engine-1"]), up.log[-3000:]
        assert set(load.statuses) == {200}
        shift = workload["shift"]
        assert {"prompt tokens", "output tokens"} <= set(shift["quantities"])
        assert shift["after"]["prompt_tokens"] == 2 * LENGTHS[0]
        after = read_plan(tmp_path / "plan.shift-1.yaml")
        assert up.terminate() == 0
    assert not (tmp_path / "plan.shift-2.yaml").exists()
    assert after.engines["engine-0"] == plan.engines["engine-0"]
    assert after.expected is not None
    assert after.expected.rate == pytest.approx(RATE, rel=0.3)


class ScriptedSearch(PlanSearch):
    """Search that finds the plans of the test, one after the other."""

    def __init__(self, folder: Path, plans: list[ServingPlan]) -> None:
        self._folder = folder
        self._plans = plans

    async def run(self, lengths: str, rate: float) -> tuple[ServingPlan, Path]:
        """Return the next plan. See PlanSearch."""
        assert lengths.count("\n") > 2
        return self._plans.pop(0), self._folder / f"plan-{len(self._plans)}.yaml"


def make_phases(engines: dict[str, EnginePlan]) -> ServingPlan:
    """Return a plan of prefill and decode engines whose router detects shifts early."""
    ports = free_ports("router", "hub")
    flags = {"hub": ports["hub"], "detect-shifts": True, "shift-window": 10}
    return ServingPlan(
        "demo",
        {"here": NodePlan("127.0.0.1")},
        engines,
        router=RouterPlan("here", ports["router"], preset="distserve", flags=flags),
    )


def engine(role: str, **options: Any) -> EnginePlan:
    """Return an engine of the demo."""
    flags = FLAGS | options.pop("flags", {})
    return EnginePlan([StagePlan("here", 6)], role, flags=flags, port=free_block(), **options)


@pytest.mark.long
@pytest.mark.timeout(400)
async def test_flips_restarts_and_a_failed_change_lose_no_request(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "gllm")
    plan = make_phases({"p": engine("prefill"), "d0": engine("decode"), "d1": engine("decode")})
    assert plan.router is not None
    url = f"http://127.0.0.1:{plan.router.port}"
    few_seqs = engine("decode", scheduler={"max_num_seqs": 8})
    flipped = make_phases({"p0": engine("prefill"), "p1": engine("prefill"), "d": few_seqs})
    broken = make_phases({"p0": engine("prefill"), "p1": engine("prefill"), "d": few_seqs,
                          "x": engine("decode", flags={"max-model-len": 10**9})})  # fmt: skip
    options = LaunchOptions(num_cores=2)
    is_ready = asyncio.Event()
    manager = EngineManager(
        commands_for(plan, "here", options),
        lambda spec: LocalProcess(spec, lambda *_: None),
        lambda _: is_ready.set(),
    )
    replanner = Replanner(
        manager, ServerClient(url), plan, ["here"],
        lambda each: commands_for(each, "here", options),
        ScriptedSearch(tmp_path, [flipped, broken]),
    )  # fmt: skip
    running = asyncio.create_task(manager.run())
    following = asyncio.create_task(replanner.run())
    try:
        async with aiohttp.ClientSession() as session, asyncio.timeout(300):
            await is_ready.wait()
            load = Load(session, url)
            sending = asyncio.create_task(load.run())
            await wait_for_profile(session, url)
            load.lengths = (2 * LENGTHS[0], 2 * LENGTHS[1])
            while "is the running plan" not in caplog.text:
                await asyncio.sleep(0.2)
            assert "is applied: d0 becomes prefill, end d1, start d1" in caplog.text
            async with session.get(f"{url}/engines") as answer:
                rows = (await answer.json())["engines"]
            assert {row["name"]: row["role"] for row in rows} == {
                "p": "prefill", "d0": "prefill", "d1": "decode",
            }  # fmt: skip
            applied = replanner.plan
            await wait_for_profile(session, url)
            load.lengths = (4 * LENGTHS[0], LENGTHS[1])
            while "is taken back: the engine 'x' has ended before it was ready" not in caplog.text:
                assert not running.done(), manager.cause
                await asyncio.sleep(0.2)
            sending.cancel()
            await load.finish()
            assert set(load.statuses) == {200}
            assert replanner.plan == applied
            assert (await get_state(session, url))[1] == ["d0", "d1", "p"]
    finally:
        manager.stop()
        assert await running == 0, manager.cause
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
