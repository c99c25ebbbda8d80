"""Statistics over rows: medians, spreads, ratios to other peers, and their tables."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from benchmarks.cpu.drivers.timing import decode_name, prefill_name
from benchmarks.cpu.limits import Rates
from benchmarks.cpu.loads import streams_name
from benchmarks.cpu.model import DENSE
from benchmarks.cpu.peers import DENSE_PEERS, PEERS
from benchmarks.cpu.results import Results, Row
from gllm.sim.metrics.report import format_table, show_value

SPEEDS = {
    "server": "output_throughput",
    "in-process": "tokens_per_second",
    "four-bit": "tokens_per_second",
    "hybrid": "tokens_per_second",
}
"""Main figure of each mode."""
NOTHING = "-"


def values(rows: Iterable[Row], peer: str, cell: str, key: str) -> list[float]:
    """Return a figure of all rounds and repeats."""
    return [row.figures[key] for row in rows if (row.peer, row.cell) == (peer, cell)]


def by_round(rows: Iterable[Row], peer: str, cell: str, key: str) -> dict[int, float]:
    """Return a figure's median over the repeats of each round."""
    figures: dict[int, list[float]] = {}
    for row in rows:
        if (row.peer, row.cell) == (peer, cell):
            figures.setdefault(row.round, []).append(row.figures[key])
    return {turn: median(each) for turn, each in figures.items()}


def ratio(
    rows: Sequence[Row],
    peer: str,
    others: Iterable[str],
    cell: str,
    key: str,
    best: Callable[[Iterable[float]], float] = max,
) -> float | None:
    """Return a peer's figure relative to the best of the others: the median of the rounds' ratios.

    A slowdown of a whole round thus cancels out. None if no round has both.
    """
    ours = by_round(rows, peer, cell, key)
    theirs = [by_round(rows, other, cell, key) for other in others]
    ratios = []
    for turn, value in ours.items():
        rivals = [each[turn] for each in theirs if turn in each]
        if rivals and best(rivals):
            ratios.append(value / best(rivals))
    return median(ratios) if ratios else None


def peers_of(results: Results) -> list[str]:
    """Return the peers with rows, in the order of their preparation."""
    measured = {row.peer for row in results.rows}
    return [name for name in results.versions if name in measured]


def cells_of(results: Results) -> list[str]:
    """Return the cells with rows, in the order of measurement."""
    return list(dict.fromkeys(row.cell for row in results.rows))


def middle(results: Results, peer: str, cell: str, key: str) -> str:
    """Format the median of a figure."""
    figures = values(results.rows, peer, cell, key)
    return show_value(median(figures)) if figures else NOTHING


def with_spread(results: Results, peer: str, cell: str, key: str) -> str:
    """Format the median and, for several values, the minimum and maximum."""
    figures = values(results.rows, peer, cell, key)
    if len(figures) < 2:
        return middle(results, peer, cell, key)
    return f"{show_value(median(figures))} ({show_value(min(figures))}-{show_value(max(figures))})"


def rates_of(results: Results) -> list[Rates]:
    """Return the machine's rates for each number of threads.

    Each rate is the best of all rounds, because limits are those of the undisturbed machine.
    """
    threads = sorted({rates.threads for rates in results.limits})
    alike = [[rates for rates in results.limits if rates.threads == each] for each in threads]
    return [
        Rates(
            group[0].threads,
            max(rates.bytes_per_second for rates in group),
            max(rates.flops_per_second for rates in group),
        )
        for group in alike
    ]


def limits(results: Results) -> dict[str, float]:
    """Return the physical limit of a mode's cells, in the unit of its main figure."""
    if not results.limits:
        return {}
    rates, asked = rates_of(results)[-1], results.asked
    prompt, new = asked["prompt"], asked["new"]
    if results.mode == "server":
        return {streams_name(n): rates.served(n, prompt, new) for n in asked["streams"]}
    decode_limits = {decode_name(n): rates.decode(n, prompt, new) for n in asked["streams"]}
    return decode_limits | {
        prefill_name(length): rates.prefill(length) for length in asked["prefills"]
    }


def reading_limits(results: Results, file_bytes: int) -> dict[str, float]:
    """Return the tokens per second of each decode cell if a step only read a file's weights."""
    rates, asked = rates_of(results)[-1], results.asked
    sizes = asked["prompt"], asked["new"]
    return {
        decode_name(batch): rates.reading(file_bytes, batch, *sizes) for batch in asked["streams"]
    }


def speed_table(results: Results) -> str:
    """Format the tokens per second of every peer in every cell, above the machine's limits."""
    key, cells, most = SPEEDS[results.mode], cells_of(results), limits(results)
    table = [
        [peer, *(with_spread(results, peer, cell, key) for cell in cells)]
        for peer in peers_of(results)
    ]
    table.append(
        ["physical limit, bf16", *(show_value(most.get(cell)) or NOTHING for cell in cells)]
    )
    if results.mode == "four-bit" and results.limits:
        sizes = {PEERS[peer].weights: size for peer, size in results.file_bytes.items()}
        for weights, size in sizes.items():
            limit = reading_limits(results, size)
            row = [f"reading {size / 1e6:.0f} MB of {weights}"]
            table.append([*row, *(show_value(limit.get(cell)) or NOTHING for cell in cells)])
    return format_table(["tokens/s", *cells], table)


def hybrid_table(results: Results) -> str:
    """Format the speeds of hybrids beside the dense model, and beside llama.cpp on each model."""
    rows, cells, key = results.rows, cells_of(results), SPEEDS[results.mode]
    measured = peers_of(results)
    pairs = []
    for shape in dict.fromkeys(PEERS[peer].shape for peer in measured):
        suffix = "" if shape == DENSE else f"-{shape}"
        pairs += [(f"{peer}{suffix}", peer) for peer in DENSE_PEERS if suffix]
        pairs += [(f"gllm{suffix}", f"llama.cpp{suffix}")]
        pairs += [(f"gllm-int8{suffix}", f"llama.cpp-q8{suffix}")]
    table = []
    for peer, other in pairs:
        if peer in measured and other in measured:
            ratios = [ratio(rows, peer, [other], cell, key) for cell in cells]
            table.append([f"{peer} / {other}", *(show_value(each) or NOTHING for each in ratios)])
    return format_table(["ratio of tokens/s", *cells], table)


def use_table(results: Results) -> str:
    """Format the memory of every peer and the CPU share of other processes."""
    table = []
    for peer in peers_of(results):
        rows = [row for row in results.rows if row.peer == peer]
        foreign = [row.foreign for row in rows]
        memory = max(row.pss for row in rows)
        table.append(
            [
                peer,
                show_value(memory / 1e9),
                show_value(median(foreign), 100),
                show_value(max(foreign), 100),
            ]
        )
    return format_table(["", "peak PSS, GB", "foreign CPU, %, median", "largest"], table)


LATENCIES = {
    "TTFT ms, median": "median_ttft_ms",
    "TPOT ms, median": "median_tpot_ms",
    "ITL ms, p99": "p99_itl_ms",
}


def latency_table(results: Results) -> str:
    """Format the latencies of every server, cells between slashes: medians."""
    cells = cells_of(results)
    table = [
        [
            peer,
            *(
                " / ".join(middle(results, peer, cell, key) for cell in cells)
                for key in LATENCIES.values()
            ),
        ]
        for peer in peers_of(results)
    ]
    return format_table([" / ".join(cells), *LATENCIES], table)


LOADED = {
    "output tokens/s": "output_throughput",
    "total tokens/s": "total_token_throughput",
    "TTFT ms, p50": "median_ttft_ms",
    "p99": "p99_ttft_ms",
    "ITL ms, p50": "median_itl_ms",
    "ITL p99": "p99_itl_ms",
}


def load_table(results: Results, cell: str) -> str:
    """Format throughput and latencies of every server under one load of a trace's lengths."""
    table = [
        [
            peer,
            *(with_spread(results, peer, cell, key) for key in LOADED.values()),
            show_value(
                median(r.foreign for r in results.rows if (r.peer, r.cell) == (peer, cell)), 100
            ),
        ]
        for peer in peers_of(results)
        if values(results.rows, peer, cell, "output_throughput")
    ]
    return format_table(["", *LOADED, "foreign CPU, %"], table)


def machine_table(results: Results) -> str:
    """Format the rates that the limits are computed from."""
    table = [
        [
            str(rates.threads),
            show_value(rates.bytes_per_second / 1e9),
            show_value(rates.flops_per_second / 1e9),
        ]
        for rates in rates_of(results)
    ]
    return format_table(["threads", "GB/s read", "bf16 GFLOP/s"], table)
