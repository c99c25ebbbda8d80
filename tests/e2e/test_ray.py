"""Engines whose other machines Ray finds: raylets on loopback addresses of this machine."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gllm.config.sampling import SamplingParams
from gllm.deploy.ray.launcher import RayLauncher
from gllm.engine.llm import LLM
from gllm.runtime.messaging.security import create_secret_file
from tests.support.network.ports import free_ports
from tests.support.nodes.raylets import Raylets, find_processes, start_raylets
from tests.support.servers.server import Server, alive, wait_until

START_SECONDS = 280.0
"""Time for the raylets' agents and their workers to start, on a machine however busy."""
PROMPTS = [
    f"{name} said" for name in ("Otto", "The owl", "A fox", "Emma", "The king", "Two", "No", "It")
]


@contextmanager
def serving_with_ray(raylets: Raylets, num_stages: int, *flags: str) -> Iterator[Server]:
    """A ready server whose machines are the raylets; the first one is the head."""
    port = free_ports("head")["head"]
    server = Server(
        "demo",
        *("--pp", str(num_stages), "--threads", "1", "--device", "cpu"),
        *("--distributed-executor-backend", "ray", "--ray-address", raylets.address),
        *("--master-addr", f"{raylets.addresses[0]}:{port}", "--join-timeout", "270"),
        *flags,
    )
    try:
        wait_until(
            lambda: server.status("/ready") == 200 or server.process.poll() is not None,
            START_SECONDS,
        )
        assert server.process.poll() is None, server.log
        yield server
    finally:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait()


def nodes(server: Server) -> list[dict[str, Any]]:
    with server.open("/nodes", None) as answer:
        found: list[dict[str, Any]] = json.load(answer)["nodes"]
    return found


def names(server: Server, state: str) -> list[str]:
    return [node["name"] for node in nodes(server) if node["state"] == state]


def body(prompt: str, max_tokens: int) -> dict[str, Any]:
    return {
        "prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": max_tokens
    }  # fmt: skip


def texts_of_one_machine(prompts: list[str], max_tokens: int) -> list[str]:
    """Greedy texts of an engine with one process."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens)
    with LLM("demo", progress=False, threads=1, device="cpu") as llm:
        return [output.outputs[0].text for output in llm.generate(prompts, params)]


@pytest.mark.full
def test_ray_starts_an_agent_that_ends_with_the_server() -> None:
    with start_raylets(2) as raylets, serving_with_ray(raylets, 2) as server:
        status, answer = server.post("/v1/completions", body(PROMPTS[0], 30))
        assert status == 200
        head, other = nodes(server)
        assert (head["state"], head["stages"]) == ("member", [0])
        assert (other["state"], other["stages"]) == ("member", [1])
        assert other["name"].startswith(f"ray-{raylets.addresses[1]}-")
        (agent,) = raylets.agents()
        server.process.send_signal(signal.SIGTERM)
        wait_until(lambda: server.process.poll() is not None)
        assert server.process.returncode == 0
        wait_until(lambda: not alive(agent))
        wait_until(lambda: not raylets.agents())
    assert [answer["choices"][0]["text"]] == texts_of_one_machine(PROMPTS[:1], 30)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_requests_survive_the_loss_of_a_raylet_and_a_new_one_becomes_a_spare() -> None:
    num_tokens = 900
    expected = texts_of_one_machine(PROMPTS, num_tokens)
    with start_raylets(3) as raylets, serving_with_ray(raylets, 3, "--ray-spares", "1") as server:
        assert len(names(server, "member")) == 3
        texts = [""] * len(PROMPTS)

        def read(index: int) -> None:
            for event in server.stream("/v1/completions", body(PROMPTS[index], num_tokens)):
                texts[index] += event["choices"][0]["text"]

        threads = [threading.Thread(target=read, args=(index,)) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(texts))
        raylets.kill(2)
        assert all(text != whole for text, whole in zip(texts, expected, strict=True))
        for thread in threads:
            thread.join(START_SECONDS)
        assert texts == expected
        lost = f"ray-{raylets.addresses[2]}-"
        assert not any(name.startswith(lost) for name in names(server, "member"))
        # Ray has moved the lost agent here, or the launcher has started a spare.
        address = raylets.add()
        wait_until(
            lambda: any(f"-{address}-" in name for name in names(server, "spare")), START_SECONDS
        )
        status, answer = server.post("/v1/completions", body(PROMPTS[0], num_tokens))
        assert status == 200
        assert answer["choices"][0]["text"] == expected[0]


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_agent_that_dies_is_started_again_by_ray_with_its_secret(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    create_secret_file(secret)
    flags = ("--node-secret-file", str(secret))
    with start_raylets(2) as raylets, serving_with_ray(raylets, 2, *flags) as server:
        (agent,) = raylets.agents()
        os.kill(agent, signal.SIGKILL)
        wait_until(lambda: raylets.agents() and raylets.agents() != [agent], START_SECONDS)
        wait_until(lambda: nodes(server)[1]["num_losses"] == 1, START_SECONDS)
        assert all(link["transport"] == "tcp+tls" for link in nodes(server)[1]["links"])
        status, answer = server.post("/v1/completions", body(PROMPTS[1], 30))
        assert status == 200
    assert [answer["choices"][0]["text"]] == texts_of_one_machine(PROMPTS[1:2], 30)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_server_survives_the_end_of_its_launcher() -> None:
    with start_raylets(2) as raylets, serving_with_ray(raylets, 2) as server:
        before = raylets.agents()
        (launcher,) = find_processes(server.pid, "gllm-ray")
        os.kill(launcher, signal.SIGKILL)
        wait_until(lambda: raylets.agents() and raylets.agents() != before, START_SECONDS)
        status, _ = server.post("/v1/completions", body(PROMPTS[2], 30))
        assert status == 200


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_an_llm_uses_ray() -> None:
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=30)
    with start_raylets(3) as raylets:
        port = free_ports("head")["head"]
        with LLM(
            "demo",
            progress=False,
            pipeline_parallel_size=3,
            threads=1,
            device="cpu",
            launcher=RayLauncher,
            ray_address=raylets.address,
            master_addr=f"{raylets.addresses[0]}:{port}",
        ) as llm:
            outputs = llm.generate(PROMPTS, params)
            assert len(raylets.agents()) == 2
        wait_until(lambda: not raylets.agents())
    texts = [output.outputs[0].text for output in outputs]
    assert texts == texts_of_one_machine(PROMPTS, 30)
