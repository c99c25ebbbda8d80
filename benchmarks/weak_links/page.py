"""The page of docs/benchmarks: tables of each section, and the statements that they show."""

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from benchmarks.weak_links.simulator import MAX_ERROR
from benchmarks.weak_links.traffic import BASE_LINK, FIFO, OURS
from gllm.sim.metrics.report import format_table

Row = dict[str, Any]

MEAN_FLOORS, P99_FLOORS = 1.3, 4.0
"""Limits of a decode's mean and p99 latency beside prefills, in floors."""
PREFILL_RATIO, P99_RATIO = 1.2, 0.25
"""Limits of ours to FIFO: a prefill's mean latency and a decode's p99."""
DROP_SHARE, NUM_DELAYS = 1e-3, 1.2
"""Limits of dropped packets, and of one-way delays per hop of a lone stream."""


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows that have some values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def distinct(rows: Iterable[Row], key: str) -> list[Any]:
    """Return the values of a key in order of appearance."""
    return list(dict.fromkeys(row[key] for row in rows))


def mean_of(rows: Sequence[Row], key: str) -> float:
    """Return the mean over runs."""
    return fmean(row[key] for row in rows)


def show(value: float | None, digits: int = 0) -> str:
    """Format a figure; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def is_met(value: bool) -> str:
    """Return a word for the verdict on a statement."""
    return "met" if value else "**missed**"


def iterate_groups(rows: list[Row]) -> Iterator[tuple[str, float, list[Row], list[Row]]]:
    """Yield congestion control, rate, and the runs of FIFO and of ours."""
    for congestion in distinct(rows, "congestion"):
        own = select(rows, congestion=congestion)
        for rate in distinct(own, "megabits"):
            runs = select(own, megabits=rate)
            yield congestion, rate, select(runs, setup=FIFO), select(runs, setup=OURS)


def format_traffic(rows: list[Row]) -> str:
    """Format the latencies on one link and the statements about them."""
    table, words = [], []
    for congestion, rate, fifo, ours in iterate_groups(rows):
        for runs in filter(None, (fifo, ours)):
            table.append(_traffic_row(runs))
        if fifo and ours:
            words.append(f"- {congestion}, {rate:g} Mbit/s: {_judge_traffic(fifo, ours)}")
    header = ["congestion", "Mbit/s", "links", "runs", "decode mean, ms", "p99, ms", "worst, ms"]
    header += ["floor, ms", "mean / floor", "prefill mean, ms", "floor, ms", "dropped"]
    header += ["prefills overtaken"]
    return "\n\n".join(
        [
            "Scripted workers send 4 tokens every 60 ms "
            "and 1,000 tokens every 4 s, of 14,336 bytes each, through the data movers of two "
            f"machines; one-way delay {BASE_LINK.delay_ms:g} ms. The floor is the time of all "
            "bytes at the link's rate plus the delay.",
            format_table(header, table),
            "\n".join(words),
        ]
    )


def _traffic_row(runs: list[Row]) -> list[str]:
    first = runs[0]
    mean, floor = mean_of(runs, "decode_mean_ms"), first["decode_floor_ms"]
    overtaken, prefills = (
        sum(run[key] for run in runs) for key in ("num_overtaken", "num_prefills")
    )
    return [
        first["congestion"],
        f"{first['megabits']:g}",
        first["setup"],
        str(len(runs)),
        show(mean, 1),
        show(mean_of(runs, "decode_p99_ms")),
        show(max(run["decode_max_ms"] for run in runs)),
        show(floor, 1),
        f"{mean / floor:.2f}",
        show(mean_of(runs, "prefill_mean_ms")),
        show(first["prefill_floor_ms"]),
        f"{mean_of(runs, 'drop_share'):.3%}",
        f"{overtaken} of {prefills}",
    ]


def _judge_traffic(fifo: list[Row], ours: list[Row]) -> str:
    """Return the statements about FIFO's and our runs on one link.

    Only the one about decodes beside FIFO's is made of other rates than the first one.
    """
    p99 = mean_of(ours, "decode_p99_ms") / mean_of(fifo, "decode_p99_ms")
    words = [f"p99 {p99:.2f} x FIFO's (at most {P99_RATIO}: {is_met(p99 <= P99_RATIO)})"]
    if ours[0]["megabits"] != BASE_LINK.megabits:
        return words[0]
    floor = ours[0]["decode_floor_ms"]
    means = [run["decode_mean_ms"] / floor for run in ours]
    p99s = [run["decode_p99_ms"] / floor for run in ours]
    prefill = mean_of(ours, "prefill_mean_ms") / mean_of(fifo, "prefill_mean_ms")
    drops = max(run["drop_share"] for run in ours)
    return "; ".join(
        [
            f"decode mean at most {max(means):.2f} x floor (at most {MEAN_FLOORS}: "
            f"{is_met(max(means) <= MEAN_FLOORS)})",
            f"p99 at most {max(p99s):.1f} x floor (at most {P99_FLOORS:g}: "
            f"{is_met(max(p99s) <= P99_FLOORS)})",
            *words,
            f"prefill {prefill:.2f} x FIFO's (at most {PREFILL_RATIO}: "
            f"{is_met(prefill <= PREFILL_RATIO)})",
            f"dropped at most {drops:.3%} of a run's packets (at most {DROP_SHARE:.1%}: "
            f"{is_met(drops <= DROP_SHARE)})",
        ]
    )


def format_idle(rows: list[Row]) -> str:
    """Format the latencies of single tokens on an idle link."""
    table = [
        [
            row["congestion"],
            f"{row['delay_ms']:g}",
            f"{1e3 * row['interval']:.0f}",
            "yes" if row["has_slow_start"] else "no",
            show(row["mean_ms"], 1),
            show(row["floor_ms"], 1),
            f"{row['num_delays']:.2f}",
        ]
        for row in rows
    ]
    worst = max(row["num_delays"] for row in rows if row["interval"] < 1)
    header = ["congestion", "delay, ms", "a token every, ms", "slow start after idle"]
    header += ["mean, ms", "floor, ms", "delays per hop"]
    return "\n\n".join(
        [
            "Delays per hop: the time without that of the "
            f"bytes at {BASE_LINK.megabits:g} Mbit/s, in one-way delays. Slow start after idle is "
            "Linux's `net.ipv4.tcp_slow_start_after_idle`, on by default.",
            format_table([*header], table),
            f"A lone stream: at most {worst:.2f} delays per hop (at most {NUM_DELAYS}: "
            f"{is_met(worst <= NUM_DELAYS)}).",
        ]
    )


def format_engines(rows: list[Row]) -> str:
    """Format the tokens per second of whole engines."""
    table = []
    for congestion in distinct(rows, "congestion"):
        for streams in distinct(rows, "streams"):
            runs = select(rows, congestion=congestion, streams=streams)
            base = {run["setup"]: run["tokens_per_second"] for run in runs}.get(FIFO)
            table += [_engine_row(run, base) for run in runs]
    header = ["congestion", "streams", "links", "tokens/s", "x FIFO's", "limit, tokens/s"]
    header += ["time per token, ms", "p99, ms", "floor, ms", "TTFT of prompts, ms", "answered"]
    stages = rows[0]["stages"]
    return "\n\n".join(
        [
            f"{stages} stages of one layer on {stages} machines, "
            f"{BASE_LINK} between each two; each step of a stage takes 5 ms at least. Streams of "
            "any length, and a prompt of 500 tokens every 2 s meanwhile. FIFO: one lane, `serial`, "
            "as many micro-batches in flight as stages, which is what MoLink's code does. The "
            "limit is the smaller of what streams can get from the floor of one token, and of "
            "what a link carries beside the prompts; the floor is a token's way through all "
            "stages and back to the driver.",
            format_table(header, table),
        ]
    )


def _engine_row(run: Row, base: float | None) -> list[str]:
    return [
        run["congestion"],
        str(run["streams"]),
        run["setup"],
        show(run["tokens_per_second"], 1),
        f"{run['tokens_per_second'] / base:.2f}" if base else "-",
        show(run["limit_tokens_per_second"]),
        show(run["itl_mean_ms"]),
        show(run["itl_p99_ms"]),
        show(run["itl_floor_ms"]),
        show(run["prompt_ttft_mean_ms"]),
        f"{run['num_prompts_answered']} of {run['num_prompts']}",
    ]


def format_simulator(rows: list[Row]) -> str:
    """Format the simulator's errors."""
    table = [
        [
            row["setup"],
            f"{row['megabits']:g}",
            f"{row['delay_ms']:g}",
            str(row["requests"]),
            *(
                text
                for metric in ("ttft", "tpot")
                for text in (
                    show(row[f"{metric}_rig_ms"]),
                    show(row[f"{metric}_simulated_ms"]),
                    f"{row[f'{metric}_error']:+.1%}",
                )
            ),
            show(row.get("rig_cores"), 2),
            show(row.get("other_cores"), 2),
        ]
        for row in rows
    ]
    worst = max(abs(row[f"{metric}_error"]) for row in rows for metric in ("ttft", "tpot"))
    header = ["links", "Mbit/s", "delay, ms", "requests", "TTFT, ms", "simulated", "error"]
    header += ["TPOT, ms", "simulated", "error", "cores, rig", "others"]
    return "\n\n".join(
        [
            "Mean latencies of the same requests, Poisson arrivals. Each configuration has an "
            "engine that is started on its links. The simulator has the production scheduler, "
            "link policy and lanes, and connections with TCP's slow start; the times of stages "
            "and processes were measured on an engine over fast links. Cores are the mean number "
            "that the rig, with all machines and clients, and other programs kept busy meanwhile: "
            "where the rig's are few, links set the times.",
            format_table(header, table),
            f"Largest error {worst:.1%} (at most {MAX_ERROR:.0%}: {is_met(worst <= MAX_ERROR)}).",
        ]
    )


SECTIONS = {
    "traffic": ("Decodes beside prefills on one link", format_traffic),
    "idle": ("Single tokens on an idle link", format_idle),
    "engines": ("Whole engines", format_engines),
    "simulator": ("The simulator against the rig", format_simulator),
}
"""Titles and formatters of the sections, in the order of the page."""
