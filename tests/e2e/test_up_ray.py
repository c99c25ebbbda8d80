"""`gllm up --on ray`: engines and a router on raylets of this machine."""

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.engine.llm import LLM
from gllm.plan.serving_plan import ServingPlan, write_plan
from tests.e2e.test_up import local_plan
from tests.support.nodes.raylets import Raylets, find_processes, start_raylets
from tests.support.servers.plans import UpProcess
from tests.support.servers.server import DEADLINE, Server, alive, wait_until

START_SECONDS = 280.0
PROMPTS = [f"{name} said" for name in ("Otto", "The owl", "A fox", "Emma")]
NUM_TOKENS = 900


def parent(pid: int) -> int:
    """Id of the process that has started a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("PPid:")))


def processes(raylets: Raylets, title: str) -> list[int]:
    """Processes of the actors, by their title."""
    return [
        pid
        for raylet in raylets.raylets
        for group in raylet.all_processes.values()
        for each in group
        for pid in find_processes(each.process.pid, title)
    ]


class RouterOfPlan(Server):
    """The router of a plan, which another process has started."""

    def __init__(self, plan: ServingPlan, host: str) -> None:
        assert plan.router is not None
        self.url = f"http://{host}:{plan.router.port}"
        self._tls = None

    def fleet(self) -> dict[str, Any]:
        """The answer of /engines."""
        with self.open("/engines", None) as answer:
            fleet: dict[str, Any] = json.load(answer)
        return fleet

    def engines(self) -> dict[str, str]:
        """State of each engine by name."""
        return {row["name"]: row["state"] for row in self.fleet()["engines"]}


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_actor_that_is_killed_comes_back_and_no_request_is_lost(tmp_path: Path) -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS)
    with LLM("demo", progress=False, threads=1, device="cpu", dtype="float32") as llm:
        expected = [output.outputs[0].text for output in llm.generate(PROMPTS, params)]
    plan = local_plan("a", "b")
    write_plan(plan, tmp_path / "plan.yaml")
    with start_raylets(3) as raylets:
        flags = ("--on", "ray", "--ray-address", raylets.address)
        up = UpProcess(tmp_path / "plan.yaml", tmp_path, *flags)
        router = RouterOfPlan(plan, raylets.addresses[0])
        try:
            wait_until(lambda: "ready" in up.output.read_text() or up.process.poll(), START_SECONDS)
            assert up.process.poll() is None, up.log[-3000:]
            assert up.output.read_text() == f"gllm up: router is ready at {router.url}\n"
            assert router.engines() == {"a": "ready", "b": "ready"}
            texts = [""] * len(PROMPTS)

            def read(index: int) -> None:
                body: dict[str, Any] = {
                    "prompt": PROMPTS[index], "temperature": 0, "ignore_eos": True,
                    "max_tokens": NUM_TOKENS,
                }  # fmt: skip
                for event in router.stream("/v1/completions", body):
                    texts[index] += event["choices"][0]["text"]

            threads = [
                threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))
            ]
            for thread in threads:
                thread.start()
            wait_until(lambda: all(texts))
            engines = processes(raylets, "gllm-frontend")
            assert len(engines) == 2
            os.kill(parent(engines[0]), signal.SIGKILL)
            assert all(text != whole for text, whole in zip(texts, expected, strict=True))
            wait_until(lambda: not alive(engines[0]))
            for thread in threads:
                thread.join(START_SECONDS)
            assert texts == expected
            assert sum(router.fleet()["router"]["migrations"].values()) > 0
            wait_until(
                lambda: (
                    router.engines() == {"a": "ready", "b": "ready"}
                    and len(processes(raylets, "gllm-frontend")) == 2
                ),
                START_SECONDS,
            )
            assert engines[0] not in processes(raylets, "gllm-frontend")
            up.process.send_signal(signal.SIGTERM)
            assert up.process.wait(DEADLINE) == 0
            wait_until(lambda: not processes(raylets, "gllm-frontend"))
            wait_until(lambda: not processes(raylets, "gllm-router"))
        except BaseException:
            print(up.log[-6000:])
            raise
        finally:
            up.close()
