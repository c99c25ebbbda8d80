"""Selection of the nodes of a service, compared with all other selections."""

import math
from itertools import combinations, pairwise, permutations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gllm.deploy.cluster.selection import (
    MAX_EXACT_NODES,
    LinkQuality,
    NetworkView,
    NodeCandidate,
    NodeRequirements,
    SelectionError,
    choose_head,
    select_nodes,
)
from tests.support.examples import num_examples

NAMES = "abcdefg"


def seconds_of(names: "tuple[str, ...] | list[str]", network: NetworkView) -> float:
    return math.fsum(network.message_seconds(*pair) for pair in pairwise(names))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[list[NodeCandidate], NetworkView]:
    names = NAMES[: draw(st.integers(1, 6))]
    candidates = [
        NodeCandidate(
            name,
            ("gpu",) * draw(st.sampled_from([0, 0, 1, 2, 3, 4])),
            draw(st.integers(1, 64)),
            draw(st.integers(0, 4)) * 2**30,
            draw(st.floats(0, 1)),
            draw(st.integers(0, 5)) > 0,
        )
        for name in names
    ]
    trips = {name: draw(st.floats(1e-4, 0.2)) for name in names if draw(st.booleans())}
    links = {
        frozenset(pair): LinkQuality(
            draw(st.none() | st.floats(1e-4, 0.2)), draw(st.none() | st.floats(1e6, 1e9))
        )
        for pair in combinations(names, 2)
        if draw(st.booleans())
    }
    return candidates, NetworkView(trips, links)


@settings(max_examples=num_examples(60, 2000), deadline=None)
@given(cluster=clusters(), data=st.data())
def test_selections_meet_all_rules(
    cluster: tuple[list[NodeCandidate], NetworkView], data: st.DataObject
) -> None:
    candidates, network = cluster
    requirements = NodeRequirements(
        data.draw(st.integers(1, 6)),
        data.draw(st.sampled_from([0, 0, 1, 2])),
        data.draw(st.integers(0, 2)) * 2**30,
    )
    fitting = [
        each
        for each in candidates
        if len(each.devices) >= requirements.gpus_per_node
        and each.memory_bytes >= requirements.memory_bytes_per_node
    ]
    try:
        selection = select_nodes(candidates, requirements, network)
    except SelectionError:
        # Too few nodes, or too many that only dial.
        assert len(fitting) < requirements.num_nodes or not all(n.is_reachable for n in fitting)
        return
    chosen = {each.name: each for each in candidates if each.name in selection.nodes}
    assert len(set(selection.nodes)) == len(selection.nodes) == requirements.num_nodes
    assert all(each in fitting for each in chosen.values())
    # Nodes with more GPUs come first.
    others = [each for each in fitting if each.name not in chosen]
    least = min(len(each.devices) for each in chosen.values())
    assert all(len(each.devices) <= least for each in others)
    # The head accepts connections, and of two neighbours one does.
    order = [chosen[name] for name in selection.nodes]
    assert order[0].is_reachable or len(order) == 1
    assert all(left.is_reachable or right.is_reachable for left, right in pairwise(order))
    # No order of the stages from the same head is faster.
    for rest in permutations(selection.nodes[1:]):
        nodes = [order[0], *(chosen[name] for name in rest)]
        if all(left.is_reachable or right.is_reachable for left, right in pairwise(nodes)):
            least_seconds = seconds_of((selection.nodes[0], *rest), network)
            assert seconds_of(selection.nodes, network) <= least_seconds * (1 + 1e-9)
    for node, degree in zip(order, selection.degrees, strict=True):
        assert degree == (
            requirements.gpus_per_node or 1 << (max(1, len(node.devices))).bit_length() - 1
        )
    is_even = len({each.speed_kind for each in order}) == 1
    assert selection.layers == ("even" if is_even else "auto")
    shuffled = data.draw(st.permutations(candidates))
    assert select_nodes(shuffled, requirements, network) == selection


@settings(max_examples=num_examples(50, 2000), deadline=None)
@given(cluster=clusters())
def test_no_node_beats_the_head_in_both_cpu_and_network(
    cluster: tuple[list[NodeCandidate], NetworkView],
) -> None:
    candidates, network = cluster
    able = [each for each in candidates if each.is_reachable or len(candidates) == 1]
    assume(able)
    head = choose_head(candidates, network)

    def distance(node: NodeCandidate) -> float:
        return math.fsum(
            network.message_seconds(node.name, each.name) for each in candidates if each != node
        )

    for other in able:
        assert not (other.idle_cores > head.idle_cores and distance(other) < distance(head))
        is_as_good = other.idle_cores >= head.idle_cores and distance(other) <= distance(head)
        assert (
            other == head
            or not is_as_good
            or other.name > head.name
            or ((other.idle_cores, distance(other)) == (head.idle_cores, distance(head)))
        )


def nodes(**gpus: int) -> list[NodeCandidate]:
    return [NodeCandidate(name, ("gpu",) * count, 8, 2**33) for name, count in gpus.items()]


def test_nodes_with_several_gpus_come_first_and_close_ones_complete_them() -> None:
    trips = {"far": 0.2, "near": 0.001, "big": 0.001, "cpu": 0.001}
    selection = select_nodes(
        nodes(far=1, near=1, cpu=0, big=4), NodeRequirements(2), NetworkView(trips)
    )
    assert set(selection.nodes) == {"big", "near"}
    assert dict(zip(selection.nodes, selection.degrees, strict=True)) == {"big": 4, "near": 1}
    assert selection.layers == "auto"


def test_bandwidth_orders_the_pipeline() -> None:
    fast = [{"a", "c"}, {"c", "b"}, {"b", "d"}, {"d", "a"}]
    links = {
        frozenset(pair): LinkQuality(0.001, 1e9 if set(pair) in fast else 1e6)
        for pair in combinations("abcd", 2)
    }
    selection = select_nodes(nodes(a=0, b=0, c=0, d=0), NodeRequirements(4), NetworkView({}, links))
    assert selection.nodes == ("a", "c", "b", "d")
    assert selection.layers == "even"


def test_the_head_has_idle_cores_and_a_good_network() -> None:
    busy = NodeCandidate("busy", (), 64, 0, 1.0)
    idle = NodeCandidate("idle", (), 16)
    far = NodeCandidate("far", (), 16)
    network = NetworkView({"busy": 0.001, "idle": 0.001, "far": 0.1})
    assert choose_head([busy, idle, far], network) == idle


def test_two_nodes_that_only_dial_are_kept_apart_or_refused() -> None:
    candidates = [NodeCandidate(name, is_reachable=name == "c") for name in "abc"]
    assert select_nodes(candidates, NodeRequirements(2), NetworkView()).nodes[0] == "c"
    with pytest.raises(SelectionError, match="neither accepts connections"):
        select_nodes(candidates, NodeRequirements(3), NetworkView())
    with pytest.raises(SelectionError, match="the head has to"):
        select_nodes(candidates[:2], NodeRequirements(2), NetworkView())


def test_too_few_nodes_and_named_ones() -> None:
    candidates = nodes(a=1, b=2)
    with pytest.raises(SelectionError, match="3 nodes are needed, but 2 of the 2 free ones fit"):
        select_nodes(candidates, NodeRequirements(3), NetworkView())
    with pytest.raises(SelectionError, match="a: it has 1 GPUs of 2"):
        select_nodes(candidates, NodeRequirements(2, 2), NetworkView())
    with pytest.raises(SelectionError, match=r"a: it has 8\.0 GiB of 9\.0 GiB of memory"):
        select_nodes(candidates, NodeRequirements(1, 0, 9 * 2**30), NetworkView())
    selection = select_nodes(candidates, NodeRequirements(1, names=("a",)), NetworkView())
    assert selection.nodes == ("a",)
    with pytest.raises(SelectionError, match="node c cannot be used: it is not free"):
        select_nodes(candidates, NodeRequirements(1, names=("c",)), NetworkView())


def test_many_nodes_are_ordered_quickly_and_well() -> None:
    """On a line of nodes the path goes from one end to the other, up to the head's place."""
    names = [f"n{place:02}" for place in range(MAX_EXACT_NODES + 6)]
    links = {
        frozenset((left, right)): LinkQuality(0.001 * abs(i - j), None)
        for i, left in enumerate(names)
        for j, right in enumerate(names[:i])
    }
    candidates = [NodeCandidate(name, num_cores=9 if name == "n00" else 1) for name in names]
    network = NetworkView({}, links)
    selection = select_nodes(candidates, NodeRequirements(len(names)), network)
    head = names.index(selection.nodes[0])
    best = (len(names) - 1 + min(head, len(names) - 1 - head)) * 0.0005
    assert seconds_of(selection.nodes, network) <= best * 1.1
