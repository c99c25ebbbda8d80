"""Verdicts on the default policy: its figures over those of the best policies of a cell."""

import math
from collections.abc import Callable, Sequence
from statistics import fmean, geometric_mean, stdev
from typing import Any, NamedTuple

from experiments.claims import ExpectedLimit, PaperClaim
from gllm.sim.metrics.plots import ChartPanel
from gllm.sim.metrics.report import format_table

OURS = "throttle"
E2EL_LIMIT, THROUGHPUT_LIMIT, ITL_LIMIT = 1.03, 0.99, 1.2
"""Aims: ratio of the default's mean E2EL, throughput and ITL p99 to the best policy's."""
AIMS = (
    f"Aims of `{OURS}`: mean E2EL at most {E2EL_LIMIT} x that of the best policy of the cell, "
    f"throughput at least {THROUGHPUT_LIMIT} x the best, ITL p99 at most {ITL_LIMIT} x that of "
    "the policy with the best E2EL."
)
OTHERS = (
    "Other policies:\n\n"
    "- `throttle-paper`: the equations of the paper, with its constants\n"
    f"- `balance`: chunks of the size that `{OURS}` chooses and equal shares of decodes, but "
    "filled by predicted time, with query-key pairs and context, instead of tokens\n"
    "- `sarathi`: all decodes, then chunks up to 2,048 tokens\n"
    "- `vllm`: whole prompts as soon as their blocks are free, else decodes; never both"
)
STUDENT_T = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776}
"""Factor of the 95 % interval of a mean, by number of seeds."""


class PolicyCell(NamedTuple):
    """Load of a comparison, without its seed."""

    device: str
    stages: int
    workload: str
    share: float

    def __str__(self) -> str:
        return f"{self.device}, {self.stages} stages, {self.workload}, {self.share}"


class CellFigures(NamedTuple):
    """Figures of one policy in one run."""

    e2el: float
    """Mean in seconds."""
    throughput: float
    """Tokens per second until 80 % of the requests have arrived."""
    itl: float
    """p99 in seconds."""
    ttft: float
    tpot: float
    """Means in seconds."""
    bubbles: float
    """Bubble share of the worst stage, 0..1."""
    attainment: float
    """Share of the requests within the limits of TTFT and TPOT, 0..1."""
    variation: float
    """Standard deviation over mean of the time of a micro-batch."""

    @classmethod
    def from_summary(cls, summary: dict[str, Any]) -> "CellFigures":
        """Return the figures of `summarize_run`."""
        return cls(
            summary["e2el"]["mean"],
            summary["steady_tokens_per_second"],
            summary["itl"]["p99"],
            summary["ttft"]["mean"],
            summary["tpot"]["mean"],
            max(summary["bubble_share"]),
            summary["slo_attainment"],
            summary["seconds_per_step_variation"],
        )


class RatioInterval(NamedTuple):
    """Mean over seeds of our figure over that of a policy, with its 95 % interval."""

    mean: float
    half_width: float
    policy: str

    def __str__(self) -> str:
        return f"{self.mean:.2f} ± {self.half_width:.2f} {self.policy}"


class CellVerdict(NamedTuple):
    """Ratios of the default to the best policies of a cell."""

    cell: PolicyCell
    e2el: RatioInterval
    throughput: RatioInterval
    itl: RatioInterval
    """To the policy of the best E2EL."""
    least_itl: RatioInterval
    """To the policy with the least ITL p99, whatever its E2EL."""
    means: dict[str, CellFigures]
    """Figures of every policy, means over the seeds."""

    @property
    def misses(self) -> tuple[str, ...]:
        """Names of the aims that are missed."""
        flags = {
            "E2EL": self.e2el.mean > E2EL_LIMIT,
            "throughput": self.throughput.mean < THROUGHPUT_LIMIT,
            "ITL": self.itl.mean > ITL_LIMIT,
        }
        return tuple(name for name, is_missed in flags.items() if is_missed)

    @property
    def distance(self) -> float:
        """Largest excess over a limit, in units of what the limit permits."""
        return max(
            (self.e2el.mean - 1) / (E2EL_LIMIT - 1),
            (1 - self.throughput.mean) / (1 - THROUGHPUT_LIMIT),
            (self.itl.mean - 1) / (ITL_LIMIT - 1),
        )


def judge_cell(cell: PolicyCell, runs: Sequence[dict[str, CellFigures]]) -> CellVerdict:
    """Compare the default with the best policies of a cell.

    Args:
        cell: The cell.
        runs: Figures of all policies by name, one entry per seed.
    """
    means = {
        policy: CellFigures(*map(fmean, zip(*(run[policy] for run in runs), strict=True)))
        for policy in runs[0]
    }
    others = {policy: figures for policy, figures in means.items() if policy != OURS}

    def compare(field: str, policy: str) -> RatioInterval:
        ratios = [getattr(run[OURS], field) / getattr(run[policy], field) for run in runs]
        half = STUDENT_T[len(runs)] * stdev(ratios) / math.sqrt(len(runs)) if len(runs) > 1 else 0.0
        return RatioInterval(fmean(ratios), half, policy)

    best = min(others, key=lambda policy: others[policy].e2el)
    return CellVerdict(
        cell,
        compare("e2el", best),
        compare("throughput", max(others, key=lambda policy: others[policy].throughput)),
        compare("itl", best),
        compare("itl", min(others, key=lambda policy: others[policy].itl)),
        means,
    )


def policies_text(verdicts: Sequence[CellVerdict]) -> str:
    """Return the aims, the policies, counts by device, and the cells that miss an aim."""
    missed = [verdict for verdict in verdicts if verdict.misses]
    return (
        f"{AIMS} Intervals: 95 %, over seeds. {OTHERS}\n"
        "- `sarathi:512`: chunks up to 512 tokens\n"
        f"- `fixed`: `{OURS}` without learning, for a ridge of 150 tokens or that of the device\n\n"
        f"## Policies beside `{OURS}`\n\n"
        f"Geometric means over all cells of a device of the figure over that of `{OURS}`; means of "
        "attainment and of the variation of the micro-batches' times. Limits: 5 x TTFT and 2 x "
        f"TPOT of the 90th percentile of `{OURS}` next to no load.\n\n{_policies(verdicts)}\n\n"
        f"## Cells that keep the aims\n\nAll three: {len(verdicts) - len(missed)} of "
        f"{len(verdicts)}. Mean ratio of E2EL: {fmean(v.e2el.mean for v in verdicts):.3f}.\n\n"
        f"{_counts(verdicts)}\n\n"
        f"## Cells that miss an aim, worst first\n\n{_misses(missed)}"
    )


def _policies(verdicts: Sequence[CellVerdict]) -> str:
    """Return every policy's figures in relation to the default's, by device."""
    rows = []
    for device in dict.fromkeys(sorted(verdict.cell.device for verdict in verdicts)):
        cells = [verdict.means for verdict in verdicts if verdict.cell.device == device]
        for policy in cells[0]:
            ratios = [
                geometric_mean(
                    getattr(each[policy], name) / getattr(each[OURS], name) for each in cells
                )
                for name in ("ttft", "tpot", "e2el", "itl", "throughput")
            ]
            attainment = fmean(each[policy].attainment for each in cells)
            variation = fmean(each[policy].variation for each in cells)
            rows.append(
                [
                    device,
                    policy,
                    *(f"{ratio:.3f}" for ratio in ratios),
                    f"{100 * attainment:.1f}",
                    f"{variation:.2f}",
                ]
            )
    header = ["device", "policy", "TTFT", "TPOT", "E2EL", "ITL p99", "throughput"]
    return format_table([*header, "SLOs met, %", "CV of time"], rows)


def _counts(verdicts: Sequence[CellVerdict]) -> str:
    """Return the numbers of cells that keep the aims, by device and number of stages."""
    rows = []
    for device, stages in sorted({verdict.cell[:2] for verdict in verdicts}):
        group = [v for v in verdicts if v.cell[:2] == (device, stages)]
        kept = [sum(aim not in v.misses for v in group) for aim in ("E2EL", "throughput", "ITL")]
        rows.append(
            [
                f"{device}, {stages}",
                str(len(group)),
                str(sum(not v.misses for v in group)),
                *map(str, kept),
                f"{fmean(v.e2el.mean for v in group):.3f}",
                f"{max(v.e2el.mean for v in group):.2f}",
                f"{min(v.throughput.mean for v in group):.3f}",
                f"{fmean(v.itl.mean for v in group):.2f}",
                str(sum(v.least_itl.mean <= ITL_LIMIT for v in group)),
            ]
        )
    header = ["device, stages", "cells", "all aims", "E2EL", "throughput", "ITL", "mean E2EL ratio"]
    header += ["worst E2EL", "worst throughput", "mean ITL ratio", "ITL within 1.2 x of the least"]
    return format_table(header, rows)


def _misses(verdicts: Sequence[CellVerdict]) -> str:
    rows = [
        [
            str(v.cell),
            ", ".join(v.misses),
            str(v.e2el),
            str(v.throughput),
            str(v.itl),
            str(v.least_itl),
            f"{ours.ttft:.2f} / {1e3 * ours.tpot:.0f} / {ours.e2el:.2f} / "
            f"{1e3 * ours.itl:.0f}; {100 * ours.bubbles:.0f} %",
        ]
        for v in verdicts
        for ours in [v.means[OURS]]
    ]
    header = ["cell", "missed", "E2EL / best", "throughput / best", "ITL p99 / that of best E2EL"]
    header += ["ITL p99 / least", "TTFT s / TPOT ms / E2EL s / ITL p99 ms; bubbles"]
    return format_table(header, rows) if rows else "None."


def aim_claims(verdicts: Sequence[CellVerdict]) -> list[PaperClaim]:
    """Return the numbers of cells that keep each aim, and the worst cells."""
    count = len(verdicts)
    worst: dict[str, Callable[[CellVerdict], float]] = {
        "E2EL": lambda verdict: verdict.e2el.mean,
        "throughput": lambda verdict: -verdict.throughput.mean,
        "ITL": lambda verdict: verdict.itl.mean,
    }
    return [
        PaperClaim(
            f"cells that keep the aim of {aim}",
            ExpectedLimit(count, is_minimum=True, unit="cells", digits=0, name="our own aim, all"),
            sum(aim not in verdict.misses for verdict in verdicts),
            f"of {count}; worst {abs(excess(verdict)):.3f} x ({verdict.cell})",
        )
        for aim, excess in worst.items()
        for verdict in [max(verdicts, key=excess)]
    ]


def make_panels(verdicts: Sequence[CellVerdict]) -> list[ChartPanel]:
    """Return the sorted ratios of each figure over the cells."""
    panels = []
    for label, field in (("E2EL", "e2el"), ("throughput", "throughput"), ("ITL p99", "itl")):
        ratios = sorted(getattr(verdict, field).mean for verdict in verdicts)
        points = {"throttle": [(float(i), ratio) for i, ratio in enumerate(ratios)]}
        panels.append(ChartPanel(label, "cells, sorted", "ratio to the best", points))
    return panels
