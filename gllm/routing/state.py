"""Inputs of a routing decision: the state of each engine, and the request."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple

from gllm.options.slo import Slo
from gllm.scheduler.output_lengths import UNKNOWN_LENGTH, LengthEstimate
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients


class RoutingRequest(NamedTuple):
    """Prompt length, block hashes, limits and SLO of a request, as input of routing policies."""

    num_prompt_tokens: int
    """Tokens to prefill: the prompt, and the tokens that an earlier engine has generated."""
    block_hashes: Sequence[bytes] = ()
    """Chain hashes of the full blocks of these tokens, as gllm.scheduler.block_pool makes them."""
    num_output_tokens: int = 256
    """Expected number of tokens to generate."""
    max_tokens: int = 256
    """Maximum number of tokens to generate."""
    priority: int = 0
    """Requests with smaller values run earlier."""
    session: str = ""
    """Requests of one session should share an engine; empty for none."""
    slo: Slo | None = None
    """Limits of the time to first token and per output token; None for none."""
    length_estimate: LengthEstimate = UNKNOWN_LENGTH
    """Prediction of the tokens to generate, from which `num_output_tokens` follows."""
    is_moved: bool = False
    """True if an engine has had the request already and it continues elsewhere."""


@dataclass(slots=True)
class OngoingRequest:
    """Prompt length and progress of an unfinished request on an engine; updated with each token."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    """Tokens generated so far; 0 before the prefill has ended."""
    first_token_time: float = 0.0
    """Time of the first token in seconds, on the clock of `EngineSnapshot.time`."""
    length_estimate: LengthEstimate = field(default=UNKNOWN_LENGTH, compare=False, repr=False)
    """Prediction of the tokens that it generates on the engine."""
    slo: Slo | None = None
    """Its limits of the time to first token and per output token; None for none."""


class EngineSnapshot(NamedTuple):
    """State, load and limits of one engine at one time, as input of routing policies."""

    name: str
    role: str = "mixed"
    state: str = "ready"
    stats: SchedulerStats = SchedulerStats()
    """Latest statistics that the engine has reported."""
    coefficients: StepCostCoefficients | None = None
    """Step cost model that the engine has fitted to its steps; None until it has one."""
    num_blocks: int = 0
    """KV blocks of the engine."""
    block_size: int = 16
    """Tokens per KV block."""
    num_stages: int = 1
    num_sent: int = 0
    """Requests sent by this router that `stats` do not include yet."""
    num_sent_tokens: int = 0
    """Prompt tokens of these requests that the engine has not cached."""
    weight: float = 1.0
    """Share of its normal load that the engine should get, in (0, 1]; below 1 in slow start."""
    max_num_seqs: int = 256
    """Maximum number of sequences that hold KV blocks."""
    max_num_batched_tokens: int = 2048
    """Maximum number of tokens per micro-batch."""
    ongoing: Sequence[OngoingRequest] = ()
    """Unfinished requests of this router, if the policy reads them (`uses_ongoing`). They are the
    router's own: valid until its next message."""
    time: float = 0.0
    """Time of the snapshot in seconds, if it has `ongoing`."""

    @property
    def num_requests(self) -> int:
        """Number of unfinished sequences, including requests that are on their way."""
        return self.stats.unfinished + self.num_sent

    @property
    def num_waiting_tokens(self) -> int:
        """Number of unscheduled prefill tokens, including requests that are on their way."""
        return self.stats.waiting_tokens + self.num_sent_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Number of prefill tokens that wait, are computed now or are on their way."""
        return self.num_waiting_tokens + self.stats.in_flight_prefill_tokens

    @property
    def num_kv_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        return self.num_blocks * self.block_size

    @property
    def num_used_kv_tokens(self) -> float:
        """Number of KV tokens in use."""
        return self.stats.kv_usage * self.num_kv_tokens


def median_coefficients(models: Sequence[StepCostCoefficients]) -> StepCostCoefficients | None:
    """Return the median of each coefficient of step time models; None for an empty list."""
    if not models:
        return None
    return StepCostCoefficients(*(median(values) for values in zip(*models, strict=True)))
