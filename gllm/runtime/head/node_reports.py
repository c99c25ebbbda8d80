"""Reports on the nodes of an engine, from what the head knows of them."""

from collections.abc import Mapping, Sequence

from gllm.messages.node_report import NodeReport
from gllm.messages.nodes import LinkState, NodeFacts, NodeLoad
from gllm.recovery.membership import NodeRecord
from gllm.runtime.head.agent_session import AgentSession


def report_head(
    name: str,
    facts: NodeFacts | None,
    load: NodeLoad,
    stages: Sequence[int],
    links: Sequence[LinkState],
) -> NodeReport:
    """Return the report on the head's own node.

    Args:
        name: of the node.
        facts: of the machine; None if they are not known yet.
        load: of the machine.
        stages: that it computes.
        links: its data connections.
    """
    return NodeReport(
        name,
        "member",
        rank=0,
        host_name="" if facts is None else facts.host_name,
        system="" if facts is None else facts.system,
        version="" if facts is None else facts.version,
        devices=[] if facts is None else facts.devices,
        load=load,
        stages=sorted(stages),
        links=list(links),
    )


def report_node(
    record: NodeRecord,
    session: AgentSession | None,
    stages: Mapping[str, list[int]],
    is_draining: bool = False,
) -> NodeReport:
    """Return the report on another node.

    Args:
        record: of its membership.
        session: its last one, which may have ended.
        stages: of each node, by name.
        is_draining: True if its stages move to other nodes.
    """
    # One that is dismissed has not ended its session yet.
    is_draining = is_draining or (session is not None and session.dismissed_at is not None)
    state = "draining" if is_draining and record.is_alive else record.status.value
    report = NodeReport(
        record.name,
        state,
        rank=record.rank,
        last_cause=record.last_cause,
        num_losses=record.num_losses,
    )
    if session is None:
        return report
    facts = session.join.facts
    is_open = session.is_open
    return NodeReport(
        record.name,
        state,
        rank=record.rank,
        host_name=facts.host_name,
        system=facts.system,
        version=facts.version,
        address=session.address,
        devices=facts.devices,
        # Of a node that is lost nothing is known.
        load=session.heartbeat.load if is_open else NodeLoad(),
        stages=sorted(stages.get(record.name, [])) if is_open else [],
        round_trip_seconds=session.clock_offset.round_trip_seconds if is_open else None,
        clock_offset_seconds=session.clock_offset.seconds if is_open else None,
        links=list(session.heartbeat.links) if is_open else [],
        last_cause=record.last_cause,
        num_losses=record.num_losses,
    )
