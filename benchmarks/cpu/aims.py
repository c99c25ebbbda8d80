"""Targets of gllm against its peers, and the verdict on each."""

from collections.abc import Callable, Iterable
from statistics import median
from typing import NamedTuple

from benchmarks.cpu.drivers.timing import decode_name, prefill_name
from benchmarks.cpu.loads import streams_name
from benchmarks.cpu.model import WEIGHT_BYTES
from benchmarks.cpu.report import SPEEDS, cells_of, peers_of, ratio, reading_limits, values
from benchmarks.cpu.results import Results
from gllm.sim.metrics.report import format_table, show_value

OURS, OURS_INT8 = "gllm", "gllm-int8"
SERVERS = ("llama.cpp", "vllm")
"""Peers over HTTP; the target compares with the better one."""
LIBRARIES = ("openvino", "llama.cpp", "vllm", "transformers")
LIBRARIES_INT8 = ("openvino-int8",)
SERVED = {1: 1.15, 4: 1.3, 16: 1.4}
"""Minimum ratio of output tokens per second, by number of streams."""
CROWDED = 16
"""Number of streams at which latencies must also be lower."""
IN_PROCESS, IN_PROCESS_INT8 = 0.95, 1.0
OURS_4_BITS = "gllm-q4_0"
FOUR_BITS = ("llama.cpp-q4_0", "llama.cpp-q4_k_m", "vllm-int4", "openvino-int4")
"""Peers in their 4-bit forms; the target compares with the best one."""
FOUR_BIT_CELLS = {decode_name(1): 1.1, decode_name(16): 1.3, prefill_name(512): 1.0}
"""Minimum ratio of tokens per second, with AVX-512."""
BANDWIDTH = 0.85
"""Minimum share of the read bandwidth that one stream reaches."""
MEMORY_OVERHEAD = 450e6
"""Maximum bytes beyond weights and KV cache."""


class Verdict(NamedTuple):
    """One target and the measured value."""

    description: str
    measured: float
    target: float
    is_minimum: bool
    """The target is a minimum; otherwise it is a maximum."""

    @property
    def is_met(self) -> bool:
        """The measured value reaches the target."""
        return self.measured >= self.target if self.is_minimum else self.measured <= self.target


def _compare(
    results: Results,
    peers: tuple[str, Iterable[str]],
    cell: str,
    key: str,
    description: str,
    target: float,
    best: Callable[[Iterable[float]], float] = max,
) -> list[Verdict]:
    """Return the verdict on a ratio, or nothing if one of the two sides was not measured."""
    ours, others = peers
    measured = ratio(results.rows, ours, others, cell, key, best)
    if measured is None:
        return []
    return [Verdict(f"{description}, x the best", measured, target, best is max)]


def server_verdicts(results: Results) -> list[Verdict]:
    """Return the verdicts on the server's throughput, latencies under many streams and memory."""
    peers, key = (OURS, SERVERS), SPEEDS["server"]
    verdicts: list[Verdict] = []
    for streams, target in SERVED.items():
        cell = streams_name(streams)
        verdicts += _compare(results, peers, cell, key, f"output tokens/s, {cell}", target)
    crowded = streams_name(CROWDED)
    for name, figure in {"TTFT, median": "median_ttft_ms", "ITL, p99": "p99_itl_ms"}.items():
        verdicts += _compare(results, peers, crowded, figure, f"{name}, {crowded}", 1.0, min)
    memory = max((row.pss for row in results.rows if row.peer == OURS), default=0)
    if memory:
        over = memory - WEIGHT_BYTES - results.asked["kv_cache_memory"]
        name = "peak PSS beyond weights and KV cache, MB"
        verdicts.append(Verdict(name, over / 1e6, MEMORY_OVERHEAD / 1e6, False))
    return verdicts


def in_process_verdicts(results: Results) -> list[Verdict]:
    """Compare every cell with the best library, in bfloat16 and in int8."""
    sides = ((OURS, LIBRARIES, IN_PROCESS), (OURS_INT8, LIBRARIES_INT8, IN_PROCESS_INT8))
    verdicts: list[Verdict] = []
    for ours, others, target in sides:
        for cell in cells_of(results):
            verdicts += _compare(
                results, (ours, others), cell, SPEEDS["in-process"], f"{ours}, {cell}", target
            )
    return verdicts


def four_bit_verdicts(results: Results) -> list[Verdict]:
    """Compare a file of 4 bits with the best peer, and one stream with the read bandwidth."""
    verdicts: list[Verdict] = []
    for cell, target in FOUR_BIT_CELLS.items():
        peers = OURS_4_BITS, FOUR_BITS
        verdicts += _compare(
            results, peers, cell, SPEEDS["four-bit"], f"{OURS_4_BITS}, {cell}", target
        )
    alone = decode_name(1)
    seen = values(results.rows, OURS_4_BITS, alone, SPEEDS["four-bit"])
    if seen and results.limits and OURS_4_BITS in results.file_bytes:
        limit = reading_limits(results, results.file_bytes[OURS_4_BITS])[alone]
        name = f"{OURS_4_BITS}, {alone}, share of the read bandwidth"
        verdicts.append(Verdict(name, median(seen) / limit, BANDWIDTH, True))
    return verdicts


VERDICTS = {
    "server": server_verdicts,
    "in-process": in_process_verdicts,
    "four-bit": four_bit_verdicts,
}


def verdict_table(results: Results) -> str:
    """Format the verdicts of a mode; return an empty string if the mode has no targets."""
    if results.mode not in VERDICTS or not {OURS, OURS_4_BITS} & set(peers_of(results)):
        return ""
    rows = [
        [
            verdict.description,
            show_value(verdict.measured),
            f"{'at least' if verdict.is_minimum else 'at most'} {verdict.target:g}",
            "met" if verdict.is_met else "**missed**",
        ]
        for verdict in VERDICTS[results.mode](results)
    ]
    return format_table(["", "seen", "aim", ""], rows) if rows else ""
