"""Placement of requests on workers: latency model, constraints b to e, and capacity norm.

Source: "Aladdin" (arXiv 2405.06856): linear models of prefill, decode and KV cache, and the
constraints of its placement problem. A worker is an engine.

    prefill of all new prompts:  k1 sum(l_in) + c1
    decode step of a batch b:    k2 sum(context) + c2 b + c3

    (b) sum(l_in + gamma l_pred) <= theta (T_dec - c3 - c2 b) / k2
    (c) prefill of all new prompts <= T_pre
    (d) prefill of all new prompts <= theta min over ongoing (T_dec l_out - t_dec)
    (e) KV tokens of the batch <= M in each future step
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import hypot, inf
from typing import NamedTuple

from gllm.options.slo import NO_SLO, Slo
from gllm.scheduler.step_cost import StepCostCoefficients

ALL_CONSTRAINTS = frozenset("bcde")
SPLIT_DECODE_CONSTRAINTS = frozenset("be")
"""Constraints of an engine that only decodes."""


class LatencyModel(NamedTuple):
    """Linear latency model of one engine, in seconds per token; no coefficient is negative."""

    k1: float
    """Per prompt token."""
    c1: float
    """Per prefill."""
    k2: float
    """Per token of context of a decode step."""
    c2: float
    """Per request of a decode step."""
    c3: float
    """Per decode step."""

    @classmethod
    def from_step_costs(cls, costs: StepCostCoefficients, num_prompt_tokens: int) -> "LatencyModel":
        """Create the model from an engine's fitted step costs.

        Args:
            costs: Step costs of the engine.
            num_prompt_tokens: Length at which the cost of query-key pairs is linearised.
        """
        per_token = costs.token + costs.pair * num_prompt_tokens / 2
        return cls(
            per_token, costs.step, costs.context_token, costs.token + costs.decode, costs.step
        )

    def prefill_seconds(self, num_tokens: int) -> float:
        """Return the prefill time of prompts with a total number of tokens."""
        return self.k1 * num_tokens + self.c1

    def decode_seconds(self, batch: int, context: float) -> float:
        """Return the time of one decode step of a batch with a total context in tokens."""
        return self.k2 * context + self.c2 * batch + self.c3

    def max_context(self, batch: int, tpot_seconds: float) -> float:
        """Return the total context in tokens at which a decode step reaches a time limit."""
        seconds = tpot_seconds - self.c3 - self.c2 * batch
        if seconds < 0:
            return 0.0
        return seconds / self.k2 if self.k2 else inf


class PlacedRequest(NamedTuple):
    """Request of an engine, or one that is being placed."""

    num_prompt_tokens: int
    num_expected_tokens: float
    """Expected length of the whole output, more than `num_output_tokens`."""
    num_output_tokens: int = 0
    """Tokens generated so far; 0: its prompt has not been computed."""
    decode_seconds: float = 0.0
    """Time since the first token."""
    is_begun: bool = False
    """True if a step has scheduled part of its prompt; only re-balancing reads it."""

    @property
    def is_new(self) -> bool:
        """True if the prompt has not been computed."""
        return not self.num_output_tokens


@dataclass(frozen=True)
class PlacementRules:
    """Constraints of a placement and their parameters.

    Raises:
        ValueError: A parameter is out of range.
    """

    slo: Slo = NO_SLO
    """T_pre and T_dec; a constraint without its limit always holds."""
    theta: float = 0.8
    """Share of the limits that a placement uses, in (0, 1]."""
    gamma: float = 0.5
    """Share of the expected output that counts as context: half of it is the mean over time."""
    constraints: frozenset[str] = ALL_CONSTRAINTS

    def __post_init__(self) -> None:
        """Check the parameters."""
        if not 0 < self.theta <= 1 or not 0 <= self.gamma <= 1:
            raise ValueError(
                f"theta is {self.theta} and gamma {self.gamma}: theta has to be in (0, 1], gamma "
                "in [0, 1]"
            )
        if unknown := self.constraints - ALL_CONSTRAINTS:
            raise ValueError(f"constraints {sorted(unknown)} are none of b, c, d and e")


class PlacementWorker(NamedTuple):
    """Engine with its latency model and requests."""

    name: str
    model: LatencyModel
    requests: Sequence[PlacedRequest]
    num_kv_tokens: float = inf
    """M: tokens that its KV cache holds."""
    max_num_seqs: int = 256
    """Maximum number of requests of a batch."""


class WorkerLoad(NamedTuple):
    """Load of an engine as `meets_constraints` reads it; costly figures are computed on demand."""

    model: LatencyModel
    num_requests: int
    max_num_seqs: int
    num_kv_tokens: float
    context: float
    """Planned context of the requests in tokens, by the gamma of the rules."""
    num_new_tokens: Callable[[], int]
    """Returns the tokens of the prompts that have not been computed."""
    decode_slacks: Callable[[float], Iterable[float]]
    """Returns T_dec l_out - t_dec in seconds of each ongoing request, for a T_dec."""
    placed_requests: Callable[[], Sequence[PlacedRequest]]
    """Returns the requests."""


def peak_kv_tokens(requests: Iterable[PlacedRequest]) -> float:
    """Return the peak number of KV tokens of a batch, by its expected output lengths.

    In the order of their ends, the cache is fullest just before each of them: a request that ends
    r steps from now, and all later ones, have grown by r tokens then. O(n log n).
    """
    by_end = sorted(
        (request.num_expected_tokens - request.num_output_tokens, _context(request))
        for request in requests
    )
    total, peak = sum(context for _, context in by_end), 0.0
    for index, (remaining, context) in enumerate(by_end):
        peak = max(peak, total + (len(by_end) - index) * remaining)
        total -= context
    return peak


def planned_context(requests: Iterable[PlacedRequest], gamma: float) -> float:
    """Return the planned context of requests in tokens: sum(l_in + gamma l_pred)."""
    return sum(
        request.num_prompt_tokens + gamma * request.num_expected_tokens for request in requests
    )


def admits(worker: PlacementWorker, request: PlacedRequest, rules: PlacementRules) -> bool:
    """Return True if an engine meets all constraints with one more request."""
    requests = worker.requests
    decoding = [request for request in requests if not request.is_new]
    load = WorkerLoad(
        worker.model,
        len(requests),
        worker.max_num_seqs,
        worker.num_kv_tokens,
        planned_context(requests, rules.gamma),
        lambda: sum(request.num_prompt_tokens for request in requests if request.is_new),
        lambda tpot: (
            tpot * decode.num_output_tokens - decode.decode_seconds for decode in decoding
        ),
        lambda: requests,
    )
    return meets_constraints(load, request, rules)


def meets_constraints(load: WorkerLoad, request: PlacedRequest, rules: PlacementRules) -> bool:
    """Return True if an engine with this load meets all constraints with one more request."""
    if load.num_requests >= load.max_num_seqs:
        return False
    # The constraints that refuse most often first.
    num_new_tokens = request.num_prompt_tokens + load.num_new_tokens()
    slacks = load.decode_slacks(rules.slo.tpot_seconds or 0.0)
    if not admits_prefill(load.model, num_new_tokens, slacks, rules):
        return False
    context = load.context + planned_context([request], rules.gamma)
    if not admits_context(load.model, load.num_requests + 1, context, rules):
        return False
    return admits_kv_cache([*load.placed_requests(), request], load.num_kv_tokens, rules)


def admits_prefill(
    model: LatencyModel, num_new_tokens: int, slacks: Iterable[float], rules: PlacementRules
) -> bool:
    """Return True if the prefill of all new prompts meets constraints (c) and (d).

    Args:
        model: Of the worker.
        num_new_tokens: Tokens of these prompts.
        slacks: T_dec l_out - t_dec in seconds, of each ongoing request; not read without T_dec.
        rules: Limits.
    """
    ttft, tpot = rules.slo.ttft_seconds, rules.slo.tpot_seconds
    seconds = model.prefill_seconds(num_new_tokens)
    if "c" in rules.constraints and ttft is not None and seconds > ttft:
        return False
    if "d" not in rules.constraints or tpot is None:
        return True
    least = seconds / rules.theta
    return all(slack >= least for slack in slacks)


def admits_context(model: LatencyModel, batch: int, context: float, rules: PlacementRules) -> bool:
    """Return True if a decode step with a planned context meets constraint (b)."""
    tpot = rules.slo.tpot_seconds
    if "b" not in rules.constraints or tpot is None:
        return True
    return context <= rules.theta * model.max_context(batch, tpot)


def admits_kv_cache(
    batch: Iterable[PlacedRequest], num_kv_tokens: float, rules: PlacementRules
) -> bool:
    """Return True if the KV cache holds a batch until its end: constraint (e)."""
    return "e" not in rules.constraints or peak_kv_tokens(batch) <= num_kv_tokens


def load_norm(
    model: LatencyModel,
    batch: int,
    context: float,
    num_kv_tokens: float,
    max_num_seqs: int,
    rules: PlacementRules,
) -> float:
    """Return the norm of a batch and its planned context in tokens, each per its limit."""
    limit = num_kv_tokens
    if rules.slo.tpot_seconds is not None:
        limit = min(limit, model.max_context(batch + 1, rules.slo.tpot_seconds))
    return hypot(batch / max_num_seqs, context / max(1.0, limit) if limit < inf else 0.0)


def _context(request: PlacedRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
