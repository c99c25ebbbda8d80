"""Bounds of all engines and pairs of a goodput search, by closed forms, and of every plan.

The closed forms of one engine are in `phase_bounds`.
"""

from bisect import bisect_left
from collections.abc import Sequence

from gllm.plan.best_first import CandidateBound
from gllm.plan.goodput.engines import EngineCosts, make_engine
from gllm.plan.goodput.phase_bounds import CONSTRAINTS, bound_decode, bound_prefill
from gllm.plan.goodput.placement import PHASES, ROUNDING, PlacementUnit, engine_choices
from gllm.plan.layout import Parallelism
from gllm.plan.problem import ServiceProblem
from gllm.sim.workloads.requests import WorkloadRequest, longest_job, make_workload

NUM_BOUND_REQUESTS = 400
"""Requests from which closed forms take the lengths."""


class GoodputBounds:
    """Bounds of prefill and decode engines, each computed once.

    Args:
        problem: Model, workload, latency limits of each request, and equal nodes.
        costs: Source of the predicted step times of engines.

    Raises:
        ValueError: The workload is unknown, or has a request that is longer than the context.
    """

    def __init__(self, problem: ServiceProblem, costs: EngineCosts) -> None:
        self._problem, self._costs = problem, costs
        self._jobs = make_workload(problem.workload, NUM_BOUND_REQUESTS, seed=problem.seed)
        self._engines: dict[tuple[str, Parallelism], CandidateBound] = {}
        longest = longest_job(self._jobs)
        if longest > costs.max_model_len:
            raise ValueError(
                f"--workload {problem.workload} has a request of {longest} tokens, but "
                f"--max-model-len is {costs.max_model_len}: raise it or choose another "
                "workload"
            )

    def of_engine(self, phase: str, engine: Parallelism) -> CandidateBound:
        """Return the bound of an engine in a phase, in requests per second."""
        key = phase, engine
        if key not in self._engines:
            self._engines[key] = bound_phase(self._problem, self._costs, self._jobs, phase, engine)
        return self._engines[key]

    def per_gpu(self, phase: str, engine: Parallelism) -> CandidateBound:
        """Return the bound of an engine in a phase, in requests per second per GPU."""
        score, expected, reason = self.of_engine(phase, engine)
        return CandidateBound(score / engine.num_gpus, expected / engine.num_gpus, reason)

    def of_unit(self, unit: PlacementUnit) -> CandidateBound:
        """Return the bound of a unit per GPU: that of its slower phase."""
        each = self.of_engine("prefill", unit.prefill), self.of_engine("decode", unit.decode)
        reason = next((bound.reason for bound in each if bound.reason), "")
        return CandidateBound(
            min(bound.score for bound in each) / unit.num_gpus,
            min(bound.expected for bound in each) / unit.num_gpus,
            reason,
        )

    def min_gpus(self, rate: float) -> int:
        """Return a lower bound of the GPUs for a rate, also for engines of several kinds.

        It is that of the whole engines of each phase, wherever they are placed.
        """
        least = [bisect_left(rates, rate * (1 - ROUNDING)) for rates in self._max_rates()]
        return max(2, sum(least))

    def max_rate(self) -> float:
        """Return an upper bound of the rate on all GPUs: those of each phase are divided best."""
        prefill, decode = self._max_rates()
        return max(map(min, prefill, reversed(decode)))

    def _max_rates(self) -> list[list[float]]:
        """Return for each phase the highest bound of the rate by number of GPUs, from 0 on."""
        shape, cluster = self._problem.shape, self._problem.cluster
        choices = list(engine_choices(cluster, shape.heads, shape.layers))
        return [
            self._fill([(each.num_gpus, self.of_engine(phase, each).score) for each in choices])
            for phase in PHASES
        ]

    def _fill(self, engines: Sequence[tuple[int, float]]) -> list[float]:
        """Return the highest sum of rates of engines by number of GPUs: a knapsack.

        Args:
            engines: GPUs and rate of each kind of engine, of which there may be any number.
        """
        most = [0.0]
        for count in range(1, self._problem.cluster.num_devices + 1):
            filled = [most[count - size] + rate for size, rate in engines if size <= count]
            most.append(max(most[-1], *filled, 0.0))
        return most


def bound_phase(
    problem: ServiceProblem,
    costs: EngineCosts,
    jobs: Sequence[WorkloadRequest],
    phase: str,
    engine: Parallelism,
) -> CandidateBound:
    """Return an upper bound and an estimate of an engine's goodput in prefill or decode.

    Both are in requests per second and computed without a simulation.

    Args:
        problem: Model and latency limits.
        costs: Source of the predicted step times.
        jobs: Requests of the workload.
        phase: prefill or decode.
        engine: Parallelism of the engine; if the model does not fit, the bound is 0 with a reason.
    """
    admission = "auto" if phase == "prefill" else "distserve"
    has_prefill = phase == "prefill"
    try:
        deployment = make_engine(costs, problem.model, engine, "distserve", admission, has_prefill)
    except ValueError as error:
        return CandidateBound(0.0, 0.0, _reason_of(error))
    return (bound_prefill if has_prefill else bound_decode)(deployment, jobs, problem.limits)


def _reason_of(error: ValueError) -> str:
    """Return the constraint that an engine fails, by the error of `make_engine`."""
    text = str(error)
    if "published nothing" in text or "no batches" in text:
        return "no costs are known"
    return CONSTRAINTS[1] if "the KV cache has" in text else CONSTRAINTS[0]
