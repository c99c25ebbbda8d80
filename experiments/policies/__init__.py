"""Scheduling policies that serve comparisons alone: baselines of Vidur, and parts of the throttle.

`gllm simulate --policy MODULE:CLASS` runs them, as do the planners and the experiments.
"""

VIDUR_BATCHED_TOKENS = 4096
"""Default of max_num_batched_tokens with Vidur's baselines (arXiv 2405.05465)."""
