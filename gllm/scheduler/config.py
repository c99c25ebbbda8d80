"""The scheduler's hyper-parameters, under the paper's names where it has one.

Owns their defaults, ranges and the derivation of what depends on the pipeline. Knows nothing of
command lines: `gllm.config` derives the flags from these fields.

Source of the symbols: "gLLM: Global Balanced Pipeline Parallelism System for Distributed LLM
Serving with Token Throttling" (SC'25, arXiv 2504.14775), section on token throttling.
"""

from dataclasses import dataclass, field, replace

from gllm.config.field_types import convert_fields
from gllm.config.options import INT32_MAX, option

POLICY_NAMES = (
    *("auto", "throttle", "throttle-paper", "throttle-no-wt", "throttle-no-ut"),
    *("balance", "sarathi", "prefill-first"),
)


@dataclass(frozen=True)
class SchedulerConfig:
    """What the user may set. None stands for a value that `resolve` derives."""

    policy: str = option(
        "auto",
        "how a micro-batch is filled; auto: sarathi at one stage, throttle at more",
        choices=POLICY_NAMES,
    )
    max_prefill_tokens: int = option(
        2048, "#MaxP: most prefill tokens in a micro-batch", ge=1, le=INT32_MAX
    )
    min_prefill_tokens: int = option(
        32, "#MinP: least prefill tokens in a micro-batch", ge=1, le=INT32_MAX
    )
    prefill_iterations: int = option(
        8, "#T: micro-batches over which waiting prefill is spread", ge=1, le=INT32_MAX
    )
    ridge_tokens: int = option(
        150,
        "tokens of a micro-batch whose arithmetic takes as long as reading the weights",
        ge=1,
        le=INT32_MAX,
    )
    kv_threshold: float = option(
        0.05, "KV_thresh: prefill pauses at this free share of the cache", ge=0, lt=1
    )
    max_num_batched_tokens: int | None = option(
        None,
        "most tokens in a micro-batch; default 2048 under sarathi, else #MaxP + 512",
        ge=1,
        le=INT32_MAX,
    )
    max_num_seqs: int = option(
        256, "most sequences holding KV blocks, over the whole pipeline", ge=1, le=INT32_MAX
    )
    max_in_flight: int | None = option(
        None,
        "most micro-batches in flight; default: stages, and 2 at one stage with lookahead",
        ge=1,
        le=INT32_MAX,
    )
    expected_output_tokens: int = option(
        256,
        "output tokens expected of a request before similar ones have ended; 0: expect none",
        ge=0,
        le=INT32_MAX,
    )
    phase_pure: bool = option(False, "never mix prefill and decode in one micro-batch")
    lookahead: bool = option(True, "at one stage, plan a decode before its input token is known")
    block_size: int = option(16, "tokens in a KV block", ge=1, le=65536)
    prefix_cache: bool = option(True, "keep computed blocks for prompts that begin alike")
    stages: int = field(default=1, metadata={"derived": True})
    """Pipeline stages: #PP_depth."""
    num_blocks: int = field(default=0, metadata={"derived": True})
    """KV blocks, the same number on every stage."""
    max_model_len: int = field(default=0, metadata={"derived": True})
    """Tokens of the longest sequence, prompt and output."""

    def __post_init__(self) -> None:
        """Raises ValueError that names the field and the fix."""
        convert_fields(self)
        if self.min_prefill_tokens > self.max_prefill_tokens:
            raise ValueError(
                f"min_prefill_tokens ({self.min_prefill_tokens}) is above "
                f"max_prefill_tokens ({self.max_prefill_tokens}): lower one or raise the other"
            )

    def resolve(self, stages: int, num_blocks: int, max_model_len: int) -> "SchedulerConfig":
        """This configuration for one pipeline, every None derived.

        Raises ValueError where the cache cannot hold one sequence of full length.
        """
        blocks_needed = -(-max_model_len // self.block_size)
        if num_blocks < blocks_needed:
            raise ValueError(
                f"the KV cache has {num_blocks} blocks of {self.block_size} tokens, but one "
                f"sequence of max_model_len {max_model_len} needs {blocks_needed}: raise "
                "--kv-cache-memory or lower --max-model-len"
            )
        policy = self.policy
        if policy == "auto":
            policy = "sarathi" if stages == 1 else "throttle"
        lookahead = self.lookahead and stages == 1
        batched = 2048 if policy == "sarathi" else self.max_prefill_tokens + 512
        return replace(
            self,
            policy=policy,
            lookahead=lookahead,
            max_in_flight=self.max_in_flight or (2 if lookahead else stages),
            max_num_batched_tokens=self.max_num_batched_tokens or batched,
            stages=stages,
            num_blocks=num_blocks,
            max_model_len=max_model_len,
        )
