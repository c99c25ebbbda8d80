"""Servers on emulated devices: as any other server, with texts and times that are made up."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.net.rig import make_rig
from gllm.commands.bench.command import main
from gllm.config.emulation import EmulationConfig
from gllm.runtime.emulation.model_folder import prepare_emulated_model
from gllm.runtime.emulation.output import EmulatedOutput
from tests.e2e.conftest import GREEDY, greedy_tokens
from tests.support.servers.fleet import Router
from tests.support.servers.metrics import by_stage, scrape
from tests.support.servers.nodes import running_cluster
from tests.support.servers.server import Server, places, serving, stages, wait_until

MODEL = "qwen2.5-7b"
BODY = {"prompt": "The pipeline moves", "max_tokens": 60, "temperature": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "age": {"type": "integer"},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A folder of these tests for model folders."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """The only choice of a completion."""
    status, body = server.post("/v1/completions", {**BODY, **fields})
    assert status == 200, body
    choice: dict[str, Any] = body["choices"][0]
    return choice


def check_structured_output(server: Server) -> None:
    fields = {"json_schema": {"name": "person", "schema": SCHEMA}, "type": "json_schema"}
    body = {
        "messages": [{"role": "user", "content": "Who are you?"}],
        "max_tokens": 200,
        "response_format": fields,
    }
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    assert json.loads(choice["message"]["content"]).keys() == SCHEMA["properties"].keys()


def check_bench(server: Server, file: Path) -> None:
    load = ["--workload", "uniform:3,40,2,9", "--num-prompts", "6", "--no-progress"]
    to = ["--base-url", server.url, "--save-result", str(file), "--request-rate", "50"]
    assert main(["serve", *load, *to]) == 0
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (6, 0)
    assert result["model_id"] == MODEL


def test_a_killed_stage_changes_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Streams of a server of two stages that dies are those of an undisturbed one."""
    flags = ("--device", "emulated:H100", "--pp", "2", "--emulated-speed", "4")
    with serving(MODEL, *flags) as server:
        prompts = [f"The pipeline moves {number}" for number in range(4)]
        expected = [complete(server, prompt=prompt)["text"] for prompt in prompts]
        assert len(set(expected)) == len(prompts)
        check_structured_output(server)
        check_bench(server, tmp_path / "result.json")
        steps, late = (
            by_stage(server, f"{name}_total") for name in ("stage_steps", "emulation_late_seconds")
        )
        assert len(late) == 2
        assert all(seconds > 0 for seconds in late)
        assert min(steps) > 60

        texts = [""] * len(prompts)
        has_begun = [threading.Event() for _ in prompts]

        def stream(at: int) -> None:
            for event in server.stream("/v1/completions", {**BODY, "prompt": prompts[at]}):
                texts[at] += event["choices"][0]["text"]
                has_begun[at].set()

        threads = [threading.Thread(target=stream, args=(at,)) for at in range(len(prompts))]
        for thread in threads:
            thread.start()
        assert all(event.wait(60) for event in has_begun)
        os.kill(stages(server.pid)[1], signal.SIGKILL)
        for thread in threads:
            thread.join()
        assert texts == expected
        assert scrape(server).value("recoveries_total") == 1


@pytest.mark.full
def test_ranks_wait_for_each_other() -> None:
    """Of a stage and its successor; the text does not depend on the division."""
    flags = ("--device", "emulated:L20", "--emulated-speed", "4")
    with serving(MODEL, *flags) as server:
        expected = complete(server)["text"]
    with serving(MODEL, *flags, "--pp", "2", "--tp", "2") as server:
        assert places(server.pid).keys() == {"0.0", "0.1", "1.0", "1.1"}
        assert complete(server)["text"] == expected
        check_structured_output(server)


@pytest.mark.full
def test_headers_alone_carry_the_text_and_outputs_have_a_length() -> None:
    flags = ("--device", "emulated:L20", "--pp", "2", "--emulated-speed", "4")
    with serving(MODEL, *flags, "--no-emulated-bytes", "--emulated-output", "fixed:7") as server:
        choice = complete(server, logprobs=1)
        assert choice["finish_reason"] == "stop"
        assert len(choice["logprobs"]["tokens"]) == 7
        assert complete(server, max_tokens=5)["finish_reason"] == "length"
        assert complete(server, min_tokens=9)["finish_reason"] == "stop"


@pytest.mark.full
def test_texts_are_those_of_the_prompt() -> None:
    with serving(MODEL, "--device", "emulated:L20", "--emulated-text", "prompt") as server:
        assert complete(server)["text"].startswith(BODY["prompt"])


@pytest.mark.full
def test_hand_offs_have_the_text_of_one_engine(tmp_path: Path) -> None:
    """KV blocks travel from the engine that prefills to the one that decodes."""
    folder = prepare_emulated_model("demo", tmp_path)
    output = EmulatedOutput(EmulationConfig(), folder, (), 2048)
    rng = Random(3)
    prompts = [rng.choices(range(300, 2048), k=60 + number) for number in range(10)]
    router = Router(str(folder), "--preset", "distserve")
    try:
        for role in ("prefill", "decode"):
            flags = ("--kv-transfer", "auto", "--kv-fetch", "always", "--device", "emulated:L20")
            router.start_engine(role, "--role", role, *flags)
        router.wait_until_ready("prefill", "decode")
        wait_until(lambda: all(row["has_kv_transfer"] for row in router.rows().values()))
        tokens = greedy_tokens(router, {**GREEDY, "prompt": prompts})
        assert tokens == [
            [text.token(index) for index in range(GREEDY["max_tokens"])]
            for text in (output.create_text(prompt, 0) for prompt in prompts)
        ]
        # Engines report their counters once per second.
        num_tokens = sum(map(len, prompts))
        wait_until(lambda: router.rows()["decode"]["stats"]["fetched_tokens"] >= num_tokens)
        assert not router.rows()["decode"]["stats"]["failed_fetches"]
    finally:
        router.close()


@pytest.mark.full
@pytest.mark.parametrize("flags", [(), ("--no-emulated-bytes",)])
def test_stages_on_two_machines(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Activations cross a real link; a killed stage changes no text."""
    device = ("--pp", "2", "--device", "emulated:L20", *flags)
    prompts = [[300 + number, 301, 302] for number in range(4)]
    with make_rig(2) as rig, running_cluster(rig, tmp_path, 2, *device) as cluster:
        fields = {**GREEDY, "prompt": prompts, "max_tokens": 40}
        expected = greedy_tokens(cluster.head, fields)
        assert len(expected[0]) == 40
        wait_until(lambda: len(by_stage(cluster.head, "emulation_late_seconds_total")) == 2)
        os.kill(cluster.servers[1].stage_pids()["1"], signal.SIGKILL)
        wait_until(lambda: scrape(cluster.head).value("recoveries_total") == 1)
        assert greedy_tokens(cluster.head, fields) == expected
