"""What gllm is meant to reach beside its peers, and whether it did.

Owns the aims. Knows nothing of how figures are measured.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.cpu.loads import streams_name
from benchmarks.cpu.model import WEIGHT_BYTES
from benchmarks.cpu.report import SPEEDS, cells_of, peers_of, ratio
from benchmarks.cpu.results import Results
from gllm.sim.report import format_table, show_value

OURS, OURS_INT8 = "gllm", "gllm-int8"
SERVERS = ("llama.cpp", "vllm")
"""Whose better one is to be beaten over HTTP."""
LIBRARIES = ("openvino", "llama.cpp", "vllm", "transformers")
LIBRARIES_INT8 = ("openvino-int8",)
SERVED = {1: 1.15, 4: 1.3, 16: 1.4}
"""By streams: least ratio of output tokens a second."""
CROWDED = 16
"""Streams at which latencies have to be lower, too."""
IN_PROCESS, IN_PROCESS_INT8 = 0.95, 1.0
MEMORY_OVERHEAD = 450e6
"""Bytes beside weights and KV cache, at most."""


class Verdict(NamedTuple):
    """One aim."""

    what: str
    seen: float
    aim: float
    is_least: bool
    """Whether the aim is the least that will do; else the most."""

    @property
    def met(self) -> bool:
        return self.seen >= self.aim if self.is_least else self.seen <= self.aim


def _beside(
    results: Results,
    peers: tuple[str, Iterable[str]],
    cell: str,
    key: str,
    what: str,
    aim: float,
    best: Callable[[Iterable[float]], float] = max,
) -> list[Verdict]:
    """The aim of a ratio, where both sides were measured."""
    ours, others = peers
    seen = ratio(results.rows, ours, others, cell, key, best)
    return [] if seen is None else [Verdict(f"{what}, x the best", seen, aim, best is max)]


def server_verdicts(results: Results) -> list[Verdict]:
    """Throughput, latencies under many streams, and memory of the server."""
    both, key, found = (OURS, SERVERS), SPEEDS["server"], []
    for streams, aim in SERVED.items():
        cell = streams_name(streams)
        found += _beside(results, both, cell, key, f"output tokens/s, {cell}", aim)
    crowded = streams_name(CROWDED)
    for name, figure in {"TTFT, median": "median_ttft_ms", "ITL, p99": "p99_itl_ms"}.items():
        found += _beside(results, both, crowded, figure, f"{name}, {crowded}", 1.0, min)
    memory = max((row.pss for row in results.rows if row.peer == OURS), default=0)
    if memory:
        over = memory - WEIGHT_BYTES - results.asked["kv_cache_memory"]
        what = "peak PSS beyond weights and KV cache, MB"
        found.append(Verdict(what, over / 1e6, MEMORY_OVERHEAD / 1e6, False))
    return found


def in_process_verdicts(results: Results) -> list[Verdict]:
    """Every cell beside the best library, in bfloat16 and in int8."""
    sides = ((OURS, LIBRARIES, IN_PROCESS), (OURS_INT8, LIBRARIES_INT8, IN_PROCESS_INT8))
    found = []
    for ours, others, aim in sides:
        for cell in cells_of(results):
            what = f"{ours}, {cell}"
            found += _beside(results, (ours, others), cell, SPEEDS["in-process"], what, aim)
    return found


VERDICTS = {"server": server_verdicts, "in-process": in_process_verdicts}


def verdict_table(results: Results) -> str:
    """The aims of a mode; empty where it has none."""
    if results.mode not in VERDICTS or OURS not in peers_of(results):
        return ""
    rows = [
        [
            *(each.what, show_value(each.seen)),
            f"{'at least' if each.is_least else 'at most'} {each.aim:g}",
            "met" if each.met else "**missed**",
        ]
        for each in VERDICTS[results.mode](results)
    ]
    return format_table(["", "seen", "aim", ""], rows) if rows else ""
