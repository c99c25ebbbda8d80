"""The page of docs/benchmarks: tables of both sections, and the statements that they show."""

from typing import Any

from benchmarks.disaggregation.load import (
    LENGTH_SCALE,
    LINK_GIGABYTES,
    LOAD_SHARE,
    TRACE,
    median_of,
)
from benchmarks.weak_links.page import is_met, select, show
from gllm.sim.metrics.report import format_table

Row = dict[str, Any]
MAX_TRANSFER_RATIO = 1.2
"""Limit of the seconds of all fetches, in bytes over the link's rate."""
MAX_CROSSING_ERROR = 0.2
"""Limit of the difference between the computed and the measured break-even."""
COMPARED_BYTES_PER_TOKEN = 48 * 2 * 8 * 128 * 2
"""Keys and values of Qwen2.5-14B: 48 layers, 8 heads of 128 numbers in bfloat16."""
NAMES = {"mixed": "two mixed engines", "apart": "one prefills, one decodes"}


def format_load(rows: list[Row]) -> str:
    """Format the latencies of both setups and the statements about them."""
    table = []
    for setup, name in NAMES.items():
        own = select(rows, setup=setup)
        cores = [median_of([{"c": row["engine_cores"][i]} for row in own], "c") for i in (0, 1)]
        table.append(
            [
                name,
                *(show(median_of(own, f"{p}_ttft_ms"), 1) for p in ("median", "p99")),
                *(show(median_of(own, f"{p}_tpot_ms"), 2) for p in ("median", "p99")),
                show(sum(row["failed"] for row in own)),
                " + ".join(f"{each:.2f}" for each in cores),
                f"{median_of(own, 'router_cores'):.2f}",
                f"{median_of(own, 'client_cores'):.2f}",
            ]
        )
    header = ["engines", "median TTFT, ms", "p99", "median TPOT, ms", "p99", "failed"]
    header += ["cores of engines", "of the router", "of the client"]
    first = rows[0]
    return "\n\n".join(
        [
            f"{first['completed'] + first['failed']} requests per round with lengths of {TRACE} x "
            f"{LENGTH_SCALE}, Poisson arrivals at {first['rate']:.1f}/s, {LOAD_SHARE} of what two "
            f"mixed engines serve; medians of {len(rows) // 2} rounds in alternating order, each "
            f"with new processes. Both engines have a core; router and client share both cores. "
            f"KV blocks travel at {LINK_GIGABYTES:g} GB/s (mock). {_compare_link(rows)}",
            format_table(header, table),
            _judge_load(rows),
        ]
    )


def _compare_link(rows: list[Row]) -> str:
    """Return what the link is to a model with more bytes per token."""
    num_bytes, tokens = (
        sum(row[key] for row in select(rows, setup="apart"))
        for key in ("fetched_bytes", "num_fetched_tokens")
    )
    if not tokens:
        return "Nothing was fetched."
    bytes_per_token = num_bytes / tokens
    factor = COMPARED_BYTES_PER_TOKEN / bytes_per_token
    gigabits = 8 * LINK_GIGABYTES * factor
    return (
        f"A token of the demo model has {bytes_per_token / 1024:.1f} KiB, a {factor:.0f}th of "
        f"Qwen2.5-14B's, so this is what {gigabits:.0f} Gbit/s are to that model."
    )


def _judge_load(rows: list[Row]) -> str:
    apart = select(rows, setup="apart")
    failed = sum(row["failed"] for row in rows)
    requests = sum(row["completed"] + row["failed"] for row in apart)
    fetched, failed_fetches, tokens, num_bytes, seconds, held = (
        sum(row[key] for row in apart)
        for key in (
            "num_fetched",
            "num_failed_fetches",
            "num_fetched_tokens",
            "fetched_bytes",
            "fetch_seconds",
            "held_blocks",
        )
    )
    ratio = seconds / (num_bytes / (LINK_GIGABYTES * 1e9))
    return "\n".join(
        [
            f"- Requests lost: {failed:.0f} ({is_met(not failed)}).",
            f"- Fetches: {fetched:.0f} for {requests:.0f} requests, {failed_fetches:.0f} failed; "
            f"{tokens:,.0f} tokens, {num_bytes / 1e6:,.1f} MB. Blocks held at the end: {held:.0f}.",
            f"- Transfers took {ratio:.2f} x bytes / rate (at most {MAX_TRANSFER_RATIO}: "
            f"{is_met(ratio <= MAX_TRANSFER_RATIO)}).",
        ]
    )


def format_crossing(rows: list[Row]) -> str:
    """Format the break-even by link and the times that it was measured by."""
    table, worst = [], 0.0
    for row in rows:
        computed, measured = row["computed"], row["measured"]
        error = None
        if computed is not None and measured is not None:
            error = computed / measured - 1
            worst = max(worst, abs(error))
        elif (computed is None) != (measured is None):
            worst = float("inf")
        table.append(
            [
                f"{row['gigabytes']:g}",
                *("never" if each is None else show(each) for each in (computed, measured)),
                "-" if error is None else f"{100 * error:+.0f}%",
            ]
        )
    lengths = list(rows[0]["fetch_ms"])
    times = [
        [str(length), show(rows[0]["compute_ms"][length], 2)]
        + [show(row["fetch_ms"][length], 2) for row in rows]
        for length in lengths
    ]
    return "\n\n".join(
        [
            "Prompt length in tokens from which on KV blocks are there sooner than computed. "
            "Computed: from which length on the engine fetches, by its fits of its own steps and "
            "of the transfers. Measured: where the median times below cross.",
            format_table(["GB/s", "computed", "measured", "difference"], table),
            f"Largest difference {worst:.0%} (at most {MAX_CROSSING_ERROR:.0%}: "
            f"{is_met(worst <= MAX_CROSSING_ERROR)}).",
            "Milliseconds from the request to its first token at the engine that continues it:",
            format_table(
                [
                    "prompt, tokens",
                    "computed",
                    *(f"fetched, {row['gigabytes']:g} GB/s" for row in rows),
                ],
                times,
            ),
        ]
    )


SECTIONS = {
    "load": ("Two engines under load", format_load),
    "break-even": ("Break-even of fetches", format_crossing),
}
