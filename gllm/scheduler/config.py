"""Configuration of the scheduler: hyper-parameters, their defaults and their ranges.

`gllm.config` derives the command-line flags from these fields.

Source of the symbols: "gLLM: Global Balanced Pipeline Parallelism System for Distributed LLM
Serving with Token Throttling" (SC'25, arXiv 2504.14775), section on token throttling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gllm.options.field_types import convert_fields
from gllm.options.options import INT32_MAX, EntryChoices, option
from gllm.scheduler.eviction import EVICTION_NAMES
from gllm.scheduler.lanes import LANE_NAMES
from gllm.scheduler.policy_entry import BASELINE_ENTRIES, expand_policy, load_policy
from gllm.scheduler.prefill_order import PREFILL_ORDERS
from gllm.scheduler.speculative_config import (
    SpeculativeConfig,
    parse_speculative_config,
    to_speculative_config,
)

POLICY_NAMES = (
    "auto",
    "throttle",
    "throttle-paper",
    "balance",
    "sarathi",
    "prefill-first",
    "vllm",
    "distserve",
    "splitwise",
    "tetri",
)
"""Names of the policies of gllm.scheduler.policy_registry, and `auto`."""

MAX_BATCHED_TOKENS = {
    "sarathi": 2048,
    "vllm": 4096,
    "distserve": 8192,
    "splitwise": 8192,
}
"""Default of max_num_batched_tokens by policy; #MaxP + 512 for the others."""

PREFILL_BATCH_TOKENS = {"distserve": 512, "splitwise": 2048, "tetri": 512}
"""Default of prefill_batch_tokens by policy, from the papers; the others do not use it."""

KV_ADMISSION_NAMES = (
    "auto",
    "greedy",
    "reserve-static",
    "reserve-dynamic",
    "reserve-max",
    "distserve",
)
"""Names of the rules of gllm.scheduler.kv_admission, and `auto`."""


class LocalPreset(NamedTuple):
    """Scheduler options that reproduce the engines of a published disaggregated system.

    The fields are the values of --policy, --prefill-order, --kv-admission and --kv-push.
    """

    policy: str
    prefill_order: str
    kv_admission: str
    kv_push: str


LOCAL_PRESETS: Mapping[str, LocalPreset] = {
    "distserve": LocalPreset("distserve", "fcfs", "distserve", "off"),
    "splitwise": LocalPreset("splitwise", "fcfs", "greedy", "layer"),
    "tetri": LocalPreset("tetri", "sjf", "reserve-dynamic", "off"),
    "flow": LocalPreset("distserve", "fcfs", "distserve", "off"),
}
"""By the name of the router's preset. Source: DistServe (arXiv 2401.09670), Splitwise (arXiv
2311.18677) and TetriInfer (arXiv 2401.11181), as set up in the evaluations; `flow` divides requests
as HexGen-2 (arXiv 2502.07903) does, and its engines batch as those of DistServe. Splitwise's
machines admit prompts while they have memory, as in the paper; its simulator reserves `max_tokens`.
"""

TCP_DEPTH = 4
"""Default of max_in_flight per stage for stages that are connected by TCP, where transfers take
longer than computation."""


STATE_SLOTS_PER_SEQ = 2
"""State slots for each of max_num_seqs sequences: its own, and the checkpoint from which it starts
or that it keeps. Fewer slots lower max_num_seqs."""

DEFAULT_THRESHOLD_TOKENS = 512
"""Prompt tokens from which on "Splitwise" sends KV per layer, on H100s: the threshold until it is
measured."""

SPECULATION_WITH_STATES = (
    "speculative_config rejects tokens that are computed already, but this model has recurrent "
    "layers, whose states cannot go back: leave speculative_config out, or choose a model without "
    "recurrent layers"
)


@dataclass(frozen=True)
class SchedulerConfig:
    """Scheduler options from the command line, and sizes of the pipeline that `resolve` adds.

    `resolve` also replaces options that are None by their defaults.
    """

    preset: str | None = option(
        None,
        "policy, prefill_order, kv_admission and kv_push of a system that separates prefill and "
        "decode, as the preset of the router needs them; default: none",
        choices=tuple(LOCAL_PRESETS),
    )
    policy: str = option(
        "auto",
        "scheduling policy; auto: throttle",
        choices=EntryChoices(POLICY_NAMES),
        parse=expand_policy,
    )
    max_prefill_tokens: int = option(
        2048, "#MaxP: maximum number of prefill tokens per micro-batch", ge=1, le=INT32_MAX
    )
    min_prefill_tokens: int = option(
        32, "#MinP: minimum number of prefill tokens per micro-batch", ge=1, le=INT32_MAX
    )
    prefill_iterations: int = option(
        8, "#T: number of micro-batches over which waiting prefill is spread", ge=1, le=INT32_MAX
    )
    ridge_tokens: int | None = option(
        None,
        "throttle, balance: tokens per micro-batch at which computing takes as long as reading the "
        "weights; default: fitted to the step times that the stages report",
        ge=1,
        le=INT32_MAX,
    )
    kv_threshold: float = option(
        0.05,
        "KV_thresh: prefill pauses while the free share of the cache is at most this",
        ge=0,
        lt=1,
    )
    max_num_batched_tokens: int | None = option(
        None,
        "maximum number of tokens per micro-batch; default: 2048 with sarathi, 4096 with vllm, "
        "8192 with distserve and splitwise, else #MaxP + 512",
        ge=1,
        le=INT32_MAX,
        is_common=True,
    )
    max_num_seqs: int = option(
        256, "maximum number of sequences that hold KV blocks", ge=1, le=INT32_MAX, is_common=True
    )
    max_in_flight: int | None = option(
        None,
        "maximum number of micro-batches in flight; default: number of stages, 4 times that if "
        "stages are connected by TCP, or 2 with one stage and async scheduling",
        ge=1,
        le=INT32_MAX,
    )
    prefill_order: str = option(
        "auto",
        "order of prompts; fcfs: by priority and arrival; sjf, ljf: groups by arrival, within a "
        "group the shortest or the longest first; auto: that of the preset, or fcfs",
        choices=("auto", *PREFILL_ORDERS),
    )
    prefill_group: int = option(
        16,
        "prompts per group of sjf and ljf; a group is prefilled before the next one is formed",
        ge=1,
        le=INT32_MAX,
    )
    prefill_batch_tokens: int | None = option(
        None,
        "prompt tokens per micro-batch; distserve (L_m, default 512) and splitwise (default 2048): "
        "maximum for several prompts, a longer one runs alone; tetri: chunk size (default 512). 0: "
        "as many as saturate the stages by their measured step times",
        ge=0,
        le=INT32_MAX,
    )
    kv_admission: str = option(
        "auto",
        "rule by which waiting sequences get KV blocks; auto: that of the policy; greedy: the "
        "prompt fits now; reserve-static, reserve-dynamic: it fits at the predicted length, or "
        "until the shortest output ends; reserve-max: all fit at max_tokens; distserve: it fits "
        "now, and prompts before their first decode have less than 5 % of the blocks",
        choices=KV_ADMISSION_NAMES,
    )
    kv_push: str = option(
        "auto",
        "when KV blocks of a prompt that another engine decodes can be fetched; off: after the "
        "prompt; layer, chunk: each layer or each chunk once it is computed; auto: that of the "
        "preset (splitwise: layer), or off",
        choices=("auto", "off", "layer", "chunk"),
    )
    kv_push_threshold: int | None = option(
        None,
        "theta: kv_push is for prompts of at least so many tokens to compute; default: as the "
        f"measured transfers say, {DEFAULT_THRESHOLD_TOKENS} at first",
        ge=0,
        le=INT32_MAX,
    )
    expected_output_tokens: int = option(
        256,
        "expected output tokens of a request before similar ones have finished; 0: none",
        ge=0,
        le=INT32_MAX,
    )
    lanes: str = option(
        "auto",
        "orders of micro-batches; 2: decodes overtake prefill, in micro-batches of their own, "
        "except over links faster than the stages; auto: 2 if stages of one rank are connected by "
        "TCP, else 1",
        choices=LANE_NAMES,
    )
    phase_pure: bool = option(False, "never mix prefill and decode in one micro-batch")
    async_scheduling: bool = option(
        True,
        "with one stage, schedule a decode before its input token is known",
        flags=("--async-scheduling", "--lookahead"),
    )
    speculative_config: SpeculativeConfig | None = option(  # noqa: RUF009
        None,
        "JSON object as in vLLM: guess tokens and verify several in one step, such as "
        '{"method": "ngram", "num_speculative_tokens": 5}; texts stay the same; default: none',
        parse=parse_speculative_config,
    )
    block_size: int = option(16, "tokens per KV block", ge=1, le=65536)
    prefix_cache: bool = option(
        True,
        "reuse the KV blocks of common prompt prefixes",
        flags=("--prefix-cache", "--enable-prefix-caching"),
        is_common=True,
    )
    prefix_cache_eviction: str = option(
        "lru",
        "cached KV blocks that are evicted first; lru: those used longest ago; return: those with "
        "the lowest learned rate at which their conversation returns",
        choices=EVICTION_NAMES,
    )
    stages: int = field(default=1, metadata={"derived": True})
    """Number of pipeline stages: #PP_depth."""
    num_blocks: int = field(default=0, metadata={"derived": True})
    """Number of KV blocks on each stage."""
    max_model_len: int = field(default=0, metadata={"derived": True})
    """Maximum length of a sequence in tokens, prompt and output."""
    num_state_slots: int = field(default=0, metadata={"derived": True})
    """Number of state slots on each stage; 0 for a model without recurrent layers."""

    def __post_init__(self) -> None:
        """Check and convert the fields.

        Raises:
            ValueError: a value is invalid; the message names the field and the fix.
        """
        if self.policy in BASELINE_ENTRIES:
            object.__setattr__(self, "policy", expand_policy(self.policy))
        config = to_speculative_config(self.speculative_config)
        object.__setattr__(self, "speculative_config", config)
        convert_fields(self)
        self._apply_preset()
        if self.min_prefill_tokens > self.max_prefill_tokens:
            raise ValueError(
                f"min_prefill_tokens ({self.min_prefill_tokens}) is above "
                f"max_prefill_tokens ({self.max_prefill_tokens}): lower one or raise the other"
            )

    def _apply_preset(self) -> None:
        """Replace `auto` by the values of the preset. Raises ValueError for another policy."""
        preset = LOCAL_PRESETS.get(
            self.preset or "", LocalPreset(self.policy, "fcfs", "auto", "off")
        )
        if self.policy not in ("auto", preset.policy):
            raise ValueError(
                f"policy is {self.policy}, but preset {self.preset} sets policy {preset.policy}: "
                "leave one of both out"
            )
        for name, value in preset._asdict().items():
            if getattr(self, name) == "auto":
                object.__setattr__(self, name, value)

    @property
    def push_threshold(self) -> int | None:
        """Least prompt length in tokens for which KV can be fetched during prefill; None: never.

        Measurements change it later if none is configured.
        """
        if self.kv_push in ("auto", "off"):
            return None
        is_measured = self.kv_push_threshold is None
        return DEFAULT_THRESHOLD_TOKENS if is_measured else self.kv_push_threshold

    @property
    def num_lanes(self) -> int:
        """Number of step orders, 1 or 2; with 2, decode steps may overtake prefill steps."""
        return 2 if self.lanes == "2" else 1

    def count_lanes(self, stages: int, has_tcp_edges: bool, num_ranks: int) -> int:
        """Return the number of step orders (1 or 2) of one pipeline.

        With 2, decode steps may overtake prefill steps. The arguments are those of `resolve`.
        """
        # The ranks of a stage have to compute the same steps in the same order.
        can_overtake = stages > 1 and num_ranks == 1
        is_wanted = has_tcp_edges if self.lanes == "auto" else self.lanes == "2"
        return 2 if can_overtake and is_wanted else 1

    def resolve(
        self,
        stages: int,
        num_blocks: int,
        max_model_len: int,
        has_tcp_edges: bool = False,
        num_ranks: int = 1,
        num_state_slots: int = 0,
    ) -> "SchedulerConfig":
        """Return this configuration for one pipeline, with every None replaced.

        Args:
            stages: number of pipeline stages.
            num_blocks: number of KV blocks on each stage.
            max_model_len: maximum length of a sequence in tokens.
            has_tcp_edges: True if stages on different machines are connected by TCP.
            num_ranks: largest number of ranks of a stage.
            num_state_slots: state slots on each stage; 0 for a model without recurrent layers.

        Raises:
            ValueError: the cache cannot hold one sequence of full length, or the policy is an
                entry `module:Class` that cannot be imported.
        """
        blocks_needed = -(-max_model_len // self.block_size)
        if num_blocks < blocks_needed:
            raise ValueError(
                f"the KV cache has {num_blocks} blocks of {self.block_size} tokens, but one "
                f"sequence of max_model_len {max_model_len} needs {blocks_needed}: raise "
                "--kv-cache-memory or lower --max-model-len"
            )
        max_num_seqs = self.max_num_seqs
        if num_state_slots:
            if self.speculative_config is not None:
                raise ValueError(SPECULATION_WITH_STATES)
            if num_state_slots < STATE_SLOTS_PER_SEQ:
                raise ValueError(
                    f"the memory holds {num_state_slots} state slots, but one sequence needs "
                    f"{STATE_SLOTS_PER_SEQ}: raise --kv-cache-memory"
                )
            max_num_seqs = min(max_num_seqs, num_state_slots // STATE_SLOTS_PER_SEQ)
        policy = self.policy
        if policy == "auto":
            policy = "throttle"
        # A placeholder would take the place of the window whose guesses come with its token.
        has_stage_drafts = (
            self.speculative_config is not None and self.speculative_config.is_drafted_by_stage
        )
        async_scheduling = self.async_scheduling and stages == 1 and not has_stage_drafts
        max_num_batched_tokens = (
            self.max_num_batched_tokens
            or _default_batched_tokens(policy)
            or self.max_prefill_tokens + 512
        )
        is_measured = self.prefill_batch_tokens == 0 and policy in PREFILL_BATCH_TOKENS
        prefill_batch_tokens = self.prefill_batch_tokens or PREFILL_BATCH_TOKENS.get(
            policy, max_num_batched_tokens
        )
        max_in_flight = 2 if async_scheduling else stages * (TCP_DEPTH if has_tcp_edges else 1)
        return replace(
            self,
            policy=policy,
            async_scheduling=async_scheduling,
            lanes=str(self.count_lanes(stages, has_tcp_edges, num_ranks)),
            max_in_flight=self.max_in_flight or max_in_flight,
            max_num_batched_tokens=max_num_batched_tokens,
            prefill_batch_tokens=0 if is_measured else prefill_batch_tokens,
            stages=stages,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            num_state_slots=num_state_slots,
        )


def _default_batched_tokens(policy: str) -> int | None:
    """Return the default of max_num_batched_tokens that a policy has of its own.

    Raises:
        ValueError: The policy is an entry `module:Class` that cannot be imported.
    """
    if ":" not in policy:
        return MAX_BATCHED_TOKENS.get(policy)
    tokens: int | None = getattr(load_policy(policy), "default_batched_tokens", None)
    return tokens
