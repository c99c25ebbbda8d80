"""Assignments of a generation: the files that its workers share, and nothing that is left."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.cluster.placement import Placement, PlaceName, Slot, make_placement
from gllm.config.engine import EngineConfig
from gllm.runtime import node as node_module
from gllm.runtime.assignment import StageAssignment, decode_parent_message, encode_parent_message
from tests.examples import num_examples
from tests.runtime.scripted_node import ScriptedNode


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
        self.on_generation_ready()
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
    slots = [Slot(11 + place) for place in range(sum(degrees))]
    placement = make_placement(3, layers, slots, degrees)
    node = RecordingNode()
    record = os.memfd_create("plans")
    node.assign(placement, EngineConfig(), Path("folder"), record, output_lengths={1: [2]})
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


def named_edges(placement: Placement) -> list[tuple[PlaceName, PlaceName]]:
    ranks = placement.degrees
    return [
        (
            PlaceName(edge.source, edge.source_rank, ranks[edge.source]),
            PlaceName(edge.target, edge.target_rank, ranks[edge.target]),
        )
        for edge in placement.edges
    ]


def test_files_that_cannot_be_created_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = len(os.listdir("/proc/self/fd"))

    def fail(name: str) -> None:
        raise OSError(24, f"no descriptor for {name}")

    monkeypatch.setattr(node_module, "create_region", fail)
    node = RecordingNode()
    placement = make_placement(1, [(0, 1), (1, 2)], [Slot(1), Slot(2), Slot(3)], [1, 2])
    with pytest.raises(OSError, match="region-1"):
        node.assign(placement, EngineConfig(), Path("folder"))
    assert not node.received, "no worker was told anything"
    node.close()
    assert len(os.listdir("/proc/self/fd")) == before
