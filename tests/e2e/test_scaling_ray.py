"""`gllm up --on ray` with a router that scales: engine actors come with requests, and leave."""

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.plan.serving_plan import write_plan
from tests.e2e.test_up import local_plan
from tests.e2e.test_up_ray import START_SECONDS, RouterOfPlan, processes
from tests.support.nodes.raylets import start_raylets
from tests.support.servers.plans import UpProcess, complete
from tests.support.servers.server import DEADLINE, wait_until

PROMPT = "Once upon a time"


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_actors_of_engines_come_with_requests_and_return_their_resources(tmp_path: Path) -> None:
    plan = local_plan("a", "b")
    assert plan.router is not None
    flags: dict[str, Any] = plan.router.flags | {
        # An engine sustains so little that the requests of this test want both.
        "scale": "0:2", "scale-engine-rate": 0.01, "scale-startup-seconds": 60,
        "scale-idle-seconds": 10, "scale-down-seconds": 10,
    }  # fmt: skip
    router_plan = msgspec.structs.replace(plan.router, flags=flags)
    plan = msgspec.structs.replace(plan, router=router_plan)
    write_plan(plan, tmp_path / "plan.yaml")
    with start_raylets(3) as raylets:
        up = UpProcess(
            tmp_path / "plan.yaml", tmp_path, "--on", "ray", "--ray-address", raylets.address
        )
        router = RouterOfPlan(plan, raylets.addresses[0])

        def engines() -> list[int]:
            return processes(raylets, "gllm-frontend")

        try:
            wait_until(lambda: "ready" in up.output.read_text() or up.process.poll(), START_SECONDS)
            assert up.process.poll() is None, up.log[-3000:]
            assert router.engines() == {}
            assert not engines()
            with ThreadPoolExecutor(6) as pool:
                answers = [pool.submit(complete, router.url, PROMPT) for _ in range(6)]
                wait_until(lambda: len(engines()) == 2, START_SECONDS)
                texts = {each.result(START_SECONDS)["choices"][0]["text"] for each in answers}
            assert len(texts) == 1
            wait_until(lambda: not router.engines() and not engines(), START_SECONDS)
            # The first request after that wakes the service again.
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(complete, router.url, PROMPT)
                wait_until(answer.done, START_SECONDS)
                assert answer.result()["choices"][0]["text"] in texts
            assert engines()
            up.process.send_signal(signal.SIGTERM)
            assert up.process.wait(DEADLINE) == 0
            wait_until(lambda: not engines() and not processes(raylets, "gllm-router"))
        except BaseException:
            print(up.log[-6000:])
            raise
        finally:
            up.close()
