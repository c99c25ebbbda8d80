"""Policies of a search, limited to the micro-batches that a profile of this machine has."""

from collections.abc import Sequence
from dataclasses import replace

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.profile import CostProfile


def cap_policies(
    policies: Sequence[tuple[str, int | None]], config: SchedulerConfig, profile: CostProfile
) -> tuple[tuple[tuple[str, int | None], ...], list[str]]:
    """Return policies whose micro-batches the profile has measured, and a note for each change.

    Two policies that become the same count once.

    Args:
        policies: Names, and tokens per micro-batch; None: the policy's default.
        config: Other options of the scheduler.
        profile: The measurement; larger micro-batches than its largest have no costs.
    """
    most = max(step.tokens for step in profile.steps)
    capped, notes = [], []
    for name, tokens in policies:
        # Of several stages, `auto` has another policy than of one.
        usual = max(_max_batched_tokens(config, name, tokens, stages) for stages in (1, 2))
        if usual <= most:
            capped.append((name, tokens))
            continue
        capped.append((name, most))
        text = name if tokens is None else f"{name}:{tokens}"
        notes.append(
            f"policy {text}: {most} instead of {usual} tokens per micro-batch, the most that the "
            f"profile has: `gllm profile --max-num-batched-tokens {usual}` measures more"
        )
    return tuple(dict.fromkeys(capped)), notes


def _max_batched_tokens(
    config: SchedulerConfig, policy: str, tokens: int | None, stages: int
) -> int:
    chosen = replace(config, policy=policy, max_num_batched_tokens=tokens)
    resolved = chosen.resolve(stages, num_blocks=1, max_model_len=1)
    assert resolved.max_num_batched_tokens is not None, "the configuration is resolved"
    return resolved.max_num_batched_tokens
