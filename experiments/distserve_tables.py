"""Tables of DistServe's evaluation."""

from collections.abc import Sequence
from math import isinf

from experiments.distserve_decode import decode_points, decode_table
from experiments.distserve_queue import QueuePoint, measured_speedup, predicted_crossover
from experiments.distserve_seeds import seeds_table
from experiments.distserve_study import (
    SCALE_SHARE,
    SHARES,
    HighPlacement,
    Study,
    Table2,
    TightLimit,
    WorkloadResult,
)
from experiments.distserve_workloads import (
    MOTIVATION,
    MOTIVATION_GOODPUT,
    TABLE_2,
    TABLE_2_RATES,
    TABLE_2_SIMULATED,
)
from gllm.options.slo import TARGET_ATTAINMENT
from gllm.plan.goodput.engines import MAX_BATCHED_TOKENS, MAX_SEQS
from gllm.plan.goodput.systems import MIN_SECONDS, PARTS, Outcome, System
from gllm.sim.metrics.report import format_table

BREAKDOWN_SHARE = 0.75
SCALES = (0.4, 0.6, 0.8, 1.0, 1.5, 2.0)
"""Scales of both limits."""
SYSTEMS = ("DistServe", "vLLM", "vLLM++", "colocated")

SETTING = f"""Systems, simulated with the scheduler, pair policy, holds and fetches of serving:

- *DistServe*: the phases apart, placed as in the paper. Policy `distserve` (batches of prompts up
  to L_m = 512 tokens, first come, first served), pair policy `distserve` (shortest queue; the least
  loaded decode engine at the end of prefill), admission `distserve` in decode engines. KV cache
  waits in the prefill engine until the decode engine has blocks and fetches it.
- *vLLM*: one engine for both phases with the artifact's coefficients of vLLM, policy `vllm` with
  up to {MAX_BATCHED_TOKENS:,} prompt tokens per micro-batch, at the paper's parallelism.
- *vLLM++*: the same at the parallelism with the highest goodput per GPU of those tried.
- *colocated*: as vLLM++ with DistServe's own coefficients. It differs from DistServe by the phases
  and the placement alone, not by the speed of the engine.

Costs: coefficients of DistServe's artifact for OPT-13B and OPT-66B on A100-80G. Those of OPT-175B
are the artifact's older ones: negative terms count as 0, and TP 3 is interpolated between TP 2 and
4, linearly in 1 / TP; vLLM and DistServe have the same there. KV capacities as published with the
artifact. KV cache moves over one NVLink of 250 GB/s per prefill engine, because a layer's prefill
and decode share a node. Lengths: ShareGPT's of the artifact's runs; HumanEval and LongBench are
lognormals with the paper's means, cut at OPT's context. Arrivals: Poisson. At most {MAX_SEQS}
sequences per stage, the largest measured batch. *Goodput* is the highest rate at which
{100 * TARGET_ATTAINMENT:.0f} % of the requests meet both limits."""


def format_study(study: Study) -> str:
    """Return the text of the page."""
    results = study.results
    sections = [
        ("Goodput", _goodput_table(results)),
        ("Attainment by rate", _attainment_by_rate(results)),
        ("Attainment by scale of the limits", _attainment_by_scale(results)),
        ("Breakdown of latency", _breakdown_table(results)),
        ("Fixed lengths, and ShareGPT's", _motivation_table(study.motivation)),
    ]
    if study.tight:
        sections.append(("Where separation pays", _tight_table(study.tight)))
    if study.table_2:
        sections.append(("Table 2 of the paper", _table_2(study.table_2)))
    if study.high:
        sections.append(("DistServe-High and -Low", _high_text(study.high)))
    if study.throttled:
        sections.append(("Token throttling", _throttled_table(study.throttled)))
    if study.by_seed:
        sections.append(("Goodput by seed", seeds_table(results[0], study.by_seed)))
    sections.append(("Ranks or stages for prefill", _queue_table(study.queues)))
    sections.append(("Ranks or stages for decode", decode_table(decode_points())))
    scale = (
        f"Scale: {study.requests} requests per simulation, more where they arrive in less than "
        f"{MIN_SECONDS:.0f} s."
    )
    return "\n\n".join([SETTING, scale, *(f"## {title}\n\n{text}" for title, text in sections)])


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None or isinf(value) else f"{value + 1:.2f}"


def _goodput_table(results: Sequence[WorkloadResult]) -> str:
    rows = []
    for result in results:
        workload = result.workload
        for name in SYSTEMS:
            rows.append(
                [
                    workload.name,
                    f"{workload.ttft:g} / {workload.tpot:g}",
                    name,
                    result.systems[name].placement,
                    f"{result.per_gpu(name):.3f}",
                    _ratio(result.gain(name, "vLLM")),
                    _ratio(result.gain(name, "vLLM++")),
                    _ratio(result.gain(name, "colocated")),
                    _ratio(result.scale_gain(name, "vLLM")),
                ]
            )
    head = ["workload", "TTFT / TPOT, s", "system", "placement", "goodput/s per GPU"]
    return format_table(
        [*head, "x vLLM", "x vLLM++", "x colocated", "limits tighter than vLLM's, x"], rows
    )


def _attained(result: WorkloadResult, outcome: Outcome, scale: float = 1.0) -> str:
    ttft, tpot = result.workload.ttft, result.workload.tpot
    shares = (
        outcome.attainment(ttft, tpot, scale),
        outcome.attainment(ttft, None, scale),
        outcome.attainment(None, tpot, scale),
    )
    return " / ".join(map(_percent, shares))


def _attainment_by_rate(results: Sequence[WorkloadResult]) -> str:
    """Return the figures of the paper's Figures 8 and 9 by rate."""
    rows = []
    for result in results:
        for name in SYSTEMS:
            outcomes = [result.outcomes.get((name, share)) for share in SHARES]
            cells = [_attained(result, outcome) if outcome else "-" for outcome in outcomes]
            rows.append([result.workload.name, name, *cells])
    text = (
        "Per cent of the requests within both limits / within that of TTFT / of TPOT, at shares of "
        "DistServe's\ngoodput per GPU; all systems get the same rate per GPU."
    )
    return f"{text}\n\n{format_table(['workload', 'system', *map(_number, SHARES)], rows)}"


def _number(value: float) -> str:
    return f"{value:g}"


def _attainment_by_scale(results: Sequence[WorkloadResult]) -> str:
    """Return the figures of the paper's Figures 8 and 9 by scale of the limits."""
    rows = []
    for result in results:
        for name in SYSTEMS:
            outcome = result.outcomes.get((name, SCALE_SHARE))
            cells = [_attained(result, outcome, scale) if outcome else "-" for scale in SCALES]
            rows.append([result.workload.name, name, *cells])
    text = (
        f"As above, with both limits times a scale, at {SCALE_SHARE:g} of DistServe's goodput per "
        "GPU. The last column of the\nfirst table compares the least scales at which "
        f"{100 * TARGET_ATTAINMENT:.0f} % of the requests meet both limits at this rate."
    )
    return f"{text}\n\n{format_table(['workload', 'system', *map(_number, SCALES)], rows)}"


def _breakdown_table(results: Sequence[WorkloadResult]) -> str:
    """Return the mean shares of the five parts of latency (the paper's Figure 10)."""
    rows = []
    for result in results:
        outcome = result.outcomes.get(("DistServe", BREAKDOWN_SHARE))
        if outcome is None or not outcome.parts:
            continue
        total = sum(outcome.parts)
        rows.append(
            [result.workload.name, f"{total:.2f}"]
            + [f"{100 * part / total:.2f} %" for part in outcome.parts]
            + [f"{1e3 * max(outcome.transfers):.1f}"]
        )
    head = ["workload", "latency, s", *PARTS, "longest transfer, ms"]
    text = (
        f"DistServe at {BREAKDOWN_SHARE:g} of its goodput, means. *Decode queue* is the time until "
        "the decode engine fetches,\nand from the arrival of the KV cache to the first step."
    )
    return f"{text}\n\n{format_table(head, rows)}"


def _motivation_table(goodputs: dict[str, dict[str, float]]) -> str:
    titles = {name: system.name for name, system in MOTIVATION.items()}
    titles |= {"prefill": "prefill alone", "decode": "decode alone"}
    rows = []
    for lengths, group in goodputs.items():
        base = group["colocated"]
        for name, per_gpu in group.items():
            paper = MOTIVATION_GOODPUT.get(name) if lengths == next(iter(goodputs)) else None
            change = f"{per_gpu / base:.2f}" if base else "-"
            published = f"{paper:g}" if paper else "-"
            rows.append([lengths, titles[name], published, f"{per_gpu:.2f}", change])
    text = (
        "OPT-13B at TP 1, limits 0.2 and 0.04 s (the paper's text does not state its own); goodput "
        "in requests/s per GPU\n(the paper's Figure 1)."
    )
    head = ["lengths", "system", "paper", "ours", "x colocated"]
    return f"{text}\n\n{format_table(head, rows)}"


def _tight_table(limits: Sequence[TightLimit]) -> str:
    rows = []
    for limit in limits:
        cells = [f"{per_gpu:.2f} ({placement})" for placement, per_gpu in limit.best.values()]
        separated = limit.best["separated"][1]
        others = max(value for name, (_, value) in limit.best.items() if name != "separated")
        rows.append([f"{limit.tpot:g}", *cells, f"{separated / others:.2f}" if others else "-"])
    text = (
        "OPT-13B, ShareGPT's lengths, limit of TTFT 0.2 s, the same coefficients for all: goodput "
        "per GPU of the best of\nfive separated placements, and of colocated engines at TP 1, 2 "
        "or 4 with whole prompts (`vllm`) and with chunks of 512\ntokens (`sarathi`). A decode "
        "step beside a prompt takes several times as long ([interference](interference.md)): a\n"
        "loose limit of TPOT forgives that, a tight one does not."
    )
    head = ["TPOT, s", *limits[0].best, "separated / best colocated"]
    return f"{text}\n\n{format_table(head, rows)}"


def _table_2(tables: Sequence[Table2]) -> str:
    rows = []
    for name, real in TABLE_2.items():
        rows.append([f"{name}, paper, real", *map(_percent, real)])
        rows.append([f"{name}, paper, simulated", *map(_percent, TABLE_2_SIMULATED[name])])
        for table in tables:
            ours = table.attained[name]
            rows.append([f"{name}, ours, {table.workload.model}", *map(_percent, ours)])
            ratios = [f"{mine / paper:.2f}" for mine, paper in zip(ours, real, strict=True)]
            rows.append([f"{name}, ratio to real, {table.workload.model}", *ratios])
    text = (
        "Attainment of both limits in per cent, by requests per second of the whole system. The "
        "paper's text states neither\nmodel nor lengths nor limits: ShareGPT's lengths and the "
        "limits above are assumed, with two models."
    )
    return f"{text}\n\n{format_table(['', *map(_number, TABLE_2_RATES)], rows)}"


def _high_text(placements: Sequence[HighPlacement]) -> str:
    """Return the table of the paper's Figure 11, and Algorithm 1's numbers of engines."""
    rows, lines = [], []
    for high in placements:
        low = high.low
        rows.append(
            [low.workload.name, "DistServe-High", high.system.placement, f"{high.per_gpu:.3f}"]
        )
        for name in SYSTEMS:
            title = "DistServe-Low" if name == "DistServe" else name
            per_gpu = f"{low.per_gpu(name):.3f}"
            rows.append([low.workload.name, title, low.systems[name].placement, per_gpu])
        lines.append(
            f"- {low.workload.name}: prefill {high.prefill.parallelism} "
            f"({high.prefill.per_gpu:.3f} requests/s per GPU alone), decode "
            f"{high.decode.parallelism} ({high.decode.per_gpu:.3f}). For {high.sized_rate:.2f} "
            f"requests/s it needs {high.sized.placement}, which attain "
            f"{_percent(high.sized_attainment)} %."
        )
    text = (
        "*High* is the placement of Algorithm 1, which chooses each phase for itself at 95 % "
        "attainment, so that both\ntogether attain 90 %; *Low* is the paper's placement."
    )
    table = format_table(["workload", "system", "placement", "goodput/s per GPU"], rows)
    return "\n\n".join([text, table, "\n".join(lines)])


def _throttled_table(rows: Sequence[tuple[str, System, float]]) -> str:
    text = (
        "Engines in stages, as many GPUs in each row of a workload: pairs with DistServe's local "
        "rule and with `throttle` in\nboth engines, and one engine for both phases."
    )
    cells = [
        [name, system.name, system.placement, system.prefill_policy, f"{per_gpu:.3f}"]
        for name, system, per_gpu in rows
    ]
    head = ["workload", "system", "placement", "policy", "goodput/s per GPU"]
    return f"{text}\n\n{format_table(head, cells)}"


def _queue_table(points: Sequence[QueuePoint]) -> str:
    rows = []
    for point in points:
        pairs = zip(point.closed, point.simulated, strict=True)
        cells = [
            "overloaded" if isinf(value) else f"{1e3 * value:.1f}"
            for pair in pairs
            for value in pair
        ]
        rows.append([f"{point.utilization:g}", *cells])
    text = (
        "OPT-13B on two GPUs, prompts of 512 tokens: mean TTFT in ms by the closed form of the "
        "M/D/1 queue (the paper's\nEquations 1 to 3) and in the simulator, by arrival rate times "
        "the time of a prompt on one GPU. Two ranks speed a\nprompt up by "
        f"{measured_speedup():.2f}; stages that divided it exactly would be faster from "
        f"{predicted_crossover():.2f} on (Figure 4)."
    )
    head = ["load", "TP 2 closed", "TP 2 simulated", "PP 2 closed", "PP 2 simulated"]
    return f"{text}\n\n{format_table(head, rows)}"
