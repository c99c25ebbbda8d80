"""Emulated devices behind a router, of a plan, on two machines, in a program. All marked `full`."""

import itertools
import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.net.rig import make_rig
from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.llm import LLM
from gllm.plan.serving_plan import (
    NUM_ENGINE_PORTS,
    EnginePlan,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from tests.support.network.ports import free_port_row, free_ports
from tests.support.servers.fleet import serving_fleet
from tests.support.servers.nodes import Cluster
from tests.support.servers.plans import complete, running_up
from tests.support.servers.recovery_load import COMPLETIONS
from tests.support.servers.server import DEADLINE, wait_until

pytestmark = pytest.mark.full

MODEL, HIDDEN = "qwen2.5-7b", 3584
EMULATED = ("--device", "emulated:A100-80G", "--kv-cache-memory", "4GiB", "--max-model-len", "4096")
BODY: dict[str, Any] = {"prompt": "A row of people", "max_tokens": 150, "ignore_eos": True}


@pytest.fixture(autouse=True, scope="module")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def text() -> str:
    """The text of BODY, which depends on neither stages nor devices."""
    options: dict[str, Any] = {"device": "emulated:L20", "pipeline_parallel_size": 3}
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    with LLM(MODEL, progress=False, max_model_len=4096, **options) as llm:
        (output,) = llm.generate("A row of people", params)
        (report,) = llm.engine.nodes()
    assert report.devices == ["emulated:L20"] * 3
    return output.outputs[0].text


def read_text(events: Iterator[dict[str, Any]]) -> str:
    return "".join(choice["text"] for event in events for choice in event["choices"])


async def test_a_program_that_embeds_an_engine(text: str) -> None:
    config = EngineConfig.from_options(
        MODEL, device="emulated:L20,A100-80G", pipeline_parallel_size=2, max_model_len=4096
    )
    async with Engine(config) as engine:
        state = engine.describe()
        deltas = engine.generate(
            engine.tokenizer.encode("A row of people"),
            SamplingParams(max_tokens=150, ignore_eos=True),
        )
        assert "".join([delta.text async for delta in deltas]) == text
    slow, fast = state["layers"]
    assert slow < fast


def test_an_engine_behind_a_router_dies(text: str) -> None:
    router_flags = ("--device", "emulated", "--max-model-len", "4096", "--policy", "round-robin")
    with serving_fleet(MODEL, names=(), router_flags=router_flags) as router:
        for name in ("a", "b"):
            router.start_engine(name, *EMULATED)
        router.wait_until_ready("a", "b")
        events = router.stream(COMPLETIONS, BODY)
        first = [*itertools.islice(events, 5)]
        rows = router.rows()
        (busy,) = (name for name, row in rows.items() if row["num_requests"])
        router.engines[busy].kill()
        assert read_text(iter(first)) + read_text(events) == text


def test_a_plan_hands_requests_from_prefill_to_decode(tmp_path: Path, text: str) -> None:
    """Its machines do not exist; KV blocks take the time of the link between them."""
    ports = free_ports("router", "hub")
    first = free_port_row(2 * NUM_ENGINE_PORTS)[0]
    flags = {"max-model-len": 4096}
    plan = ServingPlan(
        MODEL,
        {"x": NodePlan("192.0.2.1", ["A100-80G"] * 2), "y": NodePlan("192.0.2.2", ["L20"] * 2)},
        {
            "p": EnginePlan([StagePlan("x", 28, [0, 1])], "prefill", flags=flags, port=first),
            "d": EnginePlan(
                [StagePlan("y", 14, [0]), StagePlan("y", 14, [1])],
                "decode",
                flags=flags | {"kv-fetch": "always"},
                port=first + NUM_ENGINE_PORTS,
            ),
        },
        links={"x-y": LinkPlan(10, 0.05)},
        router=RouterPlan(
            "x", ports["router"], preset="distserve", flags=flags | {"hub": ports["hub"]}
        ),
    )
    url = f"http://127.0.0.1:{ports['router']}"
    with running_up(plan, tmp_path, "--emulate") as up:
        up.wait_until_ready()
        # Engines are ready before their KV movers are connected; until then prompts are computed.
        wait_until(lambda: all(row["has_kv_transfer"] for row in engine_rows(url).values()))
        answer = complete(url, "A row of people", 150)
        assert answer["choices"][0]["text"] == text
        # Engines report once per second.
        num_tokens = answer["usage"]["prompt_tokens"] - 1
        wait_until(lambda: engine_rows(url)["d"]["stats"]["fetched_tokens"] >= num_tokens)
        assert up.terminate() == 0


def engine_rows(url: str) -> dict[str, dict[str, Any]]:
    """Rows of the engines in a router's /engines, by name."""
    with urllib.request.urlopen(f"{url}/engines", timeout=DEADLINE) as response:
        return {row["name"]: row for row in json.load(response)["engines"]}


def count_link_bytes(cluster: Cluster) -> int:
    """Bytes that the head's machine has sent to others, as it has reported."""
    return sum(link["num_bytes"] for link in cluster.nodes()["machine-0"]["links"])


def test_a_stage_on_another_machine_dies(tmp_path: Path, text: str) -> None:
    """A machine that joins takes the device and the model of the head."""
    flags = (*EMULATED, "--dtype", "auto", "--pp", "2", "--node-return-timeout", "120")
    with make_rig(2) as rig:
        cluster = Cluster(rig, tmp_path, 2, *flags)
        try:
            cluster.start(0, model=MODEL)
            cluster.join(1, model=MODEL)
            cluster.wait_until_ready()
            events = cluster.head.stream(COMPLETIONS, BODY)
            begun = [*itertools.islice(events, 5)]
            os.kill(cluster.servers[1].stage_pids()["1"], signal.SIGKILL)
            assert read_text(iter(begun)) + read_text(events) == text
            # The activations of each token, in bfloat16, have crossed the link.
            num_bytes = BODY["max_tokens"] * HIDDEN * 2
            wait_until(lambda: count_link_bytes(cluster) >= num_bytes)
            rows = cluster.nodes()
            assert [row["devices"] for row in rows.values()] == [["emulated:A100-80G"]] * 2
        finally:
            cluster.close()
