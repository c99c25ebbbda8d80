"""Plot of the stages' time over the tokens per micro-batch."""

from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path

from gllm.sim.metrics.bar_plot import plot_bars


def plot_token_time(seconds_by_tokens: Mapping[str, float], path: str | Path) -> None:
    """Plot the share of the stages' time in micro-batches of at most n tokens.

    Source: the distribution in Figures 4 and 17 of "Splitwise" (ISCA 2024, arXiv 2311.18677).

    Args:
        seconds_by_tokens: Time by largest number of tokens, ascending (BatchFigures).
        path: The picture.

    Raises:
        ValueError: The suffix is neither .svg nor .png.
        ImportError: matplotlib is missing.
    """
    total = sum(seconds_by_tokens.values()) or 1.0
    sums = accumulate(seconds_by_tokens.values())
    bars = {
        tokens: {"micro-batches of at most so many tokens": 100 * part / total}
        for tokens, part in zip(seconds_by_tokens, sums, strict=True)
    }
    plot_bars(bars, path, "stages' time, %", "Time over tokens per micro-batch")
