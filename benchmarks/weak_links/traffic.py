"""Latency of steps on one link: decodes beside prefills, through real data movers."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks.net.link_traffic import HopLatencies, LinkSetup, RigLink, TrafficPattern
from benchmarks.net.rig import NamespaceRig
from benchmarks.weak_links.limits import WeakLink
from benchmarks.weak_model import HIDDEN_SIZE, ITEM_BYTES, TOKEN_BYTES
from gllm.observability.latency import percentile
from gllm.transport.base import EdgeLayout

FIFO, OURS = "FIFO", "ours"
SETUPS = {FIFO: (1, "serial"), OURS: (2, "molink")}
"""Lanes and link policy by name."""
BASE_LINK = WeakLink(100, 30)
OTHER_RATES = (60, 200, 400)
"""Mbit/s, at the delay of the base."""
DELAYS_MS = (10, 20, 30, 50)
"""One-way delays of an idle link."""
WARM_UP_SECONDS = 4.0
"""Traffic on a new link before the runs that count."""
NUM_FIFO_RUNS = 2
"""Runs of FIFO over the base: they differ by little."""
NUM_OTHER_RUNS = 3
"""Runs of ours at other rates: with 200 decodes in one, two late ones are its 99th percentile."""
SLOTS = 128
"""Steps that may wait for the link."""
LONE_SECONDS, PAUSE_SECONDS = 0.12, 1.0
"""Time between two tokens of a lone stream, and a pause after which TCP may start slowly again."""
SLOW_START = "tcp_slow_start_after_idle"
"""Option of Linux, per network namespace."""

Progress = Callable[[str], None]


class TrafficPlan(NamedTuple):
    """Lengths of the measurements."""

    run_seconds: float
    num_runs: int
    """Runs of ours at BASE_LINK; FIFO, and other rates, need fewer."""


@contextmanager
def open_link(setup: LinkSetup, link: WeakLink) -> Iterator[tuple[NamespaceRig, RigLink]]:
    """Connect two machines by a link."""
    tokens = TrafficPattern(1.0).prefill_tokens
    layout = EdgeLayout(SLOTS, tokens, HIDDEN_SIZE, ITEM_BYTES)
    with NamespaceRig(2, shaped=[1]) as rig:
        set_link(rig, link)
        with RigLink(rig, setup, layout) as edge:
            yield rig, edge


def set_link(rig: NamespaceRig, link: WeakLink) -> None:
    """Set rate and delay of machine 1's hop."""
    rig.hop(1).set_rate(link.bits_per_second)
    rig.hop(1).set_delay(link.delay_seconds)


def measure_traffic(
    congestion: str, rates: Sequence[float], plan: TrafficPlan, progress: Progress
) -> list[dict[str, Any]]:
    """Return the latencies of both setups, one row per setup, rate and run."""
    rows = []
    for name, setup in SETUPS.items():
        for rate in (BASE_LINK.megabits, *rates):
            link = BASE_LINK._replace(megabits=rate)
            with open_link(LinkSetup(*setup, congestion), link) as (_, edge):
                edge.send(TrafficPattern(WARM_UP_SECONDS))
                for _ in range(count_runs(name, link, plan)):
                    latencies = edge.send(TrafficPattern(plan.run_seconds))
                    rows.append(make_row(name, congestion, link, latencies))
                    progress(f"traffic: {describe_row(rows[-1])}")
    return rows


def count_runs(name: str, link: WeakLink, plan: TrafficPlan) -> int:
    """Return the number of runs of a setup over a link."""
    if name != OURS:
        return min(plan.num_runs, NUM_FIFO_RUNS if link == BASE_LINK else 1)
    return plan.num_runs if link == BASE_LINK else min(plan.num_runs, NUM_OTHER_RUNS)


def make_row(name: str, congestion: str, link: WeakLink, latencies: HopLatencies) -> dict[str, Any]:
    """Return the figures of a run; times are in milliseconds."""
    pattern = TrafficPattern(1.0)
    return {
        "setup": name,
        "congestion": congestion,
        "megabits": link.megabits,
        "delay_ms": link.delay_ms,
        "decode_mean_ms": 1e3 * fmean(latencies.decode),
        "decode_p99_ms": 1e3 * percentile(latencies.decode, 99),
        "decode_max_ms": 1e3 * max(latencies.decode),
        "decode_floor_ms": 1e3 * link.floor_seconds(pattern.decode_tokens * TOKEN_BYTES),
        "num_decodes": len(latencies.decode),
        "prefill_mean_ms": 1e3 * fmean(latencies.prefill),
        "prefill_floor_ms": 1e3 * link.floor_seconds(pattern.prefill_tokens * TOKEN_BYTES),
        "num_overtaken": latencies.num_overtaken,
        "num_prefills": len(latencies.prefill),
        "drop_share": latencies.drop_share,
    }


def describe_row(row: dict[str, Any]) -> str:
    """Return a line about a run."""
    return (
        f"{row['setup']}, {row['congestion']}, {row['megabits']:g} Mbit/s: decode "
        f"{row['decode_mean_ms']:.0f} / {row['decode_p99_ms']:.0f} ms, prefill "
        f"{row['prefill_mean_ms']:.0f} ms, drops {row['drop_share']:.2%}"
    )


class IdleCase(NamedTuple):
    """Single tokens on a link that is idle otherwise."""

    delay_ms: float
    interval: float
    """Seconds between two tokens."""
    has_slow_start: bool
    """Value of SLOW_START, which Linux sets by default."""


def idle_cases() -> list[IdleCase]:
    """Return a lone stream at each delay, and tokens after pauses at that of the base."""
    lone = [IdleCase(delay, LONE_SECONDS, True) for delay in DELAYS_MS]
    pauses = [IdleCase(BASE_LINK.delay_ms, PAUSE_SECONDS, value) for value in (True, False)]
    return [*lone, *pauses]


def measure_idle_hops(congestion: str, num_tokens: int, progress: Progress) -> list[dict[str, Any]]:
    """Return the latencies of single tokens, one row per case."""
    rows = []
    with open_link(LinkSetup(*SETUPS[OURS], congestion), BASE_LINK) as (rig, edge):
        edge.send(TrafficPattern(WARM_UP_SECONDS))
        for case in idle_cases():
            link = BASE_LINK._replace(delay_ms=case.delay_ms)
            set_link(rig, link)
            for machine in range(2):
                rig.set_tcp_option(machine, SLOW_START, int(case.has_slow_start))
            pattern = TrafficPattern(num_tokens * case.interval, 1, case.interval, prefill_tokens=0)
            seconds = edge.send(pattern).decode[1:]  # The first one follows the change of the link.
            rows.append(make_idle_row(congestion, case, link, seconds))
            progress(f"idle link: {congestion}, {link}: {rows[-1]['num_delays']:.2f} delays")
    return rows


def make_idle_row(
    congestion: str, case: IdleCase, link: WeakLink, seconds: Sequence[float]
) -> dict[str, Any]:
    """Return the figures of a case; times are in milliseconds."""
    mean = fmean(seconds)
    return {
        "congestion": congestion,
        **case._asdict(),
        "mean_ms": 1e3 * mean,
        "floor_ms": 1e3 * link.floor_seconds(TOKEN_BYTES),
        "num_delays": (mean - link.sending_seconds(TOKEN_BYTES)) / link.delay_seconds,
    }
