"""Tables of both MoLink papers: serving over weak links, cell by cell.

First paper: "Distributed LLM Serving on Consumer-Grade GPUs by Reconciling Computation and
Communication", Findings of EMNLP 2025. Platform paper: the later description of MoLink as a
platform of rented nodes, whose Table 3 counts profit and whose Table 4 compares with two servers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple


class PaperLatencies(NamedTuple):
    """Mean latencies in seconds."""

    ttft: float
    tpot: float
    e2el: float


@dataclass(frozen=True)
class WeakLinkSetting:
    """Links, load and hardware of one row."""

    rate: float
    """Requests per second."""
    megabits: float = 100.0
    """Rate of every link in Mbit/s."""
    delay_ms: float = 30.0
    """One-way delay of every link."""
    model: str = "qwen2.5-7b"
    device: str = "RTX4090"
    num_stages: int = 3
    max_prompt_tokens: int = 2048
    max_output_tokens: int = 1024
    is_quantized: bool = False
    """Weights of 4 bits (AWQ)."""


@dataclass(frozen=True)
class LatencyRow:
    """Row of a table of the first paper."""

    table: str
    label: str
    setting: WeakLinkSetting
    cells: Mapping[str, PaperLatencies]
    """By system."""
    doubt: str = ""
    """Inconsistency of the row within the paper; such a row is shown but not counted."""


def _row(
    table: str,
    label: str,
    setting: WeakLinkSetting,
    *cells: tuple[float, float, float],
    doubt: str = "",
) -> LatencyRow:
    systems = zip(("vllm", "helix", "molink"), cells, strict=True)
    return LatencyRow(
        table, label, setting, {name: PaperLatencies(*cell) for name, cell in systems}, doubt
    )


BASE_RATE = 0.3
"""Requests per second of Tables 3 to 5."""
RATE_DOUBT = "equals the rows of Tables 3 and 4, which the paper labels 0.3 requests/s"
SAME_DOUBT = "the figures of Table 2's row of 0.2 requests/s"
_MIDDLE = ((3.74, 0.50, 111.0), (3.42, 0.47, 106.0), (3.30, 0.41, 93.0))
"""The row that Tables 2, 3 and 4 share."""

LATENCY_ROWS = (
    _row("2", "0.7 requests/s", WeakLinkSetting(0.7),
         (17.3, 3.49, 509), (14.2, 3.42, 497), (9.29, 3.01, 449)),
    _row("2", "0.3 requests/s", WeakLinkSetting(0.3),
         (6.20, 1.69, 306), (5.66, 1.65, 299), (5.23, 1.30, 256)),
    _row("2", "0.2 requests/s", WeakLinkSetting(0.2), *_MIDDLE, doubt=RATE_DOUBT),
    _row("2", "0.1 requests/s", WeakLinkSetting(0.1),
         (3.39, 0.28, 74), (3.27, 0.29, 75), (3.23, 0.26, 69)),
    _row("3", "60 Mbit/s", WeakLinkSetting(BASE_RATE, 60),
         (8.07, 1.24, 229), (7.34, 1.21, 223), (7.32, 1.07, 213)),
    _row("3", "100 Mbit/s", WeakLinkSetting(BASE_RATE), *_MIDDLE, doubt=SAME_DOUBT),
    _row("3", "200 Mbit/s", WeakLinkSetting(BASE_RATE, 200),
         (2.02, 0.29, 68), (1.86, 0.28, 64), (1.83, 0.25, 58)),
    _row("3", "400 Mbit/s", WeakLinkSetting(BASE_RATE, 400),
         (1.45, 0.25, 56), (1.35, 0.23, 53), (1.26, 0.21, 47)),
    _row("4", "10 ms", WeakLinkSetting(BASE_RATE, delay_ms=10),
         (3.25, 0.31, 72), (3.13, 0.31, 72), (3.12, 0.27, 63)),
    _row("4", "20 ms", WeakLinkSetting(BASE_RATE, delay_ms=20),
         (3.46, 0.41, 94), (3.28, 0.40, 92), (3.19, 0.34, 79)),
    _row("4", "30 ms", WeakLinkSetting(BASE_RATE), *_MIDDLE, doubt=SAME_DOUBT),
    _row("4", "50 ms", WeakLinkSetting(BASE_RATE, delay_ms=50),
         (3.81, 0.67, 143), (3.73, 0.65, 139), (3.70, 0.59, 127)),
)  # fmt: skip
"""Tables 2 to 4 of the first paper: Qwen2-7B in 16 bits on three RTX 4090, lengths of azure-conv up
to 2,048 and 1,024 tokens; 100 Mbit/s and 30 ms unless the row says otherwise."""

ABLATION: Mapping[str, PaperLatencies] = MappingProxyType(
    {
        "molink": PaperLatencies(3.30, 0.41, 93.07),
        "chunks only": PaperLatencies(3.37, 0.44, 99.25),
        "micro-batches only": PaperLatencies(3.60, 0.43, 97.23),
        "neither": PaperLatencies(3.56, 0.48, 107.45),
    }
)
"""Table 5 of the first paper, at BASE_RATE."""


class ThroughputCell(NamedTuple):
    """Figures of a system in the platform paper."""

    tokens_per_second: float
    ttft: float
    """Seconds, mean."""
    tpot: float
    """Seconds, mean."""


@dataclass(frozen=True)
class PlatformRow:
    """Row of Tables 2 and 3 of the platform paper."""

    label: str
    setting: WeakLinkSetting
    cells: Mapping[str, ThroughputCell]
    margins: Mapping[str, float]
    """Table 3: profit over cost in per cent, by system."""
    doubt: str = ""
    """Inconsistency of the margin of MoLink with Table 2."""


def _platform_row(
    megabits: float,
    rate: float,
    petals: tuple[float, float, float],
    vllm: tuple[float, float, float],
    molink: tuple[float, float, float],
    margins: tuple[float, float, float],
    doubt: str = "",
) -> PlatformRow:
    setting = WeakLinkSetting(
        rate, megabits, PLATFORM_DELAY_MS, "llama-2-7b", "RTX4090", 2, 256, 512
    )
    systems = ("petals", "vllm", "molink")
    cells = zip(systems, (petals, vllm, molink), strict=True)
    return PlatformRow(
        f"{megabits:g} Mbit/s, {rate:g} requests/s",
        setting,
        {name: ThroughputCell(*cell) for name, cell in cells},
        dict(zip(systems, margins, strict=True)),
        doubt,
    )


PLATFORM_DELAY_MS = 10.0
"""One-way delay of the first row of the platform paper's Table 2; assumed for all."""

PLATFORM_ROWS = (
    _platform_row(100, 0.5, (23.4, 0.261, 0.116), (89.7, 0.245, 0.247), (106.2, 0.231, 0.102),
                  (-80.3, -24.5, -10.6)),
    _platform_row(100, 1.0, (45.3, 0.279, 0.290), (135.9, 0.264, 0.348), (196.1, 0.243, 0.255),
                  (-61.8, 14.3, 65.1)),
    _platform_row(1000, 0.5, (26.4, 0.204, 0.193), (91.7, 0.177, 0.168), (111.2, 0.181, 0.170),
                  (-77.7, -22.9, -6.5)),
    _platform_row(1000, 1.0, (47.1, 0.209, 0.162), (164.0, 0.180, 0.198), (208.0, 0.189, 0.144),
                  (-60.4, 38.0, 75.0)),
    _platform_row(10_000, 0.5, (21.3, 0.200, 0.097), (92.1, 0.182, 0.176), (119.1, 0.130, 0.056),
                  (-82.0, -22.5, -11.1),
                  "119.11 tokens/s would be +0.3 %: Table 3 is computed from 105.687"),
    _platform_row(10_000, 1.0, (41.9, 0.199, 0.107), (215.4, 0.175, 0.183), (221.6, 0.148, 0.056),
                  (-64.8, 81.3, 86.5)),
)  # fmt: skip
"""Tables 2 and 3 of the platform paper: Llama-2-7B in 16 bits on two RTX 4090, lengths of
azure-conv up to 256 and 512 tokens."""

TTFT_AVERAGES: Mapping[str, float] = MappingProxyType({"petals": -0.176, "vllm": -0.084})
TPOT_AVERAGES: Mapping[str, float] = MappingProxyType({"petals": -0.228, "vllm": -0.415})
"""Mean changes of MoLink against another system over Table 2, as the platform paper states them."""


SERVER_SETTINGS: Mapping[str, WeakLinkSetting] = MappingProxyType(
    {
        name: WeakLinkSetting(1, 1000, 25, "llama-2-70b", device, num_stages, 256, 512, True)
        for name, device, num_stages in (
            ("H20", "H20", 1),
            ("A100", "A100-80G", 1),
            ("molink", "RTX4090", 4),
        )
    }
)
"""Servers of Table 4 at one request per second. Neither links nor lengths are stated: links of
1 Gbit/s and 25 ms were chosen for its TTFT and TPOT at that rate; its tokens per second are the
output tokens of Table 2's lengths."""


class ServerCell(NamedTuple):
    """Figures of a server at one rate in Table 4 of the platform paper."""

    tokens_per_second: float
    ttft: float
    """Seconds, mean."""
    tpot: float
    """Seconds, mean."""
    margin: float
    """Profit over cost in per cent."""


SERVER_RATES = (1, 3, 5, 6, 7, 8)
"""Requests per second of Table 4 of the platform paper."""


def _server(
    tokens: tuple[float, ...],
    ttft: tuple[float, ...],
    tpot: tuple[float, ...],
    margin: tuple[float, ...],
) -> Mapping[int, ServerCell]:
    cells = zip(tokens, ttft, tpot, margin, strict=True)
    return {rate: ServerCell(*cell) for rate, cell in zip(SERVER_RATES, cells, strict=True)}


SERVERS: Mapping[str, Mapping[int, ServerCell]] = MappingProxyType(
    {
        "H20": _server(
            (193, 426, 265, 279, 430, 405),
            (0.16, 0.87, 26, 78, 120, 167),
            (0.046, 0.484, 1.6, 1.776, 1.983, 2.181),
            (82, 302, 150, 163, 305, 282),
        ),
        "A100": _server(
            (186, 462, 606, 605, 595, 343),
            (0.17, 0.21, 1.5, 16, 30, 45),
            (0.047, 0.071, 0.772, 0.844, 0.983, 1.195),
            (53, 281, 400, 399, 391, 183),
        ),
        "molink": _server(
            (150, 442, 738, 855, 927, 909),
            (0.57, 0.56, 0.53, 0.59, 0.60, 14.5),
            (0.362, 0.408, 0.438, 0.526, 0.601, 0.745),
            (31, 287, 546, 648, 711, 696),
        ),
    }
)
"""Table 4 of the platform paper: Llama-2-70B with AWQ on one H20, on one A100, and on four rented
servers with an RTX 4090 each behind tunnels."""
