"""A rank alone: shapes are those of a group, and nobody is waited for."""

import pytest
import torch

from gllm.transport.solo_group import create_solo_groups


@pytest.mark.parametrize("device", [None, torch.device("cpu")])
@pytest.mark.parametrize("rank", [0, 2])
def test_shapes_are_those_of_a_group(rank: int, device: torch.device | None) -> None:
    group = create_solo_groups(rank, 3, device).layers
    part, bias = torch.randn(4, 8), torch.randn(8)
    assert group.partial(4, 8) is None
    assert torch.equal(group.sum(part, bias, torch.float32), part + bias)
    assert group.sum(part, None, torch.bfloat16).dtype == torch.bfloat16
    assert torch.equal(group.maximum(bias), bias)
    gathered = group.gather(part, [8, 8, 7])
    if rank:
        assert gathered is None
    else:
        assert gathered is not None
        assert gathered.shape == (4, 23)
        assert torch.equal(gathered[:, :8], part)
    assert group.agree_on_step(3, "error") == "error"
    assert group.broadcast(None, 2).tolist() == [0, 0]
    group.cancel()
    group.close()
