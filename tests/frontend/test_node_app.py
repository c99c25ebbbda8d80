"""The HTTP server of an agent."""

from dataclasses import dataclass, field

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from prometheus_client.parser import text_string_to_metric_families

from gllm.frontend.node_app import make_node_app, start_node_server
from gllm.messages.nodes import LinkState, NodeLoad


@dataclass
class Status:
    name: str = "b"
    head: str = "10.0.0.1:29600"
    state: str = "member"
    cause: str = ""
    is_healthy: bool = True
    is_ready: bool = True
    load: NodeLoad = field(default_factory=lambda: NodeLoad(0.5, 1024, [0.25], None, 50.0))
    num_workers: int = 2
    links: list[LinkState] = field(
        default_factory=lambda: [
            LinkState(0, "head", "tcp", True, 30),
            LinkState(1, "head", "tcp", True, 12),
        ]
    )
    clock_offset_seconds: float | None = 1.5
    round_trip_seconds: float | None = None


@pytest.fixture
def status():
    return Status()


@pytest.fixture
async def client(status):
    async with TestClient(TestServer(make_node_app(lambda: status))) as made:
        yield made


async def test_probes_say_state_and_cause(client, status):
    for path in ("/health", "/ready"):
        answer = await client.get(path)
        assert answer.status == 200
        body = await answer.json()
        assert (body["state"], body["node"], body["head"]) == ("member", "b", status.head)
    status.state, status.cause, status.is_ready = "reconnecting", "no heartbeat for 5 s", False
    assert (await client.get("/health")).status == 200
    answer = await client.get("/ready")
    assert answer.status == 503
    assert (await answer.json())["cause"] == "no heartbeat for 5 s"
    status.is_healthy = False
    assert (await client.get("/health")).status == 503
    assert (await client.head("/health")).status == 503


async def test_metrics_leave_out_what_is_unknown(client):
    text = await (await client.get("/metrics")).text()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    assert all(sample.labels["node"] == "b" for sample in samples)
    values = {sample.name: sample.value for sample in samples}
    assert values == {
        "gllm:node_ready": 1,
        "gllm:node_workers": 2,
        "gllm:node_clock_offset_seconds": -1.5,
        "gllm:link_bytes_total": 42,
        "gllm:node_cpu_utilization": 0.5,
        "gllm:node_memory_available_bytes": 1024,
        "gllm:node_temperature_celsius": 50,
        "gllm:node_gpu_utilization": 0.25,
    }


@pytest.mark.parametrize("path", ["/", "/v1/chat/completions", "/nodes", "/health/x"])
async def test_other_paths_name_the_head(client, path):
    for method in ("GET", "POST"):
        answer = await client.request(method, path)
        assert answer.status == 404
        assert "10.0.0.1:29600" in (await answer.json())["error"]["message"]


async def test_server_on_a_port_of_its_own(status):
    runner = await start_node_server(lambda: status, "127.0.0.1", 0)
    try:
        port = runner.addresses[0][1]
        async with aiohttp.ClientSession() as session:
            assert (await session.get(f"http://127.0.0.1:{port}/ready")).status == 200
        with pytest.raises(ValueError, match=f"--port {port}: cannot listen there"):
            await start_node_server(lambda: status, "127.0.0.1", port)
    finally:
        await runner.cleanup()
