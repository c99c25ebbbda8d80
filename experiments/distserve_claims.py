"""DistServe's claims beside our figures, and the plots."""

from collections.abc import Sequence
from math import isinf
from statistics import fmean

from experiments.claims import (
    ExpectedChange,
    ExpectedDirection,
    ExpectedFigure,
    ExpectedLimit,
    PaperClaim,
)
from experiments.distserve_decode import decode_claims, decode_points
from experiments.distserve_study import SHARES, Study, WorkloadResult
from experiments.distserve_tables import BREAKDOWN_SHARE, SYSTEMS
from experiments.distserve_workloads import TABLE_2
from gllm.options.slo import TARGET_ATTAINMENT
from gllm.plan.goodput.systems import PARTS
from gllm.sim.metrics.plots import ChartPanel


def make_claims(study: Study) -> list[PaperClaim]:
    """Return the paper's claims beside our figures."""
    claims = [claim for result in study.results for claim in gain_claims(result)]
    return [
        *claims,
        *_transfer_claims(study),
        *_motivation_claims(study),
        *_table_2_claims(study),
        *_placement_claims(study),
        *_queue_claims(study),
        *decode_claims(decode_points()),
    ]


def gain_claims(result: WorkloadResult) -> list[PaperClaim]:
    """Return the claims on DistServe beside vLLM: goodput, and how tight the limits can be."""
    workload = result.workload
    claims = []
    for title, paper, ours in (
        ("goodput per GPU against vLLM", workload.rate_gain, result.gain("DistServe", "vLLM")),
        (
            "limits tighter than vLLM's",
            workload.scale_gain,
            result.scale_gain("DistServe", "vLLM"),
        ),
    ):
        expected = ExpectedChange(*paper, is_ratio=True)
        note = "(vLLM attains it at no rate)" if ours is not None and isinf(ours) else ""
        claims.append(PaperClaim(f"{workload.name}: {title}", expected, ours, note))
    return claims


def _transfer_claims(study: Study) -> list[PaperClaim]:
    claims = []
    for result in study.results:
        outcome = result.outcomes.get(("DistServe", BREAKDOWN_SHARE))
        if result.workload.model != "opt-175b" or outcome is None or not outcome.parts:
            continue
        share = outcome.parts[PARTS.index("transfer")] / sum(outcome.parts)
        short = fmean(transfer < 0.03 for transfer in outcome.transfers)
        claims += [
            PaperClaim(
                "OPT-175B: transfer's share of latency",
                ExpectedLimit(0.001, digits=2, name="paper"),
                share,
            ),
            PaperClaim(
                "OPT-175B: transfers below 30 ms",
                ExpectedLimit(0.95, is_minimum=True, name="paper"),
                short,
            ),
        ]
    return claims


def _motivation_claims(study: Study) -> list[PaperClaim]:
    goodputs = next(iter(study.motivation.values()))
    base, both = goodputs["vLLM"], goodputs["2P1D"]
    change = both / base - 1 if base else None
    return [
        PaperClaim("Figure 1, colocated, requests/s per GPU", ExpectedFigure(1.6, ""), base),
        PaperClaim("Figure 1, 2 prefill and 1 decode", ExpectedFigure(3.3, ""), both),
        PaperClaim("Figure 1, gain", ExpectedChange(1.1, is_ratio=True), change),
        PaperClaim(
            "Figure 1, gain with the same coefficients",
            ExpectedLimit(1.4, is_minimum=True, unit="x"),
            both / goodputs["colocated"] if goodputs["colocated"] else None,
        ),
    ]


def _table_2_claims(study: Study) -> list[PaperClaim]:
    return [
        PaperClaim(
            f"Table 2, {name}, {table.workload.model}: mean difference to the real system",
            ExpectedLimit(0.02, name="its own simulator"),
            fmean(abs(a - b) for a, b in zip(table.attained[name], TABLE_2[name], strict=True)),
        )
        for table in study.table_2
        for name in TABLE_2
    ]


def _placement_claims(study: Study) -> list[PaperClaim]:
    claims = []
    for high in study.high:
        name = high.low.workload.name
        change = high.per_gpu / high.low.per_gpu("DistServe") - 1
        claims += [
            PaperClaim(
                f"{name}: DistServe-High against -Low", ExpectedDirection(True, "better"), change
            ),
            PaperClaim(
                f"{name}: attainment of as many engines as Algorithm 1 needs for "
                f"{high.sized_rate:.1f}/s",
                ExpectedLimit(TARGET_ATTAINMENT, is_minimum=True),
                high.sized_attainment,
            ),
        ]
    return claims


def _queue_claims(study: Study) -> list[PaperClaim]:
    """Compare ranks with stages at the lowest and the highest rate of Figure 4."""
    claims = []
    for point, word in ((study.queues[0], "lowest"), (study.queues[-1], "highest")):
        ranks, stages = point.simulated
        claims.append(
            PaperClaim(
                f"Figure 4: TTFT of two stages against two ranks at the {word} rate",
                ExpectedDirection(point is study.queues[0], "more" if word == "lowest" else "less"),
                stages / ranks - 1,
            )
        )
    return claims


def make_panels(results: Sequence[WorkloadResult]) -> list[ChartPanel]:
    """Return a chart of the joint attainment by rate for each workload."""
    panels = []
    for result in results:
        base, workload = result.per_gpu("DistServe"), result.workload
        series = {
            name: [
                (share * base, 100 * outcome.attainment(workload.ttft, workload.tpot))
                for share in SHARES
                if (outcome := result.outcomes.get((name, share))) is not None
            ]
            for name in SYSTEMS
        }
        panels.append(ChartPanel(workload.name, "requests/s per GPU", "attainment, %", series))
    return panels
