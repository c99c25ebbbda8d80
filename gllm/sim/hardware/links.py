"""Links between stages and between ranks: bandwidth, latency, and the node that was measured."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class NetworkLink:
    """Connection of neighbouring stages, or of the ranks of one."""

    bandwidth: float
    """Bytes/s in one direction."""
    latency: float
    """Seconds."""
    node: str | None = None
    """Node type in Vidur's table of collectives that has measured all-reduces on such links."""


LINKS = {
    "pcie": NetworkLink(20.79e9, 10e-6),
    "network": NetworkLink(73.28e9 / 8, 50e-6),
    "nvlink": NetworkLink(250e9, 5e-6),
    "a100-dgx": NetworkLink(250e9, 5e-6, "a100_dgx"),
    "a100-pairs": NetworkLink(250e9, 5e-6, "a100_pairwise_nvlink"),
    "h100-dgx": NetworkLink(350e9, 5e-6, "h100_dgx"),
    "h100-pairs": NetworkLink(350e9, 5e-6, "h100_pairwise_nvlink"),
}
"""Bandwidths of PCIe and the simulated network as measured by arXiv 2504.14775; those of NVLink are
Vidur's send/receive of 32 and 64 MiB, rounded; latencies are assumptions. `-dgx`: all GPUs of a
node on NVSwitch; `-pairs`: NVLink within pairs, PCIe between them."""

NVLINK_NODES = {
    "A100-40G": "a100_dgx",
    "A100-80G": "a100_dgx",
    "H100": "h100_dgx",
    "H200": "h100_dgx",
}
"""Node type whose all-reduces stand for `nvlink` between ranks, by device; H200 and H100 have the
same NVLink. Devices that are not here take the formulas."""


def rank_link_for(device: str, name: str) -> NetworkLink:
    """Return the link of a name between ranks on a device; `nvlink` depends on the device."""
    link = LINKS[name]
    if name == "nvlink":
        return replace(link, node=NVLINK_NODES.get(device))
    return link
