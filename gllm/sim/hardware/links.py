"""Links between stages and between ranks: bandwidth and latency."""

from dataclasses import dataclass


@dataclass(frozen=True)
class NetworkLink:
    """Between neighbouring stages, or the ranks of one: bytes/s, seconds."""

    bandwidth: float
    latency: float


LINKS = {
    "pcie": NetworkLink(20.79e9, 10e-6),
    "network": NetworkLink(73.28e9 / 8, 50e-6),
    "nvlink": NetworkLink(250e9, 5e-6),
}
"""Bandwidths of PCIe and the simulated network as measured by arXiv 2504.14775; the latencies and
NVLink's usable rate are assumptions."""
