"""Serving over weak links: the tables of both MoLink papers beside simulations.

Owns the page: which settings are simulated, and how the figures stand beside those of the papers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from experiments.base import ExperimentOptions, ExperimentResult
from experiments.claims import ExpectedChange, ExpectedLimit, PaperClaim
from experiments.parallel import map_parallel
from experiments.weak_links_compute import REFERENCE, compare_compute
from experiments.weak_links_directions import (
    METRIC_NAMES,
    METRICS,
    Direction,
    compare_directions,
    far_cells,
)
from experiments.weak_links_paper import (
    ABLATION,
    BASE_RATE,
    LATENCY_ROWS,
    PLATFORM_ROWS,
    SERVER_RATES,
    SERVER_SETTINGS,
    SERVERS,
    TPOT_AVERAGES,
    TTFT_AVERAGES,
    LatencyRow,
    PlatformRow,
    WeakLinkSetting,
)
from experiments.weak_links_readings import READING_SYSTEMS, format_readings
from experiments.weak_links_systems import (
    SHARED,
    TrialFigures,
    WeakLinkTrial,
    average_figures,
    simulate_weak_link,
)
from gllm.sim.metrics.report import format_table, show_value

SEEDS = (0, 1)
"""Each figure is the mean of one simulation per seed."""
LATENCY_SYSTEMS = ("vllm", "helix", "molink", "gllm")
PLATFORM_SYSTEMS = ("vllm", "molink platform", "gllm")
SERVER_SYSTEMS = {"H20": "vllm", "A100": "vllm", "molink": "molink platform"}
"""Simulated system of each server of the platform paper's Table 4."""
ABLATION_SYSTEMS = {name: name for name in ABLATION} | {"neither": SHARED}
"""Simulated system of each row of Table 5."""
NUM_STAGES = (2, 3, 4)
"""Stages of the table that the first paper announces."""

SimulationPoint = tuple[WeakLinkSetting, str]
"""Setting and name of a system."""
SimulatedFigures = Mapping[SimulationPoint, TrialFigures]

ASSUMPTIONS = """\
Simulated with the roofline cost model, the link policies of `gllm/pacing/` and the lengths of
azure-conv within each paper's limits. Arrivals are Poisson for 31 minutes or for --requests
requests, whichever ends first; requests of the first minute are served but not counted in longer
runs. Figures are means of two seeds. Weak links carry activations, plans and results.

| system | link policy | micro-batches in flight | delays per hop | tensors per token |
| --- | --- | --- | --- | --- |
| vllm | `serial` | 1 per stage | 3 | 2 |
| helix | `serial` | none: each request by itself | 3 | 2 |
| molink, first paper | `molink-paper` | 5 on 3 stages | 3 | 2 |
| molink, platform paper | `fixed-chunk` | 2 per stage | 3 | 2 |
| gllm | `molink` | two lanes, depth by its controller | 1 | 1 |

vllm and molink are virtual engines, as in vLLM: schedulers with one micro-batch in flight each on
the same stages and links, whole prompts before decodes. Requests of helix travel by themselves, and
each stage computes those that have arrived (`experiments/request_pipelines.py`). gllm is the
production scheduler with what `gllm serve` chooses for stages that are connected by TCP: token
throttling, two lanes, and micro-batches in flight that follow the times of stages and links.

vllm's messages leave in order, because that is how vLLM 0.7.2, which the paper has measured, sends
them: `send_tensor_dict` of a worker enqueues a `torch.distributed.send` per tensor on the CUDA
stream that computes, so that the messages to the next stage follow one another and never share a
link ([vllm#4412](https://github.com/vllm-project/vllm/pull/4412); sends beside the computation came
in 2026, [vllm#33368](https://github.com/vllm-project/vllm/pull/33368)). The paper's own figures
agree: vLLM is slower there than MoLink without chunks and without more micro-batches (Table 5,
neither: TPOT 0.48 s and E2EL 107 s, against 0.50 s and 111 s), and it would be as fast if its
messages shared the links as MoLink's do. The section on readings has the other possibility.

One number is fitted, to the cells of Tables 3 and 4: a message of the papers' systems takes three
one-way delays per hop, because each is a remote call of its own. With three, these cells differ
from the paper's by a factor of 1.38 (root mean square of the logarithms), with two by 1.52; the
directions that agree are as many. gllm keeps its connections warm and sends the sum of hidden
states and residual, one tensor; tests of `gllm-link` show both. The papers do not say how long
their runs lasted in overload, so delays there cannot agree."""


def run(options: ExperimentOptions) -> ExperimentResult:
    """Simulate both papers' tables."""
    rows = LATENCY_ROWS[6:7] if options.quick else LATENCY_ROWS
    platform_rows = PLATFORM_ROWS[:1] if options.quick else PLATFORM_ROWS
    rates = SERVER_RATES[:1] if options.quick else SERVER_RATES
    stages = NUM_STAGES[:1] if options.quick else NUM_STAGES
    figures = _simulate(_points(rows, platform_rows, rates, stages), options)
    compute = compare_compute(options)
    ablation = {
        name: figures[_ablation_setting(), system] for name, system in ABLATION_SYSTEMS.items()
    }

    def ours(row: LatencyRow, system: str) -> TrialFigures:
        return figures[row.setting, system]

    directions = compare_directions(rows, ours, ablation)
    sections = [
        ASSUMPTIONS,
        "## First paper, Tables 2 to 4\n\n" + _latency_table(rows, ours),
        "## First paper, Table 5\n\n" + _ablation_table(ablation),
        "## Directions and misses\n\n" + _misses(directions, far_cells(rows, ours)),
        "## Readings of the baselines\n\n" + format_readings(rows, ours, ablation),
        "## Number of stages\n\n" + _stages_table(stages, figures),
        "## Platform paper, Tables 2 and 3\n\n" + _platform_table(platform_rows, figures),
        "## Platform paper, Table 4\n\n" + _server_table(rates, figures),
        "## Compute against communication\n\n" + compute.text,
    ]
    claims = [
        *_direction_claims(directions),
        *_headline_claims(rows, ours),
        *platform_claims(platform_rows, figures),
        *compute.claims,
    ]
    return ExperimentResult(
        "Serving over weak links", "\n\n".join(sections), claims, compute.plots, REFERENCE
    )


def _ablation_setting() -> WeakLinkSetting:
    return WeakLinkSetting(BASE_RATE)


def _points(
    rows: Sequence[LatencyRow],
    platform_rows: Sequence[PlatformRow],
    rates: Sequence[int],
    stages: Sequence[int],
) -> list[SimulationPoint]:
    """Return all settings and systems to simulate, each once."""
    systems = (*LATENCY_SYSTEMS, *READING_SYSTEMS)
    points = [(row.setting, system) for row in rows for system in systems]
    points += [(_ablation_setting(), system) for system in ABLATION_SYSTEMS.values()]
    points += [
        (replace(_ablation_setting(), num_stages=number), system)
        for number in stages
        for system in LATENCY_SYSTEMS
    ]
    points += [(row.setting, system) for row in platform_rows for system in PLATFORM_SYSTEMS]
    points += [
        (replace(SERVER_SETTINGS[server], rate=rate), system)
        for server, system in SERVER_SYSTEMS.items()
        for rate in rates
    ]
    return list(dict.fromkeys(points))


def _simulate(points: Sequence[SimulationPoint], options: ExperimentOptions) -> SimulatedFigures:
    seeds = SEEDS[:1] if options.quick else SEEDS
    trials = [
        WeakLinkTrial(setting, system, options.requests, seed)
        for setting, system in points
        for seed in seeds
    ]
    results = map_parallel(simulate_weak_link, trials, options.jobs, options.progress)
    num_seeds = len(seeds)
    return {
        point: average_figures(results[index * num_seeds : (index + 1) * num_seeds])
        for index, point in enumerate(points)
    }


Ours = Callable[[LatencyRow, str], TrialFigures]
"""Returns the simulated figures of a row and a system."""


def _latency_table(rows: Sequence[LatencyRow], ours: Ours) -> str:
    lines = []
    for row in rows:
        for metric in METRICS:
            cells = [f"{row.table}{'*' if row.doubt else ''}", row.label, METRIC_NAMES[metric]]
            for system in row.cells:
                cells += [
                    f"{getattr(row.cells[system], metric):g}",
                    _show(getattr(ours(row, system), metric)),
                ]
            lines.append([*cells, _show(getattr(ours(row, "gllm"), metric))])
    systems = [
        f"{name}{source}" for name in ("vllm", "helix", "molink") for source in ("", ", ours")
    ]
    table = format_table(["table", "setting", "s", *systems, "gllm"], lines)
    doubts = [f"Table {row.table}, {row.label}: {row.doubt}" for row in rows if row.doubt]
    if doubts:
        table += (
            "\n\n\\* Inconsistent in the paper, shown but not counted: " + "; ".join(doubts) + "."
        )
    return table


def _ablation_table(ablation: Mapping[str, TrialFigures]) -> str:
    lines = [
        [
            system,
            *(
                cell
                for metric in METRICS
                for cell in (
                    f"{getattr(ABLATION[system], metric):g}",
                    _show(getattr(figures, metric)),
                )
            ),
        ]
        for system, figures in ablation.items()
    ]
    header = [f"{METRIC_NAMES[each]}{source}, s" for each in METRICS for source in ("", ", ours")]
    return format_table(["system", *header], lines)


def _misses(directions: Sequence[Direction], far: Sequence[str]) -> str:
    missed = [str(direction) for direction in directions if not direction.agrees]
    kinds = dict.fromkeys(direction.kind for direction in directions)
    rows = []
    for kind in kinds:
        of_kind = [direction for direction in directions if direction.kind == kind]
        rows.append([kind, str(len(of_kind)), str(sum(each.agrees for each in of_kind))])
    text = (
        "A direction is the sign of a change between two cells of Tables 2 to 5: two systems in "
        "one row, or two rows of one system. Changes below 0.5 % in the paper have none.\n\n"
        + format_table(["directions", "in the paper", "the same here"], rows)
    )
    for title, items in (
        ("Directions that differ:", missed),
        ("Cells that differ by more than a factor of 2:", far),
    ):
        lines = "\n".join(f"- {item}" for item in items) or "- none"
        text += f"\n\n{title}\n\n{lines}"
    return text


def _stages_table(stages: Sequence[int], figures: SimulatedFigures) -> str:
    lines = []
    for number in stages:
        setting = replace(_ablation_setting(), num_stages=number)
        for system in LATENCY_SYSTEMS:
            values = figures[setting, system]
            lines.append([str(number), system, *map(_show, values[:3])])
    return (
        'The first paper announces the "impact of pipeline degree", but prints no figures. '
        f"100 Mbit/s, 30 ms, {BASE_RATE} requests/s.\n\n"
        + format_table(["stages", "system", "TTFT, s", "TPOT, s", "E2EL, s"], lines)
    )


def margin_factor(cells: Sequence[tuple[float, float]]) -> float:
    """Return revenue over cost per token/s from (tokens per second, margin in per cent)."""
    return fmean((1 + margin / 100) / tokens for tokens, margin in cells)


def _platform_factor() -> float:
    return margin_factor(
        [
            (cell.tokens_per_second, row.margins[system])
            for row in PLATFORM_ROWS
            for system, cell in row.cells.items()
            if not (row.doubt and system == "molink")
        ]
    )


def _platform_table(rows: Sequence[PlatformRow], figures: SimulatedFigures) -> str:
    factor = _platform_factor()
    lines = []
    for row in rows:
        simulated = {name.split()[0]: figures[row.setting, name] for name in PLATFORM_SYSTEMS}
        for system in ("petals", "vllm", "molink", "gllm"):
            paper, ours = row.cells.get(system), simulated.get(system)
            doubt = "*" if row.doubt and system == "molink" else ""
            margin = f"{row.margins[system]:+.1f}{doubt}" if system in row.margins else ""
            cells = [row.label, system]
            for name in ("tokens_per_second", "ttft", "tpot"):
                cells.append(f"{getattr(paper, name):g}" if paper else "")
                cells.append(_show(getattr(ours, name)) if ours else "")
            own = f"{100 * (factor * ours.tokens_per_second - 1):+.1f}" if ours else ""
            lines.append([*cells, margin, own])
    names = ("tokens/s", "TTFT, s", "TPOT, s", "margin, %")
    header = [text for name in names for text in (name, f"{name}, ours")]
    notes = [f"{row.label}: {row.doubt}" for row in rows if row.doubt]
    star = f"\n\n\\* Inconsistent in the paper: {'; '.join(notes)}." if notes else ""
    return (
        "Tokens/s are output tokens from the first arrival to the last token. The lengths that the "
        "paper states have 140 per request; its tokens/s of molink are 196 to 238 per request, so "
        "tokens/s and margins are lower here. Petals is not simulated. The margin of Table 3 is "
        f"{factor:.5f} x tokens/s - 1 in all of its consistent cells; the prices that the paper "
        "states give another yearly cost (9,441 instead of 6,745 yuan).\n\n"
        + format_table(["setting", "system", *header], lines)
        + star
    )


def _server_table(rates: Sequence[int], figures: SimulatedFigures) -> str:
    lines = []
    for server, system in SERVER_SYSTEMS.items():
        cells = SERVERS[server]
        factor = margin_factor([(cell.tokens_per_second, cell.margin) for cell in cells.values()])
        for rate in rates:
            paper = cells[rate]
            ours = figures[replace(SERVER_SETTINGS[server], rate=rate), system]
            line = [server, str(rate)]
            for name in ("tokens_per_second", "ttft", "tpot"):
                line += [f"{getattr(paper, name):g}", _show(getattr(ours, name))]
            margin = 100 * (factor * ours.tokens_per_second - 1)
            lines.append([*line, f"{paper.margin:+g}", f"{margin:+.0f}"])
    names = ("tokens/s", "TTFT, s", "TPOT, s", "margin, %")
    header = [text for name in names for text in (name, f"{name}, ours")]
    return (
        "Llama-2-70B with weights of 4 bits on one H20, on one A100 and on four servers with an "
        "RTX 4090 each. Links are not stated: 1 Gbit/s and 25 ms were chosen for TTFT and TPOT at "
        "1 request/s. Delays under overload grow with the number of requests, which is not stated "
        "either. Margins follow from tokens/s by each server's own factor.\n\n"
        + format_table(["server", "requests/s", *header], lines)
    )


def _direction_claims(directions: Sequence[Direction]) -> list[PaperClaim]:
    against = [direction for direction in directions if direction.name.count("molink against")]
    claims = []
    for name, chosen in (("Tables 2 to 5", directions), ("of molink against others", against)):
        share = fmean(each.agrees for each in chosen)
        limit = ExpectedLimit(0.9, is_minimum=True)
        note = f"({sum(each.agrees for each in chosen)} of {len(chosen)})"
        claims.append(PaperClaim(f"directions that agree, {name}", limit, share, note))
    return claims


def _headline_claims(rows: Sequence[LatencyRow], ours: Ours) -> list[PaperClaim]:
    claims = []
    for row in rows:
        if row.doubt or row.table != "2":
            continue
        for metric in METRICS:
            paper, simulated = (
                getattr(cell, metric) / getattr(base, metric) - 1
                for cell, base in (
                    (row.cells["molink"], row.cells["vllm"]),
                    (ours(row, "molink"), ours(row, "vllm")),
                )
            )
            name = f"{METRIC_NAMES[metric]} of molink against vllm at {row.label}"
            claims.append(PaperClaim(name, ExpectedChange(paper), simulated))
    return claims


def platform_claims(rows: Sequence[PlatformRow], figures: SimulatedFigures) -> list[PaperClaim]:
    """Return the claims on the averages of each platform's latencies."""
    claims = []
    for metric, averages in (("ttft", TTFT_AVERAGES), ("tpot", TPOT_AVERAGES)):
        for base, stated in averages.items():
            changes = [
                getattr(row.cells["molink"], metric) / getattr(row.cells[base], metric) - 1
                for row in PLATFORM_ROWS
            ]
            # Shown and not judged: the paper's table says nothing about a simulation.
            name = (
                f"{METRIC_NAMES[metric]} of molink against {base}, mean of the platform's Table 2"
            )
            note = f"{100 * fmean(changes):+.2f} % by the paper's own table"
            claims.append(PaperClaim(name, f"{100 * stated:+.1f} %", None, note))
    for metric, averages in (("ttft", TTFT_AVERAGES), ("tpot", TPOT_AVERAGES)):
        simulated = fmean(
            getattr(figures[row.setting, "molink platform"], metric)
            / getattr(figures[row.setting, "vllm"], metric)
            - 1
            for row in rows
        )
        name = f"{METRIC_NAMES[metric]} of molink against vllm, mean of the simulated Table 2"
        claims.append(PaperClaim(name, ExpectedChange(averages["vllm"]), simulated))
    return claims


def _show(value: float) -> str:
    return show_value(value) if value < 1000 else f"{value:.0f}"
