"""Assignments of an epoch: the files that its workers share, and nothing that is left."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.config.engine import EngineConfig
from gllm.recovery.placement import Placement, RankName, RankWorker, make_placement
from gllm.runtime.head.assignment import (
    NodeAssignment,
    StageAssignment,
    decode_node_assignment,
    decode_parent_message,
    encode_node_assignment,
    encode_parent_message,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.transport.edge import Edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from tests.support.examples import num_examples
from tests.support.nodes.scripted_node import ScriptedNode


class RecordingNode(ScriptedNode):
    """Node that keeps what each worker would receive."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[StageAssignment] = []

    def _send(self, assignment: StageAssignment) -> None:
        payload, descriptors = encode_parent_message(assignment)
        message = decode_parent_message(payload, [os.dup(each) for each in descriptors])
        assert isinstance(message, StageAssignment)
        self.received.append(message)

    def close(self) -> None:
        for message in self.received:
            message.close_descriptors()
        self.close_kv_files()
        self.on_epoch_ready()
        self.context.term()


def files(descriptors: list[int]) -> tuple[tuple[int, int], ...]:
    """Identities of open files; eventfds share one inode, so only memory files count."""
    stats = [os.fstat(each) for each in descriptors]
    return tuple((each.st_dev, each.st_ino) for each in stats if each.st_nlink == 0)


@dataclass
class Files:
    """Ends of each file."""

    edges: dict[tuple[tuple[int, int], ...], list[str]] = field(default_factory=dict)
    regions: dict[tuple[tuple[int, int], ...], list[str]] = field(default_factory=dict)


def read_files(received: list[StageAssignment]) -> Files:
    shared = Files()
    for message in received:
        name = message.name.label
        if message.incoming is not None:
            shared.edges.setdefault(files(message.incoming.descriptors), []).append(f"to {name}")
        for edge in message.outgoing:
            shared.edges.setdefault(files(edge.descriptors), []).append(f"from {name}")
        if message.region is not None:
            shared.regions.setdefault(files(message.region.descriptors), []).append(name)
    return shared


def assigned(degrees: list[int]) -> tuple[RecordingNode, Placement]:
    layers = [(stage, stage + 1) for stage in range(len(degrees))]
    slots = [RankWorker(11 + place) for place in range(sum(degrees))]
    placement = make_placement(3, layers, slots, degrees)
    node = RecordingNode()
    record = os.memfd_create("plans")
    assignment = NodeAssignment(placement, EngineConfig())
    node.assign(assignment, Path("folder"), record, output_lengths={1: [2]})
    os.close(record)
    return node, placement


@settings(max_examples=num_examples(25, 300), deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_workers_share_edges_and_regions_and_nothing_else(degrees: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node, placement = assigned(degrees)
    try:
        assert [message.sender for message in node.received] == placement.senders
        shared = read_files(node.received)
        ends = sorted(tuple(sorted(each)) for each in shared.edges.values())
        assert ends == sorted(
            (f"from {source.label}", f"to {target.label}")
            for source, target in named_edges(placement)
        )
        labels = [
            [f"{stage}.{rank}" for rank in range(ranks)]
            for stage, ranks in enumerate(degrees)
            if ranks > 1
        ]
        assert sorted(shared.regions.values()) == labels
        assert [message.has_driver for message in node.received].index(True) == 0
        for message in node.received:
            assert (message.plan_record is not None) == message.has_driver
            assert (message.hash_file is not None) == message.has_driver
            assert message.kv_file is not None
            assert bool(message.output_lengths) == message.has_driver
            assert message.num_ranks == degrees[message.stage]
            assert message.num_local_workers == sum(degrees)
            targets = [
                edge.target_rank
                for edge in placement.edges
                if (edge.source, edge.source_rank) == (message.stage, message.rank)
            ]
            assert len(message.outgoing) == len(targets)
            assert targets == sorted(targets), "edges are in the order of their receivers"
        assert [message.local_index for message in node.received] == list(range(sum(degrees)))
    finally:
        node.close()
    assert len(os.listdir("/proc/self/fd")) == before


def named_edges(placement: Placement) -> list[tuple[RankName, RankName]]:
    ranks = placement.degrees
    return [
        (
            RankName(edge.source, edge.source_rank, ranks[edge.source]),
            RankName(edge.target, edge.target_rank, ranks[edge.target]),
        )
        for edge in placement.edges
    ]


@pytest.mark.parametrize("degrees", [[1], [2, 1]])
def test_each_worker_has_a_file_for_its_kv_cache_in_each_epoch(degrees: list[int]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node = RecordingNode()
    layers = [(stage, stage + 1) for stage in range(len(degrees))]
    seen = set()
    for epoch in (1, 2):
        slots = [RankWorker(11 + place) for place in range(sum(degrees))]
        placement = make_placement(epoch, layers, slots, degrees)
        config = EngineConfig(kv_transfer="auto")
        node.assign(NodeAssignment(placement, config), Path("folder"))
        received = node.received[-sum(degrees) :]
        assert list(node.kv_memory) == placement.senders
        for message in received:
            assert message.kv_memory is not None
            (file,) = files([message.kv_memory])
            assert (file,) == files([node.kv_memory[message.sender]])
            assert os.fstat(message.kv_memory).st_size == 0
            seen.add(file)
    assert len(seen) == 2 * sum(degrees), "no file belongs to two epochs"
    # Without the flag there are none, and those of the epoch before are closed.
    node.assign(NodeAssignment(placement, EngineConfig()), Path("folder"))
    assert not node.kv_memory
    assert {message.kv_memory for message in node.received[-sum(degrees) :]} == {None}
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("degrees", [[1], [1, 1, 1], [2, 1]])
def test_files_of_kv_caches_outlive_their_workers(degrees: list[int]) -> None:
    """Each place has the same file as long as epochs may keep it, whichever process is there."""
    before = len(os.listdir("/proc/self/fd"))
    node, config = RecordingNode(), EngineConfig()
    layers = [(stage, stage + 1) for stage in range(len(degrees))]
    epochs = []
    for epoch, keeps in enumerate([False, True, True, False, True], 1):
        slots = [RankWorker(10 * epoch + place) for place in range(sum(degrees))]
        placement = make_placement(epoch, layers, slots, degrees)
        node.assign(NodeAssignment(placement, config, keeps_kv_cache=keeps), Path("folder"))
        received = node.received[-sum(degrees) :]
        owned = [each for each in (m.kv_file for m in received) if each is not None]
        owned += [each for each in (m.hash_file for m in received) if each is not None]
        assert len(owned) == sum(degrees) + 1
        epochs.append(files(owned))
        assert len(set(epochs[-1])) == len(owned), "nobody shares a file"
    assert epochs[0] == epochs[1] == epochs[2]
    assert epochs[3] == epochs[4]
    assert not set(epochs[2]) & set(epochs[3])
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    "options",
    [
        {"max_restarts": 0},
        {"kv_transfer": "auto"},
        {"scheduler": SchedulerConfig(prefix_cache=False)},
        {"device": "emulated:L20"},
    ],
    ids=str,
)
def test_no_file_outlives_workers_where_no_recovery_uses_it(options: dict[str, Any]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    node, placement = RecordingNode(), make_placement(1, [(0, 1)], [RankWorker(1)])
    node.assign(NodeAssignment(placement, EngineConfig()), Path("folder"))
    config = EngineConfig(**options)
    node.assign(NodeAssignment(placement, config, keeps_kv_cache=True), Path("folder"))
    assert (node.received[-1].kv_file, node.received[-1].hash_file) == (None, None)
    node.close_kv_memory()
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before


class CountingNode(ScriptedNode):
    """Node that counts the workers that would receive an assignment."""

    num_sent = 0

    def _send(self, assignment: StageAssignment) -> None:
        self.num_sent += 1


@contextmanager
def limit_of_descriptors(limit: int) -> Iterator[None]:
    """Open no file whose descriptor is not below a limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_files_that_cannot_be_created_leave_nothing_behind() -> None:
    """Whichever of them is the first that cannot be."""
    before = len(os.listdir("/proc/self/fd"))
    node = CountingNode()
    open_files = len(os.listdir("/proc/self/fd"))
    placement = make_placement(
        1, [(0, 1), (1, 2)], [RankWorker(1), RankWorker(2), RankWorker(3)], [1, 2]
    )
    assignment = NodeAssignment(placement, EngineConfig())
    num_failures = 0
    for limit in count(3):
        try:
            with limit_of_descriptors(limit):
                node.assign(assignment, Path("folder"))
            break
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            num_failures += 1
        assert node.num_sent == 0, "no worker was told anything"
        node.close_kv_files()
        assert len(os.listdir("/proc/self/fd")) == open_files
    assert node.num_sent == 3
    assert num_failures > 5
    node.close_kv_files()
    node.on_epoch_ready()
    node.context.term()
    assert len(os.listdir("/proc/self/fd")) == before


class RecordingEdges:
    """Edges to other machines that would be connected."""

    def __init__(self) -> None:
        self.opened: list[tuple[OpenLinkEdge, tuple[tuple[int, int], ...]]] = []
        self.closed: list[int] = []

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
        self.opened.append((command, files(edge.descriptors)))

    def close_edges(self, epoch: int) -> None:
        self.closed.append(epoch)


def spread(degrees: list[int], nodes: list[str]) -> Placement:
    """Placement with the nodes of the stages."""
    layers = [(stage, stage + 1) for stage in range(len(degrees))]
    names = [node for node, ranks in zip(nodes, degrees, strict=True) for _ in range(ranks)]
    slots = [RankWorker(11 + place, node) for place, node in enumerate(names)]
    return make_placement(3, layers, slots, degrees)


PEERS = {
    "local": LinkPeer("local", "10.0.0.1:29601", b"head"),
    "b": LinkPeer("b", "10.0.0.2:29601", b"other"),
    "c": LinkPeer("c", "", b"outbound only"),
}


@pytest.mark.parametrize("degrees", [[1, 1, 1, 1], [2, 1, 2, 2]])
def test_each_machine_has_its_part_of_a_placement(degrees: list[int]) -> None:
    nodes = ["local", "b", "b", "c"]
    placement = spread(degrees, nodes)
    assignment = decode_node_assignment(
        encode_node_assignment(NodeAssignment(placement, EngineConfig(), "a death", 4, peers=PEERS))
    )
    received: dict[str, list[StageAssignment]] = {}
    opened: dict[str, dict[int, OpenLinkEdge]] = {}
    for name in ("local", "b", "c"):
        before = len(os.listdir("/proc/self/fd"))
        node = RecordingNode()
        node.node_name = name
        node.remote_edges = edges = RecordingEdges()
        node.assign(assignment, Path("folder"))
        received[name] = node.received
        opened[name] = {command.edge: command for command, _ in edges.opened}
        assert edges.closed == [2], "edges of earlier epochs"
        # The data mover gets the very files of the worker's ring.
        remote = [
            files(edge.descriptors)
            for each in node.received
            for edge in ([each.incoming] if each.incoming else []) + each.outgoing
            if edge.is_remote
        ]
        assert sorted(remote) == sorted(ring for _, ring in edges.opened)
        regions = read_files(node.received).regions.values()
        expected = [
            [f"{stage}.{rank}" for rank in range(ranks)]
            for stage, ranks in enumerate(degrees)
            if ranks > 1 and nodes[stage] == name
        ]
        assert sorted(regions) == expected
        node.close()
        assert len(os.listdir("/proc/self/fd")) == before
    senders = [each.sender for name in received for each in received[name]]
    assert sorted(senders) == placement.senders, "each worker is assigned once, by its machine"
    assert {each.restart_cause for each in received["c"]} == {"a death"}
    for spec in placement.edges:
        source, target = nodes[spec.source], nodes[spec.target]
        ends = {
            name: commands[spec.number]
            for name, commands in opened.items()
            if spec.number in commands
        }
        if source == target:
            assert not ends
            continue
        assert set(ends) == {source, target}
        assert ends[source].is_sender
        assert not ends[target].is_sender
        # c accepts nothing.
        assert (ends[source].dials, ends[target].dials) == (target != "c", target == "c")
        assert (ends[source].peer, ends[target].peer) == (PEERS[target], PEERS[source])


def test_machines_that_cannot_reach_each_other_are_named() -> None:
    before = len(os.listdir("/proc/self/fd"))
    peers = {**PEERS, "b": LinkPeer("b", "", b"")}
    node = RecordingNode()
    node.node_name = "b"
    node.remote_edges = RecordingEdges()
    placement = spread([1, 1], ["b", "c"])
    with pytest.raises(ValueError, match=r"'b' nor node 'c'.*--advertise"):
        node.assign(NodeAssignment(placement, EngineConfig(), peers=peers), Path("folder"))
    assert not node.received
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before
