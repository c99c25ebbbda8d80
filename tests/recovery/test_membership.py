"""Membership of nodes: who is expected, has joined, is silent, lost or refused."""

import pytest

from gllm.recovery.membership import Membership, NodeStatus


def create(num_nodes: int = 4, **options: int) -> Membership:
    membership = Membership(num_nodes, node_timeout=5.0, join_timeout=300.0, **options)
    membership.begin(0.0)
    return membership


def test_all_ranks_are_awaited_and_the_missing_ones_named() -> None:
    membership = create()
    assert membership.describe_missing() == "1 of 4 nodes; none from rank 1, 2, 3"
    assert membership.on_joined("c", 2, False, 1.0) == ""
    membership.on_refused("10.0.0.7", "the node secrets differ")
    membership.on_refused("10.0.0.7", "the node secrets differ")
    assert membership.describe_missing() == (
        "2 of 4 nodes; none from rank 1, 3; refused: 10.0.0.7 (the node secrets differ)"
    )
    membership.on_accepted("10.0.0.7")
    assert membership.on_joined("b", 1, False, 2.0) == ""
    assert membership.on_joined("d", 3, False, 3.0) == ""
    assert membership.is_complete
    assert membership.describe_missing() == ""
    assert membership.members == ["b", "c", "d"]


def test_the_time_for_joining_ends() -> None:
    membership = create(2)
    assert not membership.has_expired(299.0)
    assert membership.has_expired(300.0)
    membership.on_joined("b", 1, False, 299.5)
    assert not membership.has_expired(1000.0)


def test_a_cluster_of_the_head_alone_is_complete() -> None:
    membership = create(1)
    assert membership.is_complete
    assert membership.on_joined("b", None, False, 0.0) == ""
    assert membership.nodes["b"].status is NodeStatus.SPARE


@pytest.mark.parametrize(
    ("rank", "cause"),
    [
        (0, "node rank 0 is the head itself"),
        (4, "no node rank 4, because the head was started with --nnodes 4"),
        (3, ""),
        (None, ""),
    ],
)
def test_ranks_that_do_not_exist_are_refused_for_good(rank: int | None, cause: str) -> None:
    membership = create()
    assert cause in membership.unsupported_reason(rank)
    assert bool(membership.unsupported_reason(rank)) == bool(cause)
    assert bool(membership.on_joined("b", rank, False, 0.0)) == bool(cause)


def test_the_name_of_the_heads_node_is_refused_for_good() -> None:
    membership = create()
    assert "belongs to the head" in membership.unsupported_reason(1, "local")
    assert membership.on_joined("local", 1, False, 0.0)


def test_nodes_without_a_rank_fill_the_places_of_missing_ranks() -> None:
    membership = create()
    for name, rank in (("x", None), ("c", 2), ("y", None)):
        assert membership.on_joined(name, rank, False, 0.0) == ""
    assert membership.members == ["x", "c", "y"]
    assert membership.on_joined("z", None, False, 1.0) == ""
    assert membership.spares == ["z"]


def test_a_ranked_node_is_a_member_even_if_others_have_come_first() -> None:
    membership = create(3)
    membership.on_joined("x", None, False, 0.0)
    assert membership.describe_missing() == ("2 of 3 nodes; none from rank 1, 2; 1 without a rank")
    membership.on_joined("b", 1, False, 1.0)
    assert membership.members == ["b", "x"]


def test_names_and_ranks_of_living_nodes_are_refused() -> None:
    membership = create()
    membership.on_joined("b", 1, False, 0.0)
    assert "a node named b is a member already" in membership.on_joined("b", 2, False, 1.0)
    assert "node rank 1 belongs to b already" in membership.on_joined("c", 1, False, 1.0)
    assert [*membership.nodes] == ["b"]
    assert membership.nodes["b"].rank == 1


def test_silent_nodes_are_found_and_may_return() -> None:
    membership = create(3)
    membership.on_joined("b", 1, False, 0.0)
    membership.on_joined("c", 2, False, 0.0)
    membership.finish_forming()
    membership.record_message("b", 3.0)
    assert membership.silent_nodes(4.9) == []
    assert membership.silent_nodes(5.0) == ["c"]
    membership.on_lost("c", "silent for 5 seconds", 5.0)
    assert membership.silent_nodes(6.0) == []
    membership.record_message("c", 6.0)
    assert membership.nodes["c"].status is NodeStatus.LOST, "a late message"
    assert membership.on_joined("c", 2, False, 7.0) == ""
    record = membership.nodes["c"]
    assert (record.status, record.num_losses) == (NodeStatus.MEMBER, 1)
    assert record.last_cause == "silent for 5 seconds"
    assert membership.silent_nodes(8.0) == ["b"]


def test_another_node_replaces_the_lost_one_of_its_rank() -> None:
    membership = create(2)
    membership.on_joined("b", 1, False, 0.0)
    membership.finish_forming()
    membership.on_lost("b", "its agent has ended", 1.0)
    assert membership.on_joined("new", 1, False, 2.0) == ""
    assert [*membership.nodes] == ["new"]
    assert membership.nodes["new"].status is NodeStatus.SPARE, "until it gets the stages"
    membership.set_spare("new", is_spare=False)
    assert membership.members == ["new"]


def test_a_node_that_is_lost_while_the_cluster_forms_is_awaited_again() -> None:
    membership = create(2)
    membership.on_joined("b", 1, False, 0.0)
    membership.on_lost("b", "its agent has ended", 1.0)
    assert not membership.is_complete
    assert "lost: b (its agent has ended)" in membership.describe_missing()
    assert membership.on_joined("b", 1, False, 2.0) == ""
    assert membership.members == ["b"]


def test_a_node_that_has_left_is_no_loss() -> None:
    membership = create(2)
    membership.on_joined("b", 1, False, 0.0)
    membership.on_left("b", "its operator has stopped it")
    assert (membership.nodes["b"].status, membership.nodes["b"].num_losses) == ("left", 0)
    membership.on_lost("b", "its session has ended", 1.0)
    assert membership.nodes["b"].num_losses == 0


def test_spares_are_limited() -> None:
    membership = create(1, max_spares=2)
    for name in "bc":
        assert membership.on_joined(name, None, True, 0.0) == ""
    assert "2 spare nodes already (--max-spares)" in membership.on_joined("d", None, True, 0.0)
    membership.on_lost("b", "silent", 1.0)
    assert membership.on_joined("d", None, True, 2.0) == ""
    assert membership.spares == ["c", "d"]
