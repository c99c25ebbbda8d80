"""Results of goodput searches: the best candidates, or the constraint that refuses all."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from gllm.plan.best_first import BestFirstOutcome, CandidateBound
from gllm.plan.goodput.phase_bounds import constraint_of_nearest_candidate
from gllm.plan.goodput.placement import PHASES, PhaseGoodput, PlacementUnit
from gllm.plan.layout import Parallelism
from gllm.plan.strategies import UnservableError

FIXES = {
    "GPU memory": "choose a device with more memory, or more GPUs per node",
    "KV cache": "choose a device with more memory, more GPUs per node, or shorter requests",
    "TTFT": "loosen the limit of ttft, or allow more GPUs per node",
    "TPOT": "loosen the limit of tpot, or allow more GPUs per node",
}
"""Remedy of each constraint."""
Candidate = TypeVar("Candidate", Parallelism, PlacementUnit)
PhaseSearch = BestFirstOutcome[Parallelism, float]
UnitSearch = BestFirstOutcome[PlacementUnit, float]


def values_of(
    search: BestFirstOutcome[Candidate, float],
    bounds: Sequence[tuple[Candidate, CandidateBound]],
) -> dict[Candidate, float]:
    """Return the goodputs per GPU that a search has found.

    If the budget ended before it found one, they are those that closed forms expect.
    """
    if search.evaluated:
        return dict(search.evaluated)
    return {candidate: bound.expected for candidate, bound in bounds if not bound.reason}


def best_pair(
    searches: Mapping[str, PhaseSearch],
    bounds: Mapping[str, Sequence[tuple[Parallelism, CandidateBound]]],
    num_gpus: int,
) -> tuple[PhaseGoodput, PhaseGoodput]:
    """Return the engines with the fewest GPUs per rate that so many GPUs hold together.

    These are the best ones of each phase, unless both together are too large.

    Raises:
        UnservableError: No simulated engines fit together.
    """
    prefills, decodes = (
        [
            PhaseGoodput(engine, value * engine.num_gpus)
            for engine, value in values_of(searches[phase], bounds[phase]).items()
        ]
        for phase in PHASES
    )
    pairs = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if prefill.rate > 0
        and decode.rate > 0
        and prefill.parallelism.num_gpus + decode.parallelism.num_gpus <= num_gpus
    ]
    if not pairs:
        raise UnservableError(
            f"no simulated engine of each phase fit {num_gpus} GPUs together: add nodes"
        )
    return min(pairs, key=lambda pair: 1 / pair[0].per_gpu + 1 / pair[1].per_gpu)


def require_best(
    title: str,
    search: BestFirstOutcome[Candidate, float],
    bounds: Sequence[tuple[Candidate, CandidateBound]],
) -> Candidate:
    """Return the best candidate of a search.

    Args:
        title: Name of a candidate.
        search: What the search has found.
        bounds: All candidates with their bounds.

    Raises:
        UnservableError: There is none; the message names the constraint that binds.
    """
    if search.best is not None and search.best[1] > 0:
        return search.best[0]
    if search.untried and search.best is None:
        # The plan is judged at the rate that closed forms expect, or below.
        return search.untried[0]
    counts = Counter(bound.reason for _, bound in bounds if bound.reason)
    if search.best is not None:
        constraint = "latency limits, with queues"
        counts[constraint] = len(search.evaluated)
    else:
        constraint = constraint_of_nearest_candidate(list(counts))
    account = ", ".join(f"{count} by {reason}" for reason, count in counts.items())
    raise UnservableError(
        f"no {title} of {len(bounds)} fits: {constraint} binds ({account or 'none to try'}): "
        f"{FIXES.get(constraint, 'loosen --slo')}"
    )
