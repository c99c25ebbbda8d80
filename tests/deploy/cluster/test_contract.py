"""The seven calls of the platform over HTTP: a real master, and nodes with scripted processes."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gllm import __version__
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.messages.nodes import LeaveCluster, RefuseNode, WelcomeNode
from gllm.messages.services import (
    DrainServiceNode,
    PeerLink,
    ServiceNodeKept,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReading,
)
from tests.support.nodes.scripted_cluster import SECONDS, ClusterUnderTest, running_cluster, until


@pytest.fixture
async def cluster() -> AsyncIterator[ClusterUnderTest]:
    """A cluster of three nodes."""
    async with running_cluster() as under_test:
        for name in "abc":
            await under_test.join(name)
        yield under_test


async def test_deploy_service_key_status_and_delete(cluster: ClusterUnderTest) -> None:
    status, body = await cluster.deploy(
        resource_specification={"num_nodes": 2},
        inference_parameters={"max_model_len": 128, "prefix_cache": False},
    )
    assert (status, body["state"], body["uptime_seconds"]) == (200, "starting", 0.0)
    head, member = (cluster.nodes[name] for name in body["nodes"])
    assert body["head"] == head.name
    await until(lambda: member.living)
    start = next(iter(head.living.values()))
    assert start.parameters == {"max_model_len": 128, "prefix_cache": False}
    assert (start.model, start.degrees) == ("demo", [1, 1])
    assert next(iter(member.living.values())).head == "1.2.3.4:1"

    head.report(ServiceReading("ready"))
    body = await cluster.reach("ready")
    assert body["url"] == "http://1.2.3.4:2"
    head.report(
        ServiceReading(
            "ready", "", 3, 2, 10, 1, 500, 900, 0.5, [4.0, 2.0],
            [PeerLink(head.name, member.name, 1e6, 0.01)],
        )
    )  # fmt: skip
    async with asyncio.timeout(SECONDS):
        while (body := await cluster.status())["requests"]["finished"] != 10:
            await asyncio.sleep(0.005)
    assert body["requests"] == {"running": 3, "waiting": 2, "finished": 10, "failed": 1}
    assert body["tokens"] == {"prompt": 500, "generated": 900}
    assert body["utilization"]["kv_cache"] == 0.5
    assert body["uptime_seconds"] > 0

    status, body = await cluster.call("GET", "/services/chat/key", None, "ServiceKeyResponse")
    assert (status, body["api_key"]) == (200, start.api_key)
    assert len(body["api_key"]) > 40

    for expected in ("stopping", "absent", "absent"):
        _, body = await cluster.call("DELETE", "/services/chat", None, "ServiceDeletionResponse")
        assert body == {"service_name": "chat", "state": expected}
        await cluster.reach("service_not_found")
    assert await cluster.free_nodes() == {"a", "b", "c"}
    assert not head.living
    assert not member.living


async def test_services_are_apart_and_a_dead_one_fails_with_its_cause(
    cluster: ClusterUnderTest,
) -> None:
    _, one = await cluster.deploy("one")
    _, two = await cluster.deploy("two", resource_specification={"num_nodes": 2})
    assert {*one["nodes"], *two["nodes"]} == {"a", "b", "c"}
    await until(lambda: all(node.living for node in cluster.nodes.values()))
    keys = {
        (await cluster.call("GET", f"/services/{name}/key"))[1]["api_key"]
        for name in ("one", "two")
    }
    assert len(keys) == 2
    cluster.nodes[two["head"]].exit("it exited with 1: no memory")
    body = await cluster.reach("failed", "two")
    assert body["cause"] == f"node {two['head']}: it exited with 1: no memory"
    assert (await cluster.status("one"))["state"] == "starting"
    await until(lambda: not cluster.nodes[two["nodes"][1]].living)
    # Its name stays until it is deleted, its nodes are free.
    status, body = await cluster.deploy("two")
    assert (status, body["error"]["code"]) == (409, "service_exists")
    _, body = await cluster.call("GET", "/services", None, "ServiceListResponse")
    assert [row["service_name"] for row in body["services"]] == ["one", "two"]
    await cluster.call("DELETE", "/services/two")
    assert (await cluster.deploy("two", resource_specification={"num_nodes": 2}))[0] == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "service_name"),
        ({"service_name": "a"}, "model_name"),
        ({"service_name": "a/b", "model_name": "demo"}, "service_name"),
        ({"service_name": "a", "model_name": "--help"}, "model_name"),
        ({"service_name": "a", "model_name": "demo", "resource_specification": {"num_nodes": 0}},
         "resource_specification"),
        ({"service_name": "a", "model_name": "demo", "resource_specification": {"gpus": 1}},
         "resource_specification"),
        ({"service_name": "a", "model_name": "demo",
          "resource_specification": {"num_nodes": 1, "nodes": ["a", "b"]}},
         "resource_specification"),
        ({"service_name": "a", "model_name": "demo", "inference_parameters": {"step_log": "/x"}},
         "inference_parameters"),
        ({"service_name": "a", "model_name": "demo", "inference_parameters": {"dtype": "int4"}},
         "inference_parameters"),
        ({"service_name": "a", "model_name": "demo", "inference_parameters": {"max_num_seqs": []}},
         "inference_parameters"),
    ],
)  # fmt: skip
async def test_invalid_requests_name_the_field(
    cluster: ClusterUnderTest, body: Any, param: str
) -> None:
    status, answer = await cluster.call("POST", "/services", body)
    assert status == 400, answer
    assert answer["error"]["param"].startswith(param)
    assert answer["error"]["type"] == "invalid_request_error"
    _, answer = await cluster.call("GET", "/services")
    assert answer == {"services": []}


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/services/none", "service_not_found"),
        ("GET", "/services/none/key", "service_not_found"),
        ("GET", "/nodes/none", "node_not_found"),
        ("POST", "/nodes/none/drain", "node_not_found"),
        ("GET", "/v1/models", "http_404"),
    ],
)
async def test_unknown_names_are_404(
    cluster: ClusterUnderTest, method: str, path: str, code: str
) -> None:
    status, body = await cluster.call(method, path)
    assert (status, body["error"]["code"]) == (404, code)


async def test_too_few_nodes_is_a_conflict_that_says_who_is_busy(
    cluster: ClusterUnderTest,
) -> None:
    await cluster.deploy("one", resource_specification={"nodes": ["a", "b"]})
    status, body = await cluster.deploy("two", resource_specification={"num_nodes": 2})
    assert (status, body["error"]["code"]) == (409, "insufficient_nodes")
    assert "2 nodes are needed, but 1 of the 1 free ones fit" in body["error"]["message"]
    assert "a: runs service one" in body["error"]["message"]
    status, body = await cluster.deploy("two", resource_specification={"nodes": ["a"]})
    assert (status, body["error"]["param"]) == (409, "resource_specification")
    status, body = await cluster.deploy("two", resource_specification={"gpus_per_node": 2})
    assert "it has 1 GPUs of 2" in body["error"]["message"]


@pytest.mark.parametrize("key", ["", "another-key"])
async def test_every_call_needs_the_key(cluster: ClusterUnderTest, key: str) -> None:
    for endpoint in CLUSTER_ENDPOINTS:
        path = endpoint.path.replace("{name}", "a")
        status, _ = (
            await cluster.call(endpoint.method, path, key=key)
            if (not endpoint.is_public)
            else (401, None)
        )
        assert status == 401, endpoint.path
    assert (await cluster.call("GET", "/health", key=key))[0] == 200
    assert await cluster.free_nodes() == {"a", "b", "c"}


async def test_node_access_and_status(cluster: ClusterUnderTest) -> None:
    await until(lambda: cluster.master.node("a").report.load.power_watts)
    status, body = await cluster.call("GET", "/nodes/a", None, "ClusterNodeResponse")
    assert status == 200
    assert (body["host_name"], body["system"], body["version"]) == ("host", "Linux 6", __version__)
    assert (body["address"], body["data_port"]) == ("127.0.0.1", 29601)
    assert (body["devices"], body["num_cores"], body["memory_bytes"]) == (["GPU X"], 8, 2**33)
    assert body["load"] == {
        "cpu_utilization": 0.25,
        "memory_available_bytes": 2**32,
        "gpu_utilization": [0.5],
        "power_watts": 150.0,
        "temperature_celsius": 61.5,
    }
    assert (body["state"], body["service"], body["is_draining"]) == ("spare", None, False)
    refused = await cluster.join("a")
    assert "a node named a is a member already" in refused.of(RefuseNode)[0].cause
    other = await cluster.join("old", version="0.0")
    assert "gllm 0.0" in other.of(RefuseNode)[0].cause
    _, body = await cluster.call("GET", "/nodes", None, "ClusterNodeListResponse")
    assert [row["name"] for row in body["nodes"]] == ["a", "b", "c"]
    assert body["refused_peers"] == {"127.0.0.1": 2}


async def test_node_exit_moves_the_service_and_deregisters_the_node(
    cluster: ClusterUnderTest,
) -> None:
    _, body = await cluster.deploy(resource_specification={"num_nodes": 2})
    leaving = body["nodes"][1]
    await until(lambda: cluster.nodes[leaving].living)
    key = (await cluster.call("GET", "/services/chat/key"))[1]["api_key"]
    status, answer = await cluster.call("POST", f"/nodes/{leaving}/drain", None, "NodeExitResponse")
    assert (status, answer) == (
        200, {"name": leaving, "state": "draining", "service": "chat"}
    )  # fmt: skip
    await until(lambda: cluster.nodes[leaving].of(LeaveCluster))
    body = await cluster.reach("starting")
    assert leaving not in body["nodes"]
    assert len(body["nodes"]) == 2
    assert (await cluster.call("GET", "/services/chat/key"))[1]["api_key"] == key
    await until(lambda: leaving not in cluster.members)
    status, answer = await cluster.call("GET", f"/nodes/{leaving}")
    assert (status, answer["error"]["code"]) == (404, "node_not_found")
    # Nobody is left to move to: the service fails, and the node may leave all the same.
    leaving = body["nodes"][0]
    await cluster.call("POST", f"/nodes/{leaving}/drain")
    body = await cluster.reach("failed")
    assert f"node {leaving} leaves the cluster, and no others can run it" in body["cause"]
    await until(lambda: leaving not in cluster.members)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_node_exit_of_a_running_engine(cluster: ClusterUnderTest, is_refused: bool) -> None:
    """The engine lets the node leave while it serves; if it refuses, the service moves."""
    _, body = await cluster.deploy(resource_specification={"num_nodes": 2})
    head, member = (cluster.nodes[name] for name in body["nodes"])
    await until(lambda: member.living)
    head.report(ServiceReading("ready"))
    await cluster.reach("ready")
    await cluster.call("POST", f"/nodes/{member.name}/drain")
    command = (await until(lambda: head.of(DrainServiceNode)))[0]
    assert (command.process, command.node) == (next(iter(head.living)), member.name)
    _, row = await cluster.call("GET", f"/nodes/{member.name}", None, "ClusterNodeResponse")
    assert (row["state"], row["service"]) == ("draining", "chat")
    if is_refused:
        head.send(ServiceNodeKept(command.process, member.name, "too little memory"))
        body = await cluster.reach("starting")
        assert len(body["nodes"]) == 2
    else:
        member.exit("it exited with 0")
        await until(lambda: member.of(LeaveCluster))
        body = await cluster.status()
        assert (body["state"], body["nodes"]) == ("ready", [head.name])
    assert member.name not in body["nodes"]
    await until(lambda: member.name not in cluster.members)


async def test_a_node_without_a_service_leaves_at_once_and_by_itself(
    cluster: ClusterUnderTest,
) -> None:
    await cluster.call("POST", "/nodes/a/drain")
    cluster.nodes["b"].leave()
    await until(lambda: cluster.members == ["c"])
    node = await cluster.join("a")
    assert node.of(WelcomeNode)
    assert not cluster.master.node("a").is_draining


async def test_a_lost_node_can_be_deregistered() -> None:
    async with running_cluster(node_return_timeout=0.3) as cluster:
        node = await cluster.join("a")
        await cluster.deploy()
        await until(lambda: node.living)
        node.close()
        body = await cluster.reach("failed")
        assert "node a: lost for 0.3 seconds" in body["cause"]
        _, body = await cluster.call("GET", "/nodes/a", None, "ClusterNodeResponse")
        assert body["state"] == "lost"
        await cluster.call("POST", "/nodes/a/drain")
        assert (await cluster.call("GET", "/nodes/a"))[0] == 404


async def test_a_node_cannot_report_about_the_processes_of_others(
    cluster: ClusterUnderTest,
) -> None:
    await cluster.deploy(resource_specification={"nodes": ["a"]})
    await until(lambda: cluster.nodes["a"].living)
    number = next(iter(cluster.nodes["a"].living))
    cluster.nodes["b"].send(ServiceProcessStarted(number, "evil:1", "http://evil"))
    cluster.nodes["b"].send(ServiceProcessExited(number, "a lie"))
    cluster.nodes["a"].report(ServiceReading("ready"))
    assert (await cluster.reach("ready"))["url"] == "http://1.2.3.4:2"


async def test_metrics_count_services_and_nodes(cluster: ClusterUnderTest) -> None:
    await cluster.deploy()
    async with cluster.client.get("/metrics") as answer:
        text = await answer.text()
    assert 'gllm:cluster_services{state="starting"} 1.0' in text
    assert 'gllm:cluster_nodes{state="spare"} 2.0' in text
