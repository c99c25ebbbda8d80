"""Registry of rank groups. A kind is one file in this folder and one line of GROUPS."""

import importlib
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, cast

from gllm.transport.base import OnTransportError
from gllm.transport.edge import AUTO
from gllm.transport.region import Region, RegionLayout

if TYPE_CHECKING:
    from gllm.kernels.all_reduce import RankGroup
    from gllm.transport.device_streams import DeviceRuntime, DeviceStream


class StageGroups(NamedTuple):
    """Communicators of a stage's tensor parallel ranks: one for the layers, one for the LM head.

    Cancelling one of them cancels both.
    """

    layers: "RankGroup"
    """Communicator for the thread that computes the layers."""
    head: "RankGroup"
    """Communicator for the thread that computes logits and samples."""


GROUPS = MappingProxyType(
    {
        "host-staging": ("gllm.transport.staged_group", "open_staged_groups"),
        "nccl": ("gllm.transport.nccl_group", "open_nccl_groups"),
        "shared-memory": ("gllm.transport.shared_region", "open_shared_groups"),
    }
)
"""Kinds of groups to their module and the function that opens them, imported on first use."""


def open_groups(
    region: Region,
    rank: int,
    ranks: int,
    layout: RegionLayout,
    default: str = "shared-memory",
    device: "tuple[DeviceRuntime, DeviceStream] | None" = None,
    on_error: OnTransportError = lambda error: None,
) -> StageGroups:
    """Open the communicators of this tensor parallel rank with the other ranks of its stage.

    Args:
        region: shared memory of the ranks; its descriptors may be closed afterwards.
        rank: number of this rank, from 0.
        ranks: number of ranks of the stage.
        layout: largest tensors that the ranks exchange; equal on all ranks.
        default: name in GROUPS of the communicator to use if `region.transport` is AUTO.
        device: device that computes the stage and its compute stream; None on a CPU.
        on_error: called with the error if a communicator fails on a background thread.
    """
    module, function = GROUPS[default if region.transport == AUTO else region.transport]
    extra = () if device is None else (*device, on_error)
    open_all = getattr(importlib.import_module(module), function)
    return cast(StageGroups, open_all(region.descriptors, rank, ranks, layout, *extra))
