"""Devices (peak rates, memory, power, price) and links (bandwidth, latency) by name."""

import re
from dataclasses import dataclass, replace
from math import inf, isclose

from gllm.config.emulation import DEFAULT_HOST


@dataclass(frozen=True)
class DeviceSpec:
    """Specification of one GPU model: peak FLOP/s, memory size and bandwidth, power and price."""

    flops: float
    """Dense bf16 FLOP/s with fp32 accumulation (V100: fp16)."""
    bandwidth: float
    """Memory bandwidth in bytes/s."""
    memory: float
    """Memory size in bytes."""
    power: float | None = None
    """Power limit in watts."""
    price: float | None = None
    """Rental price in US dollars per hour, on demand; None if unknown."""
    launch_seconds: float | None = None
    """Time in seconds in which the host of such a device launches the kernels of one layer; None if
    unknown: cost models then assume a typical host."""


A100_LAUNCH_SECONDS, H100_LAUNCH_SECONDS = 0.55e-3, 0.37e-3
"""Time per layer of single decodes of Llama-2-70B at TP 4 and 8 on DGX-A100 and DGX-H100, where the
GPUs wait for the host: `splitwise_perf_model.csv`."""

DEVICES = {
    "L20": DeviceSpec(119.5e12, 864e9, 48e9, 275),
    "L40": DeviceSpec(181.05e12, 864e9, 48e9, 300, 0.98),
    "A40": DeviceSpec(149.7e12, 696e9, 48e9, 300, 1.28),
    "A6000": DeviceSpec(154.8e12, 768e9, 48e9, 300, 0.82),
    "A100-40G": DeviceSpec(312e12, 1555e9, 40e9, 400, 2.21, A100_LAUNCH_SECONDS),
    "A100-80G": DeviceSpec(312e12, 2039e9, 80e9, 400, 2.21, A100_LAUNCH_SECONDS),
    "A800-80G": DeviceSpec(312e12, 2039e9, 80e9, 400, None, A100_LAUNCH_SECONDS),
    "RTX4090": DeviceSpec(165.2e12, 1008e9, 24e9, 450, 0.26),
    "V100": DeviceSpec(125e12, 900e9, 32e9, 300),
    "H20": DeviceSpec(148e12, 4000e9, 96e9, 400, 1.05, H100_LAUNCH_SECONDS),
    "H100": DeviceSpec(989.4e12, 3350e9, 80e9, 700, 4.25, H100_LAUNCH_SECONDS),
    "H200": DeviceSpec(989.4e12, 4800e9, 141e9, 700, None, H100_LAUNCH_SECONDS),
}
"""NVIDIA's data sheets, without sparsity; SXM form where there is one.

Prices: H100, A100 and A40 as in Vidur (arXiv 2405.05465, its configuration); L40 and A6000 derived
from the budgets of HexGen-2 (arXiv 2502.07903) by least squares; RTX 4090 and H20 from Table 4 of
MoLink's platform paper, which states 1.04 $/h for four RTX 4090. It states none for its H20: 1.05
makes that row's margins agree with its tokens per second, as 1.20 does in the A100's row, for which
the paper states 1.16 (below Vidur's 2.21).
"""


@dataclass(frozen=True)
class NetworkLink:
    """Bandwidth and latency of a network link between pipeline stages or tensor-parallel ranks."""

    bandwidth: float
    """Bytes/s in one direction."""
    latency: float
    """Latency of a message in seconds."""
    node: str | None = None
    """Node type in Vidur's tables whose measured all-reduce times apply to such links; None:
    computed from bandwidth and latency."""


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


@dataclass(frozen=True)
class HostSpec:
    """Cores and memory of the machine of a device, which compute experts there."""

    bandwidth: float
    """Bytes/s at which its cores read weights."""
    flops: float
    """FLOP/s of its matrix multiplications."""
    link: NetworkLink = LINKS["pcie"]
    """Link to the device."""


HOST_HELP = (
    "cores and memory that compute experts of --cpu-experts: gigabytes per second at which they "
    "read weights and their teraflops, such as 200:4"
)


def parse_host(text: str) -> HostSpec:
    """Return a host by gigabytes per second and teraflops, such as 200:4. Raises ValueError."""
    try:
        bandwidth, flops = (float(part) for part in text.split(":"))
        is_valid = 0 < bandwidth < inf and 0 < flops < inf
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(
            f"{text!r} has to be gigabytes per second and teraflops above 0, such as {DEFAULT_HOST}"
        )
    return HostSpec(bandwidth * 1e9, flops * 1e12)


GBIT_BYTES = 1e9 / 8
"""Bytes per gigabit."""
LINK_FORM = re.compile(r"(\d*\.?\d+)gbit(?:\+(\d*\.?\d+)ms)?")
"""Name of a link that is not in LINKS: its rate and its delay, as in 25gbit+0.1ms."""


def find_link(kind: str, name: str) -> NetworkLink:
    """Return a link by its name of LINKS, or by its rate and delay, such as 25gbit+0.1ms.

    Args:
        kind: Kind of link for the message, such as "link".
        name: Name of the link.

    Raises:
        ValueError: There is no such link, or its rate is 0.
    """
    if name in LINKS:
        return LINKS[name]
    match = LINK_FORM.fullmatch(name)
    if match is None or not float(match[1]):
        raise ValueError(
            f"{kind} {name!r} is none of {', '.join(LINKS)}, and no rate with a delay, such as "
            "25gbit+0.1ms"
        )
    return NetworkLink(float(match[1]) * GBIT_BYTES, float(match[2] or 0) * 1e-3)


def name_link(gbit: float, milliseconds: float) -> str:
    """Return the name with which `find_link` finds a link of a rate and a one-way delay."""
    link = NetworkLink(gbit * GBIT_BYTES, milliseconds * 1e-3)
    for name, known in LINKS.items():
        if isclose(known.bandwidth, link.bandwidth) and isclose(known.latency, link.latency):
            return name
    numbers = (f"{number:.6f}".rstrip("0").rstrip(".") for number in (gbit, milliseconds))
    return "{}gbit+{}ms".format(*numbers)


def rank_link_for(device: str, name: str) -> NetworkLink:
    """Return the link between the tensor-parallel ranks of a stage, by its name.

    Args:
        device: A name of DEVICES; it selects the measured all-reduce times for `nvlink`.
        name: As in `find_link`.

    Raises:
        ValueError: There is no such link.
    """
    link = find_link("tensor_parallel_link", name)
    if name == "nvlink":
        return replace(link, node=NVLINK_NODES.get(device))
    return link
