"""Reports on the nodes of an engine."""

import time

from gllm.messages.nodes import LinkState, NodeHeartbeat, NodeLoad
from gllm.recovery.membership import NodeRecord, NodeStatus
from gllm.runtime.head.node_hub import AgentSession, report_node
from tests.support.nodes.fake_agent import make_join


def test_a_living_and_a_lost_node() -> None:
    session = AgentSession(1, make_join("one"), "10.0.0.2", lambda message: None)
    links = [LinkState(0, "head", "tcp", True, 7), LinkState(1, "two", "tcp", True, 8)]
    now = time.monotonic()
    heartbeat = NodeHeartbeat(now, now, now, load=NodeLoad(0.25), links=links)
    session.on_heartbeat(heartbeat, now)
    record = NodeRecord("one", 1, NodeStatus.MEMBER, now, now)
    report = report_node(record, session, {"one": [2, 1]})
    assert (report.state, report.address, report.stages) == ("member", "10.0.0.2", [1, 2])
    assert [link.peer for link in report.links] == ["head", "two"]
    assert report.load.cpu_utilization == 0.25
    assert report.clock_offset_seconds == 0.0
    session.is_open = False
    record.status, record.last_cause, record.num_losses = NodeStatus.LOST, "silent", 1
    report = report_node(record, session, {"one": [2, 1]})
    assert (report.state, report.last_cause, report.num_losses) == ("lost", "silent", 1)
    assert (report.stages, report.links, report.load) == ([], [], NodeLoad())
    assert report.clock_offset_seconds is None
    assert report_node(record, None, {}).host_name == ""
