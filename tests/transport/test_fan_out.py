"""Edges between stages whose numbers of ranks differ."""

import pytest
import torch

from gllm.transport.base import EdgeLayout, StepFailedError
from gllm.transport.edge import Edge, create_edge
from gllm.transport.registry import FanOutSender, join_senders, open_edges

SHAPE = EdgeLayout(slots=3, max_tokens=8, hidden_size=3, itemsize=4)


def make_edges(count: int) -> list[Edge]:
    """Edges over shared memory."""
    return [create_edge(f"test-edge-{number}", "shared-memory") for number in range(count)]


@pytest.mark.parametrize("num_receivers", [1, 2, 3])
def test_each_receiver_gets_the_activations_and_the_errors(num_receivers: int) -> None:
    edges = make_edges(num_receivers)
    _, senders = open_edges(None, edges, "shared-memory", SHAPE, torch.float32)
    sender = join_senders([each for (each,) in senders])
    receivers = [open_edges(edge, [], "", SHAPE, torch.float32)[0][0] for edge in edges]
    hidden = torch.arange(6.0).view(2, 3)
    sender.send(0, hidden)
    sender.fail(1, "no memory")
    hidden.zero_()
    sender.send(2, hidden[:1])
    for receiver in receivers:
        assert receiver.receive(0, 2).tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
        with pytest.raises(StepFailedError, match="no memory"):
            receiver.receive(1, 2)
        # Each receiver may overwrite its own copy.
        assert receiver.receive(2, 1).sub_(1).tolist() == [[-1.0] * 3]
    sender.close()
    for receiver, edge in zip(receivers, edges, strict=True):
        receiver.close()
        edge.close()


def test_a_rank_without_receivers_sends_nothing() -> None:
    sender = join_senders([])
    assert isinstance(sender, FanOutSender)
    sender.send(0, torch.zeros(1, 3))
    sender.fail(1, "no memory")
    sender.close()
