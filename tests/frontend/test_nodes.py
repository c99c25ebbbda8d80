"""GET /nodes, POST /nodes/{name}/drain, and metrics of an engine's machines."""

from prometheus_client.parser import text_string_to_metric_families

from gllm.engine.interface import NodeDrainError, UnknownNodeError
from gllm.messages.nodes import LinkState, NodeLoad
from gllm.scheduler.plan import SchedulerStats
from tests.frontend.conftest import serving
from tests.frontend.test_engines import ScriptedFleet
from tests.support.http.fake_engine import node_report


def lost_node():
    """A machine of which nothing is known but that it is lost."""
    return node_report(
        "b",
        state="lost",
        rank=1,
        load=NodeLoad(),
        round_trip_seconds=None,
        clock_offset_seconds=None,
        last_cause="no heartbeat for 5 s",
        num_losses=2,
        links=[
            LinkState(0, "head", "tcp", False, 10, "refused"),
            LinkState(3, "head", "tcp", True, 32),
            LinkState(
                4, "c", "tcp", True, 5, "", 2, True, "molink", 1e7, 0.06, 0.25, 700, 64, "int8"
            ),
            LinkState(5, "c", "tcp", True, 0, "", 0, True, "serial"),
        ],
    )


async def test_nodes_with_all_fields(engine):
    engine.node_reports.append(lost_node())
    engine.refused_peers = {"10.0.0.7": 3}
    engine.num_node_losses = 2
    engine.stats = SchedulerStats(depth=12)
    async with serving(engine) as server:
        body = await (await server.client.get("/nodes")).json()
    head, lost = body["nodes"]
    assert body["pipeline_depth"] == 12
    assert body["refused_peers"] == {"10.0.0.7": 3}
    assert body["num_node_losses"] == 2
    assert head["load"] == {
        "cpu_utilization": 0.5,
        "memory_available_bytes": 2**30,
        "gpu_utilization": [0.25, None],
        "power_watts": 150.0,
        "temperature_celsius": 60.0,
    }
    assert (head["rank"], head["stages"], head["system"]) == (0, [0], "Linux 6")
    assert lost["links"][0]["cause"] == "refused"
    assert lost["links"][2] == {
        "edge": 4,
        "peer": "c",
        "transport": "tcp",
        "is_open": True,
        "num_bytes": 5,
        "cause": "",
        "num_failures": 2,
        "is_sender": True,
        "policy": "molink",
        "bytes_per_second": 1e7,
        "round_trip_seconds": 0.06,
        "loss_rate": 0.25,
        "num_queued_bytes": 700,
        "last_chunk_bytes": 64,
        "encoding": "int8",
        "min_bytes_per_second": None,
    }
    assert lost["load"]["cpu_utilization"] is None
    assert (lost["state"], lost["last_cause"]) == ("lost", "no heartbeat for 5 s")


async def test_a_router_has_engines_instead(engine):
    engine.fleet = ScriptedFleet()
    async with serving(engine) as server:
        answer = await server.client.get("/nodes")
        assert answer.status == 404
        assert "/engines" in (await answer.json())["error"]["message"]


async def test_metrics_of_machines(engine):
    engine.node_reports.append(lost_node())
    engine.refused_peers = {"10.0.0.7": 3, "10.0.0.8": 1}
    engine.num_malformed_frames = 7
    engine.stats = SchedulerStats(depth=12)
    engine.num_node_losses = 2
    async with serving(engine) as server:
        text = await (await server.client.get("/metrics")).text()
    values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
            values[sample.name, *sorted(labels.values())] = sample.value
    assert values["gllm:pipeline_depth",] == 12
    assert values["gllm:nodes", "member"] == 1
    assert values["gllm:nodes", "lost"] == 1
    assert values["gllm:nodes", "spare"] == 0
    assert values["gllm:node_losses_total",] == 2
    assert values["gllm:refused_peers_total",] == 4
    assert values["gllm:malformed_frames_total",] == 7
    assert values["gllm:link_bytes_total", "b", "head", "tcp"] == 42
    assert values["gllm:link_bytes_total", "head", "other", "tcp+tls"] == 1000
    for name, value in (
        ("failures_total", 2),
        ("bytes_per_second", 1e7),
        ("round_trip_seconds", 0.06),
        ("loss_ratio", 0.25),
        ("queued_bytes", 700),
        ("last_chunk_bytes", 64),
    ):
        assert values[f"gllm:link_{name}", "4", "b", "c"] == value
    # Receiving ends measure nothing, and a rate that is unknown is left out.
    assert ("gllm:link_queued_bytes", "3", "b", "head") not in values
    assert ("gllm:link_bytes_per_second", "5", "b", "c") not in values
    assert values["gllm:node_clock_offset_seconds", "head"] == -1.5
    assert values["gllm:node_round_trip_seconds", "head"] == 0.002
    assert ("gllm:node_clock_offset_seconds", "b") not in values
    assert values["gllm:node_cpu_utilization", "head"] == 0.5
    assert values["gllm:node_gpu_utilization", "0", "head"] == 0.25
    assert ("gllm:node_gpu_utilization", "1", "head") not in values
    assert values["gllm:node_power_watts", "head"] == 150


async def test_nodes_need_an_api_key(engine):
    async with serving(engine, api_key=("k",)) as server:
        assert (await server.client.get("/nodes")).status == 401
        answer = await server.client.get("/nodes", headers={"Authorization": "Bearer k"})
        assert answer.status == 200


async def test_a_machine_is_drained(engine):
    engine.drain_answers = {
        "b": "draining",
        "head": NodeDrainError("head is the head"),
        "x": UnknownNodeError("there is no machine 'x'"),
    }
    async with serving(engine, api_key=("k",)) as server:
        headers = {"Authorization": "Bearer k"}
        assert (await server.client.post("/nodes/b/drain")).status == 401
        assert not engine.asked
        for _ in range(2):
            answer = await server.client.post("/nodes/b/drain", headers=headers)
            assert (answer.status, await answer.json()) == (200, {"name": "b", "state": "draining"})
        for name, status, code in (
            ("head", 409, "node_not_drainable"),
            ("x", 404, "node_not_found"),
        ):
            answer = await server.client.post(f"/nodes/{name}/drain", headers=headers)
            assert answer.status == status
            error = (await answer.json())["error"]
            assert (error["code"], error["param"]) == (code, "name")
