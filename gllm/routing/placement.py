"""Placement of requests on workers: latency model, constraints b to e, and capacity norm.

Source: "Aladdin" (arXiv 2405.06856): linear models of prefill, decode and KV cache, and the
constraints of its placement problem. A worker is an engine.

    prefill of all new prompts:  k1 sum(l_in) + c1
    decode step of a batch b:    k2 sum(context) + c2 b + c3

    (b) sum(l_in + gamma l_pred) <= theta (T_dec - c3 - c2 b) / k2
    (c) prefill of all new prompts <= T_pre
    (d) prefill of all new prompts <= theta min over ongoing (T_dec l_out - t_dec)
    (e) KV tokens of the batch <= M in each future step

The paper has one T_pre and one T_dec. Here each request may have limits of its own: a step serves
the whole batch and a prefill all new prompts, so T_dec is the least of the batch in (b), T_pre the
least of the new prompts in (c), and (d) has that of each ongoing request.
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
    """Linear model of an engine's prefill and decode step times; no coefficient is negative."""

    k1: float
    """Seconds per prompt token."""
    c1: float
    """Seconds per prefill."""
    k2: float
    """Seconds per token of context of a decode step."""
    c2: float
    """Seconds per request of a decode step."""
    c3: float
    """Seconds per decode step."""

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
    """Prompt length, predicted output length and progress of a request that is being placed."""

    num_prompt_tokens: int
    num_expected_tokens: float
    """Expected length of the whole output, more than `num_output_tokens`."""
    num_output_tokens: int = 0
    """Tokens generated so far; 0: its prompt has not been computed."""
    decode_seconds: float = 0.0
    """Time since the first token."""
    is_begun: bool = False
    """True if a step has scheduled some of its prompt; only re-balancing reads it."""
    slo: Slo | None = None
    """Its limits of latency; None: those of the rules."""

    @property
    def is_new(self) -> bool:
        """True if the prompt has not been computed."""
        return not self.num_output_tokens


@dataclass(frozen=True)
class PlacementRules:
    """Latency limits, safety margins and active constraints of Aladdin's placement of requests.

    Constraints: b limits the decode step time, c the prefill time, d the delay of running decodes
    by a prefill, e the KV cache. Source: "Aladdin" (arXiv 2405.06856).

    Raises:
        ValueError: A parameter is out of range.
    """

    slo: Slo = NO_SLO
    """Limits of requests without their own: of the time to first token (T_pre in the paper) and of
    the time per output token (T_dec). A constraint without a limit always holds."""
    theta: float = 0.8
    """Share of the limits that a placement uses, in (0, 1]."""
    gamma: float = 0.5
    """Share of the expected output that counts as context: half of it is the mean over time."""
    constraints: frozenset[str] = ALL_CONSTRAINTS
    """Letters of the active constraints."""

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
    """Engine to place requests on: its latency model, its requests and the size of its KV cache."""

    name: str
    model: LatencyModel
    requests: Sequence[PlacedRequest]
    num_kv_tokens: float = inf
    """Capacity of its KV cache in tokens (M in the paper)."""
    max_num_seqs: int = 256
    """Maximum number of requests of a batch."""


class WorkerLoad(NamedTuple):
    """Requests and context of an engine, as input of `meets_constraints`.

    Values that are costly to compute are functions, which are called only if a constraint needs
    them.
    """

    model: LatencyModel
    num_requests: int
    max_num_seqs: int
    num_kv_tokens: float
    context: float
    """Planned context of the requests in tokens, by the gamma of the rules."""
    ttft_seconds: float
    """Least limit of the time to first token of the requests whose prompts have not been computed;
    infinite: none."""
    tpot_seconds: float
    """Least limit of the time per output token of all requests; infinite: none."""
    num_new_tokens: Callable[[], int]
    """Returns the tokens of the prompts that have not been computed."""
    decode_slacks: Callable[[], Iterable[float]]
    """Returns by how many seconds each running request is ahead of its limit of the time per output
    token: limit times generated tokens, minus time since the first token."""
    placed_requests: Callable[[], Sequence[PlacedRequest]]
    """Returns the requests."""


def peak_kv_tokens(requests: Iterable[PlacedRequest]) -> float:
    """Return the highest number of KV tokens that a batch will need until all requests have ended.

    Uses the expected output lengths. The cache is fullest just before the end of some request: a
    request that ends r steps from now, and all later ones, have grown by r tokens then. O(n log n).
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
    """Return the expected number of context tokens of requests: sum(l_in + gamma l_pred).

    l_in is the prompt length, l_pred the predicted output length and gamma the share of it that
    counts.
    """
    return sum(
        request.num_prompt_tokens + gamma * request.num_expected_tokens for request in requests
    )


def tpot_limit(slo: Slo | None, rules: PlacementRules) -> float:
    """Return the time per output token that a request allows, in seconds; infinite: no limit.

    Args:
        slo: limits of the request; None: it has none of its own.
        rules: have the limits of such requests.
    """
    seconds = (rules.slo if slo is None else slo).tpot_seconds
    return inf if seconds is None else seconds


def ttft_limit(slo: Slo | None, rules: PlacementRules) -> float:
    """Return the time to first token that a request allows, in seconds, as `tpot_limit` does."""
    seconds = (rules.slo if slo is None else slo).ttft_seconds
    return inf if seconds is None else seconds


def admits(worker: PlacementWorker, request: PlacedRequest, rules: PlacementRules) -> bool:
    """Return True if an engine can take a request without breaking latency or KV cache limits."""
    requests = worker.requests
    new = [request for request in requests if request.is_new]
    load = WorkerLoad(
        worker.model,
        len(requests),
        worker.max_num_seqs,
        worker.num_kv_tokens,
        planned_context(requests, rules.gamma),
        min((ttft_limit(request.slo, rules) for request in new), default=inf),
        min((tpot_limit(request.slo, rules) for request in requests), default=inf),
        lambda: sum(request.num_prompt_tokens for request in new),
        lambda: (
            tpot_limit(decode.slo, rules) * decode.num_output_tokens - decode.decode_seconds
            for decode in requests
            if not decode.is_new
        ),
        lambda: requests,
    )
    return meets_constraints(load, request, rules)


def meets_constraints(load: WorkerLoad, request: PlacedRequest, rules: PlacementRules) -> bool:
    """Return True if an engine with this load can take a request within all limits.

    A request that has tokens moves with its KV cache, so that no prompt is computed for it.
    """
    if load.num_requests >= load.max_num_seqs:
        return False
    # The constraints that refuse most often first.
    num_new_tokens = request.num_prompt_tokens + load.num_new_tokens()
    ttft = min(load.ttft_seconds, ttft_limit(request.slo, rules))
    if request.is_new and not admits_prefill(
        load.model, num_new_tokens, ttft, load.decode_slacks(), rules
    ):
        return False
    tpot = min(load.tpot_seconds, tpot_limit(request.slo, rules))
    context = load.context + planned_context([request], rules.gamma)
    if not admits_context(load.model, load.num_requests + 1, context, tpot, rules):
        return False
    return admits_kv_cache([*load.placed_requests(), request], load.num_kv_tokens, rules)


def admits_prefill(
    model: LatencyModel,
    num_new_tokens: int,
    ttft_seconds: float,
    slacks: Iterable[float],
    rules: PlacementRules,
) -> bool:
    """Return True if prefilling all new prompts breaks no latency limit: constraints (c) and (d).

    (c) limits the prefill time by the time to first token. (d) requires that no running request
    falls behind its limit of the time per output token while it waits for the prefill.

    Args:
        model: latency model of the engine.
        num_new_tokens: tokens of the prompts that have not been computed.
        ttft_seconds: least limit of the time to first token of these prompts; infinite: none.
        slacks: time in seconds by which each running request is ahead of its limit of the time per
            output token; infinite without a limit.
        rules: safety margins and active constraints.
    """
    seconds = model.prefill_seconds(num_new_tokens)
    if "c" in rules.constraints and seconds > ttft_seconds:
        return False
    if "d" not in rules.constraints:
        return True
    least = seconds / rules.theta
    return all(slack >= least for slack in slacks)


def admits_context(
    model: LatencyModel, batch: int, context: float, tpot_seconds: float, rules: PlacementRules
) -> bool:
    """Return True if a decode step meets the limit of the time per output token: constraint (b).

    Args:
        model: latency model of the engine.
        batch: requests in the step.
        context: their expected context in tokens.
        tpot_seconds: least limit of the time per output token of these requests; infinite: none.
        rules: safety margins and active constraints.
    """
    if "b" not in rules.constraints:
        return True
    return context <= rules.theta * model.max_context(batch, tpot_seconds)


def admits_kv_cache(
    batch: Iterable[PlacedRequest], num_kv_tokens: float, rules: PlacementRules
) -> bool:
    """Return True if the KV cache can hold a batch until all its requests end: constraint (e)."""
    return "e" not in rules.constraints or peak_kv_tokens(batch) <= num_kv_tokens


def load_norm(
    model: LatencyModel,
    batch: int,
    context: float,
    num_kv_tokens: float,
    max_num_seqs: int,
    tpot_seconds: float,
) -> float:
    """Return an engine's load as Euclidean norm of its batch size and context, each over its limit.

    Args:
        model: latency model of the engine.
        batch: number of requests.
        context: their expected context in tokens.
        num_kv_tokens: capacity of the KV cache in tokens.
        max_num_seqs: limit of the number of requests.
        tpot_seconds: least limit of the time per output token of a step; infinite: none.
    """
    limit = min(num_kv_tokens, model.max_context(batch + 1, tpot_seconds))
    return hypot(batch / max_num_seqs, context / max(1.0, limit) if limit < inf else 0.0)


def _context(request: PlacedRequest) -> int:
    return request.num_prompt_tokens + request.num_output_tokens
