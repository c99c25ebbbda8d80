"""Ranks or stages for decode: time of a step and throughput at a fixed batch.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3.2 and Figure 5.
"""

from typing import NamedTuple

from experiments.claims import ExpectedDirection, PaperClaim
from gllm.plan.engine_times import EngineTimes, decode_step_work
from gllm.plan.goodput.engines import DISTSERVE_COSTS, make_engine
from gllm.plan.layout import Parallelism
from gllm.sim.metrics.report import format_table

MODEL = "opt-13b"
BATCH, CONTEXT = 128, 256
"""Requests of a step, and tokens of context of each."""
NUM_GPUS = 1, 2, 4


class DecodePoint(NamedTuple):
    """Decode step on an engine; with stages, each stage has a batch of its own."""

    engine: Parallelism
    step_seconds: float
    tokens_per_second: float


def decode_points() -> list[DecodePoint]:
    """Return the points of the paper's Figure 5: ranks and stages on 1, 2 and 4 GPUs."""
    engines = [Parallelism(count) for count in NUM_GPUS]
    engines += [Parallelism(1, count) for count in NUM_GPUS[1:]]
    points = []
    for engine in engines:
        deployment = make_engine(DISTSERVE_COSTS, MODEL, engine, "distserve")
        times, work = EngineTimes(deployment.cost, engine.pp), decode_step_work(BATCH, CONTEXT)
        points.append(DecodePoint(engine, times.total(work), BATCH / max(times.stages(work))))
    return points


def decode_table(points: list[DecodePoint]) -> str:
    """Return the points beside those of one GPU."""
    one = points[0]
    rows = [
        [
            str(point.engine),
            f"{1e3 * point.step_seconds:.1f}",
            f"{point.step_seconds / one.step_seconds:.2f}",
            f"{point.tokens_per_second:.0f}",
            f"{point.tokens_per_second / one.tokens_per_second:.2f}",
        ]
        for point in points
    ]
    text = (
        f"OPT-13B, a decode step of {BATCH} requests with {CONTEXT} tokens of context each, by the "
        "coefficients alone (the\npaper's Figure 5, a plot without numbers in its text): ranks "
        "shorten a step, less with each further one. Each stage has\na batch of its own, so that "
        "stages raise the throughput, here by less than in proportion: the coefficients add 1 ms\n"
        "per stage to each stage, which also lengthens the step."
    )
    head = ["engine", "step, ms", "x one GPU", "tokens/s", "x one GPU"]
    return f"{text}\n\n{format_table(head, rows)}"


def decode_claims(points: list[DecodePoint]) -> list[PaperClaim]:
    """Return the directions of the paper's Figure 5 beside ours."""
    by_engine = {point.engine: point for point in points}
    ranks, stages = by_engine[Parallelism(4)], by_engine[Parallelism(1, 4)]
    shorter = ranks.step_seconds / points[0].step_seconds - 1
    more = stages.tokens_per_second / ranks.tokens_per_second - 1
    return [
        PaperClaim("Figure 5: step of four ranks", ExpectedDirection(False, "shorter"), shorter),
        PaperClaim(
            "Figure 5: throughput of four stages against four ranks",
            ExpectedDirection(True, "more"),
            more,
        ),
    ]
