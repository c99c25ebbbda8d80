"""Figures of conversations: tokens that were computed again, and latencies of later turns."""

from collections.abc import Iterable
from statistics import fmean
from typing import Any, NamedTuple

from gllm.observability.latency import percentile


class TurnResult(NamedTuple):
    """One served request of a conversation."""

    session: str
    """Conversation of the request."""
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    """Prompt tokens that were in the prefix cache."""
    ttft_seconds: float


def summarize_turns(turns: Iterable[TurnResult]) -> dict[str, Any]:
    """Return the figures of conversations by name.

    A later turn could have had the prompt and the answer of the turn before from the cache, up to
    a KV block; what it had not was recomputed. The tokens of first turns count as prompt only.

    Args:
        turns: Requests, those of a conversation in their order.
    """
    reusable: dict[str, int] = {}
    prompt = output = num_reusable = recomputed = 0
    first: list[float] = []
    later: list[float] = []
    for turn in turns:
        num_tokens = reusable.get(turn.session)
        if num_tokens is None:
            first.append(turn.ttft_seconds)
        else:
            later.append(turn.ttft_seconds)
            num_reusable += num_tokens
            recomputed += max(0, num_tokens - turn.num_cached_tokens)
        prompt += turn.num_prompt_tokens
        output += turn.num_output_tokens
        reusable[turn.session] = turn.num_prompt_tokens + turn.num_output_tokens
    return {
        "sessions": len(reusable),
        "later_turns": len(later),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "reusable_tokens": num_reusable,
        "recomputed_tokens": recomputed,
        "hit_share": 1 - recomputed / num_reusable if num_reusable else None,
        "first_ttft": _spread(first),
        "later_ttft": _spread(later),
    }


def _spread(seconds: list[float]) -> dict[str, float]:
    """Return mean and percentiles; empty without values."""
    if not seconds:
        return {}
    return {
        "mean": fmean(seconds),
        "p50": percentile(seconds, 50),
        "p90": percentile(seconds, 90),
        "p99": percentile(seconds, 99),
    }


def turn_lines(figures: dict[str, Any]) -> list[str]:
    """Return the figures of `summarize_turns` as lines of text."""
    lines = [
        f"sessions: {figures['sessions']}, {figures['later_turns']} later turns",
        f"prompt tokens: {figures['prompt_tokens']}, output tokens: {figures['output_tokens']}",
        f"tokens of earlier turns: {figures['reusable_tokens']}, "
        f"recomputed: {figures['recomputed_tokens']}",
    ]
    if figures["hit_share"] is not None:
        lines.append(f"hit share of later turns: {100 * figures['hit_share']:.1f} %")
    for name, label in (("first_ttft", "first turns"), ("later_ttft", "later turns")):
        if spread := figures[name]:
            shown = ", ".join(f"{key} {1000 * value:.0f} ms" for key, value in spread.items())
            lines.append(f"TTFT of {label}: {shown}")
    return lines
